"""The standalone modules and the stage script run with torch 2.9 too, which AWS's torch-neuronx needs.

`make test-all` only: it makes an environment with torch 2.9 from the package registry; see `torch_2_9`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from whisperport.targets.toolchain import Installed, probe, run_driver
from whisperport.targets.vendors.aws_neuron import neuron_fused, neuron_modules
from whisperport.targets.vendors.aws_neuron.flags import CompileOptions

from ....extent import EVERYTHING
from ....published_dims import whisper_dims
from . import micro_modules
from .test_compiler import COMPILER, prepared
from .torch_2_9 import TOOLS, TORCH, environment

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(not EVERYTHING, reason="make test-all: it downloads torch 2.9, 0.9 GB"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs a C compiler and binutils"),
]
# Measured between torch 2.9.1 and 2.13.0, on one thread of an AMD EPYC: the micro modules are equal in all
# bits, in float32 and in bfloat16; whisper-tiny's sizes differ by at most 2.4e-7.
TOLERANCE = 1e-6
TINY = whisper_dims(384, 4)


@pytest.fixture(scope="module")
def older() -> Path:
    return environment()


def _outputs(
    interpreter: str, folder: Path, name: str, *further: str
) -> tuple[str, dict[str, np.ndarray]]:
    output = folder / f"{name}.npz"
    command = [interpreter, HERE / "run_modules.py", neuron_modules.__file__]
    files = [folder / micro_modules.DESCRIPTION, folder / micro_modules.WEIGHTS, output]
    done = subprocess.run([*command, *files, *further], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(output) as arrays:
        return done.stdout.strip(), dict(arrays)


@pytest.mark.parametrize("size", ["micro", "micro in bfloat16", "micro, fused", "tiny"])
def test_the_modules_compute_the_same_with_torch_2_9(size, older, tmp_path):
    dtype = "bfloat16" if "bfloat16" in size else "float32"
    micro_modules.write(tmp_path, dtype, TINY if size == "tiny" else micro_modules.DIMS)

    fused = (neuron_fused.__file__,) if size.endswith("fused") else ()

    ours, expected = _outputs(sys.executable, tmp_path, "ours")
    theirs, made = _outputs(str(older), tmp_path, "theirs", *fused)

    assert (ours, theirs.partition("+")[0]) == (torch.__version__, TORCH)
    assert expected.keys() == made.keys()
    for name, array in expected.items():
        largest = float(np.abs(array).max())
        assert 0 < largest < 1e4, name
        difference = float(np.abs(array - made[name]).max())
        assert difference <= TOLERANCE * max(1.0, largest), name


def test_the_stage_script_compiles_nothing_but_calls_the_tracer_as_documented_with_torch_2_9(
    older, tmp_path
):
    interpreter = _with_fake_sdk(tmp_path / "sdk", older)
    toolchain = Installed(interpreter, interpreter)

    assert probe(toolchain, COMPILER.script, COMPILER.settings()) is None
    for program in micro_modules.PROGRAMS:
        options = CompileOptions(fused_qkv=True, flash_attention=True, fused_conv=True)
        work = prepared(tmp_path / program, program, options)
        job = json.loads((work / "job.json").read_text())
        job["settings"] = dict(COMPILER.settings())
        (work / "job.json").write_text(json.dumps(job))
        assert run_driver(toolchain, work) is None
        built = json.loads((work / program / "built.json").read_text())
        assert built["versions"]["torch"] == TORCH
        assert (work / program / f"{program}.pt").stat().st_size > 0


def _with_fake_sdk(folder: Path, older: Path) -> Path:
    """Make an environment with the packages of `older` and the fake SDK; its `neuronx-cc` does nothing."""
    subprocess.run([older, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (source,) = older.parent.parent.glob("lib/python3*/site-packages")
    (packages / "older.pth").write_text(f"{source}\n")
    shutil.copy(HERE / "fake_torch_neuronx.py", packages / "torch_neuronx.py")
    shutil.copy(HERE / "signatures.json", packages)
    compiler = folder / "bin" / "neuronx-cc"
    compiler.write_text("#!/bin/false\n")
    compiler.chmod(0o755)
    return folder / "bin" / "python"
