"""A bundle of a random model of a few kilobytes whose encoder and step are on the NPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.targets import RunOptions
from whisperport.verification.clips import Clip

NPU_PROGRAMS = ("encoder", "step")
# For the calibration: 66 windows of 8 mel bins and 20 frames.
SPECTROGRAMS = np.random.default_rng(2).uniform(-1, 1, (66, 1, 8, 20)).astype(np.float32)


@pytest.fixture(scope="session")
def micro_on_npu(
    micro_checkpoint: Any, micro_programs: tuple[Any, ...], tmp_path_factory: Any
) -> Path:
    """Return the exported bundle; `calibration.npy` is beside it. Do not write to it: copy it."""
    from whisperport.model.trace import variants

    work: Path = tmp_path_factory.mktemp("ethos-u")
    np.save(work / "calibration.npy", SPECTROGRAMS)
    samples = (0.1 * np.random.default_rng(0).standard_normal(3200)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "whisper_programs", lambda *_, **__: iter(micro_programs))
        options = ExportOptions(
            clips=(Clip("hiss", "so", samples),),
            placement=dict.fromkeys(NPU_PROGRAMS, "ethos-u85"),
            run=RunOptions(threads=1),
            allow_unverified=True,  # random weights give words of chance
        )
        return export(micro_checkpoint, "onnxruntime", work / "bundle", options).folder
