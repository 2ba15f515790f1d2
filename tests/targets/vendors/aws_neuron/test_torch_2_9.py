"""With torch 2.9, which AWS's torch-neuronx needs, the standalone modules run, and PyTorch/XLA traces them.

`make test-all` only: a Python environment with torch 2.9 and torch_xla is made from the package registry.
torch-neuronx is built on the tracer of PyTorch/XLA.

The registry has torch 2.9.1 for x86-64 Linux only with CUDA: with all of NVIDIA's libraries, which
nothing here calls, the environment has 7 GB. `torch`, the CUDA runtime and CUPTI alone are 0.9 GB to
download and 2.3 GB on disk. Only the dynamic linker needs NVIDIA's other libraries: each is replaced by a
library whose functions return 1, an error of CUDA. They are compiled here from torch's own list of missing
symbols, in about five seconds. torch then runs on the CPU, and reports that there is no GPU.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from whisperport.targets.toolchain import Installed, probe, run_driver
from whisperport.targets.vendors.aws_neuron import neuron_modules
from whisperport.targets.vendors.aws_neuron.flags import CompileOptions

from ....extent import EVERYTHING
from ....micro import whisper_dims
from . import micro_modules
from .hlo.read_hlo import MODULE
from .hlo.traced_hlo import CHECKS, failures, read
from .test_compiler import COMPILER, prepared

HERE = Path(__file__).parent
# Measured between torch 2.9.1 and 2.13.0, on one thread of an AMD EPYC: the micro modules are equal in all
# bits, in float32 and in bfloat16; whisper-tiny's sizes differ by at most 2.4e-7.
TOLERANCE = 1e-6
TINY = whisper_dims(384, 4)
TORCH = "2.9.1"
REAL = ("nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cuda-cupti-cu12==12.8.90")
PURE = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "numpy<3")
NVIDIA = re.compile(r"lib(cu|nv|nccl)")
PROVIDED = ("libcudart.so.12", "libcupti.so.12")  # by REAL
UNVERSIONED = re.compile(
    r"(cu|nv|nccl)[A-Za-z]"
)  # NVIDIA's functions in libraries without versions
TOOLS = ("cc", "nm", "objdump")
TORCH_XLA = ("torch_xla==2.9.0", "absl-py", "pyyaml", "requests")
pytestmark = [
    pytest.mark.skipif(
        not EVERYTHING, reason="make test-all: it downloads torch 2.9 and torch_xla, 1 GB"
    ),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs a C compiler and binutils"),
]


@pytest.fixture(scope="module")
def older() -> Path:
    return environment()


def _outputs(interpreter: str, folder: Path, name: str) -> tuple[str, dict[str, np.ndarray]]:
    output = folder / f"{name}.npz"
    command = [interpreter, HERE / "older_torch.py", "run", neuron_modules.__file__]
    files = [folder / micro_modules.DESCRIPTION, folder / micro_modules.WEIGHTS, output]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(output) as arrays:
        return done.stdout.strip(), dict(arrays)


@pytest.mark.parametrize("size", ["micro", "micro in bfloat16", "tiny"])
def test_the_modules_compute_the_same_with_torch_2_9(size, older, tmp_path):
    dtype = "bfloat16" if "bfloat16" in size else "float32"
    micro_modules.write(tmp_path, dtype, TINY if size == "tiny" else micro_modules.DIMS)

    ours, expected = _outputs(sys.executable, tmp_path, "ours")
    theirs, made = _outputs(str(older), tmp_path, "theirs")

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
        work = prepared(tmp_path / program, program, CompileOptions())
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


def environment() -> Path:
    """Return the interpreter of an environment with torch 2.9, which is made if it is not there.

    It is kept in the folder of temporary files, or where WHISPERPORT_TORCH_2_9 says.
    """
    tag = f"{sys.version_info[0]}.{sys.version_info[1]}-{platform.machine()}"
    parent = Path(os.environ.get("WHISPERPORT_TORCH_2_9", tempfile.gettempdir()))
    folder = parent / f"whisperport-torch-{TORCH}-{tag}"
    interpreter = folder / "bin" / "python"
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not interpreter.exists():
            partial = folder.with_name("partial-" + folder.name)
            shutil.rmtree(partial, ignore_errors=True)
            _make(partial)
            partial.replace(folder)
    return interpreter


def _make(folder: Path) -> None:
    _run(sys.executable, "-m", "venv", str(folder))
    python = str(folder / "bin" / "python")
    install = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
    _run(*install, *PURE)
    on_x86 = platform.machine() == "x86_64"  # elsewhere, the wheel has no CUDA
    _run(*install, "--no-deps", f"torch=={TORCH}", *(REAL if on_x86 else ()))
    (libraries,) = folder.glob("lib/python3*/site-packages/torch/lib")
    if on_x86:
        replace_missing_libraries(libraries, folder)
    _run(python, "-c", f"import torch; assert torch.__version__.startswith('{TORCH}')")


def replace_missing_libraries(libraries: Path, scratch: Path) -> None:
    """Compile a library for each of NVIDIA's that torch's libraries need and that is not installed."""
    owners, needed, missing, defined = {}, set(), {}, set()
    for path in [*libraries.glob("lib*torch*.so"), libraries / "libc10_cuda.so"]:
        headers = _run("objdump", "-p", str(path))
        needed |= {name for name in re.findall(r"NEEDED\s+(\S+)", headers) if NVIDIA.match(name)}
        for library, versions in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)+)", headers):
            if NVIDIA.match(library):
                owners.update(
                    dict.fromkeys(re.findall(r"0x\S+ 0x\S+ \d+ (\S+)", versions), library)
                )
        for line in _run("nm", "-D", "--with-symbol-versions", str(path)).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind == "U":
                missing[name] = version
            else:
                defined.add(name)
    anywhere = min(needed - {*PROVIDED, *owners.values()})  # a library without versions
    functions: dict[str, list[str]] = {library: [] for library in needed - set(PROVIDED)}
    for name, version in missing.items():
        is_free = not version and UNVERSIONED.match(name)
        library = owners.get(version, anywhere if is_free else "")
        if library in functions and name not in defined:
            functions[library].append(name)
    for library, names in functions.items():
        source, versions = scratch / "stub.c", scratch / "stub.map"
        source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
        version = next((one for one, owner in owners.items() if owner == library), "")
        versions.write_text(f"{version} {{ *; }};\n")
        script = [f"-Wl,--version-script={versions}"] if version else []
        made = str(libraries / library)
        _run(
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            f"-Wl,-soname,{library}",
            *script,
            str(source),
            "-o",
            made,
        )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command[:4])}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HLO of every micro program."""
    folder = tmp_path_factory.mktemp("torch_xla")
    micro_modules.write(folder)
    interpreter = environment()
    files = [folder / micro_modules.DESCRIPTION, folder / micro_modules.WEIGHTS, folder]
    command = [
        interpreter,
        HERE / "older_torch.py",
        "trace",
        neuron_modules.__file__,
        *files,
    ]
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
