"""List the packages and compilers that whisperport uses: installed or missing, and how to install them."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from whisperport import targets
from whisperport.errors import UsageError, WhisperportError
from whisperport.program.execution_providers import Device, list_devices
from whisperport.program.spec import Package
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.targets.toolchain import variable
from whisperport.verification.machine import versions

LISTING = Limits(memory_bytes=4 * 2**30, seconds=60.0)  # of the process that lists devices

# pip extra -> packages that show whether it is installed; "" is the core. The specs of targets list more.
GENERAL: dict[str, tuple[Package, ...]] = {
    "": (
        Package("numpy", "numpy"),
        Package("onnxruntime", "onnxruntime"),
        Package("tokenizers", "tokenizers"),
        Package("av", "av"),
    ),
    "export": (
        Package("torch", "torch"),
        Package("onnx", "onnx"),
        Package("onnxscript", "onnxscript"),
        Package("safetensors", "safetensors"),
        Package("huggingface_hub", "huggingface-hub"),
    ),
    "transformers": (Package("transformers", "transformers"),),
    "live": (Package("sounddevice", "sounddevice"),),
    "xnnpack": (
        Package("torch", "torch"),
        Package("executorch", "executorch"),
        Package("torchao", "torchao"),
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One package or SDK that a part of whisperport needs.

    Attributes:
        package: name of the distribution, or of the SDK's Python package.
        version: its version, the interpreter that has it, or "not installed".
        needed_for: the part of whisperport that needs it.
        fix: the command that installs it, or where to get it; empty if it is installed.
    """

    package: str
    version: str
    needed_for: str
    fix: str


def extras() -> dict[str, tuple[Package, ...]]:
    """Return pip extra -> the packages that it installs or that the user must install from elsewhere."""
    packages = dict(GENERAL)
    for target in targets.TARGETS:
        packages |= target.spec.software.packages
    return dict(sorted(packages.items()))


def examine() -> tuple[Finding, ...]:
    """Look for every package of every extra, and for every vendor's compiler, without importing them.

    A package that several extras need is listed once per extra.
    """
    packages = [
        _finding(extra, package) for extra, packages in extras().items() for package in packages
    ]
    return (*packages, *_toolchains())


def devices() -> tuple[Device, ...] | str:
    """Return the devices that ONNX Runtime can use, of all execution providers; or why they are not known.

    They are listed in a process of its own, which loads the libraries of others.
    """
    try:
        listed = run_limited(f"{list_devices.__module__}:{list_devices.__name__}", {}, LISTING)
    except (StoppedError, WhisperportError) as error:
        return str(error)
    return tuple(Device(**device) for device in listed)


def is_installed(extra: str) -> bool:
    """Return whether every package of an extra is installed. The packages are not imported."""
    return all(_is_importable(package.module) for package in extras()[extra])


def _finding(extra: str, package: Package) -> Finding:
    installed = _is_importable(package.module)
    requirement = f"whisperport[{extra}]" if extra else "whisperport"
    command = package.source or f'pip install "{requirement}"'
    users = [
        t.spec.name
        for t in targets.TARGETS
        if extra in (t.spec.software.extra, t.spec.software.run_extra)
    ]
    needed = f"[{extra}] {', '.join(users)}" if extra else "the core"
    version = versions([package.name])[package.name]
    return Finding(package.name, version, needed, "" if installed else command)


def _toolchains() -> Iterator[Finding]:
    """Yield a finding for the SDK of every vendor's compiler: where it is, if it is here."""
    compilers = [t.compiler for t in targets.TARGETS if t.compiler is not None]
    for toolchain, compiler in {compiler.toolchain: compiler for compiler in compilers}.items():
        try:
            installation = compiler.installed({})
        except UsageError:  # the environment variable names a path that does not exist
            installation = None
        owner = "folder of the SDK" if compiler.is_command else "Python interpreter"
        yield Finding(
            compiler.sdk,
            f"in {installation.path}" if installation else "not installed",
            f"compiling with {toolchain}",
            "" if installation else f"set {variable(toolchain)} to the {owner} that has it",
        )


def _is_importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
