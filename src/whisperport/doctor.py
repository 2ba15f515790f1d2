"""What is installed here, what is missing, and how to get it."""

import importlib.util
from dataclasses import dataclass

from whisperport.targets import TARGETS
from whisperport.verification.machine import versions

# Import names, and the distribution each comes from, that tell whether an extra is installed.
EXTRAS: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("numpy", "numpy"),
        ("onnxruntime", "onnxruntime"),
        ("tokenizers", "tokenizers"),
        ("av", "av"),
    ),
    "export": (
        ("torch", "torch"),
        ("onnx", "onnx"),
        ("onnxscript", "onnxscript"),
        ("safetensors", "safetensors"),
        ("huggingface_hub", "huggingface-hub"),
    ),
    "hailo": (("xxhash", "xxhash"), ("hailo_platform", "hailort")),
    "litert": (("ai_edge_litert", "ai-edge-litert"),),
    "live": (("sounddevice", "sounddevice"),),
    "openvino": (("openvino", "openvino"),),
    "xnnpack": (("torch", "torch"), ("executorch", "executorch"), ("torchao", "torchao")),
}

# What no package index has, and where it comes from.
VENDORS = {"hailort": "get HailoRT, with its Python package, at Hailo's"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One package that some part of whisperport needs."""

    package: str
    version: str  # or "not installed"
    needed_for: str
    fix: str  # the command that installs it, or where it comes from; empty when it is there


def examine() -> tuple[Finding, ...]:
    """Every package of every extra, once for each use. Imports none of them."""
    return tuple(
        _finding(extra, module, package)
        for extra, packages in EXTRAS.items()
        for module, package in packages
    )


def is_installed(extra: str) -> bool:
    """Whether every package of an extra is there; looked for, not imported."""
    return all(_is_there(module) for module, _ in EXTRAS[extra])


def _finding(extra: str, module: str, package: str) -> Finding:
    there = _is_there(module)
    wanted = f"whisperport[{extra}]" if extra else "whisperport"
    command = VENDORS.get(package, f'pip install "{wanted}"')
    users = [t.spec.name for t in TARGETS if extra in (t.spec.extra, t.spec.run_extra)]
    needed = f"[{extra}] {', '.join(users)}" if extra else "the core"
    return Finding(package, versions([package])[package], needed, "" if there else command)


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
