"""What is installed here, what is missing, and how to get it."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from whisperport import targets
from whisperport.errors import UsageError
from whisperport.spec import Package
from whisperport.toolchain import find_interpreter, variable
from whisperport.verification.machine import versions

# What tells whether an extra is installed. Those of single targets are in their specs.
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
    "litert": (Package("ai_edge_litert", "ai-edge-litert"),),
    "live": (Package("sounddevice", "sounddevice"),),
    "openvino": (Package("openvino", "openvino"),),
    "xnnpack": (
        Package("torch", "torch"),
        Package("executorch", "executorch"),
        Package("torchao", "torchao"),
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One package that some part of whisperport needs."""

    package: str
    version: str  # or where it is, or "not installed"
    needed_for: str
    fix: str  # the command that installs it, or where it comes from; empty when it is there


def extras() -> dict[str, tuple[Package, ...]]:
    """Every extra, and what it installs or needs from elsewhere."""
    found = dict(GENERAL)
    for target in targets.TARGETS:
        found |= target.spec.packages
    return dict(sorted(found.items()))


def examine() -> tuple[Finding, ...]:
    """Every package of every extra, once for each use, and every vendor's compiler. Imports none."""
    packages = [
        _finding(extra, package) for extra, packages in extras().items() for package in packages
    ]
    return (*packages, *_toolchains())


def is_installed(extra: str) -> bool:
    """Whether every package of an extra is there; looked for, not imported."""
    return all(_is_there(package.module) for package in extras()[extra])


def _finding(extra: str, package: Package) -> Finding:
    there = _is_there(package.module)
    wanted = f"whisperport[{extra}]" if extra else "whisperport"
    command = package.source or f'pip install "{wanted}"'
    users = [t.spec.name for t in targets.TARGETS if extra in (t.spec.extra, t.spec.run_extra)]
    needed = f"[{extra}] {', '.join(users)}" if extra else "the core"
    version = versions([package.name])[package.name]
    return Finding(package.name, version, needed, "" if there else command)


def _toolchains() -> Iterator[Finding]:
    """The SDK of every vendor's compiler, and the interpreter that has it."""
    compilers = [t.compiler for t in targets.TARGETS if t.compiler is not None]
    for toolchain, sdk in {compiler.toolchain: compiler.sdk for compiler in compilers}.items():
        try:
            interpreter = find_interpreter(toolchain, sdk, {})
        except UsageError:  # the environment names one that is not there
            interpreter = None
        yield Finding(
            sdk,
            f"in {interpreter}" if interpreter else "not installed",
            f"compiling with {toolchain}",
            "" if interpreter else f"set {variable(toolchain)} to the Python that has it",
        )


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
