"""The built-in programs in the form that each target gets."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.model.trace.program import Program
from whisperport.targets import RunOptions
from whisperport.verification.clips import Clip

from ..extent import core_or_all


@pytest.fixture(scope="session")
def rewritten(request: pytest.FixtureRequest) -> Callable[[Sequence[str]], list[Program]]:
    """Return `rewritten(names)`: the programs of a random model after these rewrites."""
    from whisperport.model.network.whisper import build_model
    from whisperport.model.rewrites import run_rewrites
    from whisperport.model.trace.variants import whisper_programs
    from whisperport.model.trace.whisper import Parts

    @cache
    def traced() -> tuple[Program, ...]:
        names = ("encoder", "cross_kv", "prefill_4", "step", "align")
        checkpoint = request.getfixturevalue(core_or_all("one_layer_checkpoint", "tiny_checkpoint"))
        return tuple(whisper_programs(Parts(build_model(checkpoint), [(0, 0)]), names))

    @cache
    def after(names: tuple[str, ...]) -> list[Program]:
        return [run_rewrites(program, names)[0] for program in traced()]

    return after


@pytest.fixture(scope="session")
def micro_bundle_on(
    micro_checkpoint: Any, micro_programs: tuple[Program, ...], tmp_path_factory: Any
) -> Callable[[str, str], Path]:
    """`micro_bundle_on(chip, program)`: the micro model in ONNX Runtime, with one program on a chip."""
    from whisperport.model.trace import variants

    noise = (0.1 * np.random.default_rng(0).standard_normal(3200)).astype(np.float32)

    def make(chip: str, program: str) -> Path:
        options = ExportOptions(
            clips=(Clip("hiss", "so", noise),),
            placement={program: chip},
            run=RunOptions(threads=1),
            allow_unverified=True,  # random weights give words of chance
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                variants,
                "whisper_programs",
                lambda _, names, *__: (one for one in micro_programs if one.name in names),
            )
            folder = tmp_path_factory.mktemp(chip) / "bundle"
            return export(micro_checkpoint, "onnxruntime", folder, options).folder

    return make


@pytest.fixture(scope="session")
def short_features(micro: Any) -> Callable[[np.ndarray], np.ndarray]:
    """`short_features(mel)`: what torch computes with the first rows of the table of positions."""

    import torch

    def computed(mel: np.ndarray) -> np.ndarray:
        encoder = copy.deepcopy(micro.encoder)
        table = encoder.positional_embedding[: mel.shape[2] // 2]
        encoder.positional_embedding = torch.nn.Parameter(table, requires_grad=False)
        with torch.no_grad():
            features: np.ndarray = encoder(torch.from_numpy(mel)).numpy()
        return features

    return computed
