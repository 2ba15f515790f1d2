"""The HLO that PyTorch/XLA traces of the standalone modules: torch-neuronx is built on this tracer.

`make test-all` only: it needs torch 2.9 and torch_xla 2.9, which are installed from the package registry.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from whisperport.targets.vendors.aws_neuron import neuron_modules

from .....extent import EVERYTHING
from .. import micro_modules
from ..torch_2_9 import TOOLS, environment
from .read_hlo import MODULE
from .traced_hlo import CHECKS, failures, read

HERE = Path(__file__).parent
TORCH_XLA = ("torch_xla==2.9.0", "absl-py", "pyyaml", "requests")
pytestmark = [
    pytest.mark.skipif(not EVERYTHING, reason="make test-all: it downloads torch_xla 2.9, 80 MB"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs a C compiler and binutils"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HLO of every micro program."""
    folder = tmp_path_factory.mktemp("torch_xla")
    micro_modules.write(folder)
    interpreter = environment()
    files = [folder / micro_modules.DESCRIPTION, folder / micro_modules.WEIGHTS, folder]
    command = [interpreter, HERE / "trace_with_torch_xla.py", neuron_modules.__file__, *files]
    packages = str(_torch_xla(interpreter))
    variables = {**os.environ, "PYTHONPATH": packages, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def _torch_xla(interpreter: Path) -> Path:
    """Return a folder with torch_xla for the environment, which is made if it is not there."""
    packages = interpreter.parents[1] / "torch_xla"
    with FileLock(packages.with_name("torch_xla.lock")):
        if not packages.is_dir():
            partial = packages.with_name("torch_xla.partial")
            shutil.rmtree(partial, ignore_errors=True)
            install = [interpreter, "-m", "pip", "install", "--quiet", "--target", partial]
            subprocess.run([*install, *TORCH_XLA[1:]], check=True)
            subprocess.run([*install, "--no-deps", TORCH_XLA[0]], check=True)
            partial.replace(packages)
    return packages


@pytest.mark.parametrize("program", micro_modules.PROGRAMS)
def test_what_pytorch_xla_traces_has_nothing_that_a_token_must_not_cost(
    folder: Path, program: str
) -> None:
    stated = json.loads((folder / f"{program}.json").read_text())
    names = stated["names"]
    resident = [name for name in names if not name.startswith("input ")]
    module = MODULE.FromString((folder / f"{program}.hlo.pb").read_bytes())

    plain = read(module.SerializeToString(), names, resident, micro_modules.DIMS)
    for name, output in stated["aliases"].items():  # torch-neuronx states them like this
        entry = module.input_output_alias.entries.add(output_shape_index=[output])
        entry.parameter_number = names.index(name)
    aliased = read(module.SerializeToString(), names, resident, micro_modules.DIMS)

    if program in micro_modules.DECODERS:
        assert failures(plain) == {"caches_without_alias"}
        assert len(aliased.hlo.aliases) == 2 * micro_modules.LAYERS
        assert failures(aliased) == set()
        assert {name for name in names if "cross_" in name[:6]} == {
            f"cross_{kind}.{layer}" for kind in "kv" for layer in range(micro_modules.LAYERS)
        }
    else:
        assert CHECKS["int64"](plain) == CHECKS["dynamic_shapes"](plain) == []
        assert CHECKS["repeated_work"](plain) == []
        assert len(aliased.hlo.graph.outputs) == 2 * micro_modules.LAYERS + (program == "encoder")
