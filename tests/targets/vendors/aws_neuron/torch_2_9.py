"""Make a Python environment with torch 2.9, which AWS's torch-neuronx needs; whisperport has a later torch.

The package registry has torch 2.9.1 for x86-64 Linux only with CUDA: with all of NVIDIA's libraries, which
nothing here calls, the environment has 7 GB. `torch`, the CUDA runtime and CUPTI alone are 0.9 GB to
download and 2.3 GB on disk. Only the dynamic linker needs NVIDIA's other libraries: each is replaced by a
library whose functions return 1, an error of CUDA. They are compiled here from torch's own list of missing
symbols, in about five seconds. torch then runs on the CPU, and reports that there is no GPU.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

TORCH = "2.9.1"
REAL = ("nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cuda-cupti-cu12==12.8.90")
PURE = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "numpy<3")
NVIDIA = re.compile(r"lib(cu|nv|nccl)")
PROVIDED = ("libcudart.so.12", "libcupti.so.12")  # by REAL
UNVERSIONED = re.compile(
    r"(cu|nv|nccl)[A-Za-z]"
)  # NVIDIA's functions in libraries without versions
TOOLS = ("cc", "nm", "objdump")


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
