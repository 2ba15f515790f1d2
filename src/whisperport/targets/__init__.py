"""All targets. To add one, add its module to `MODULES`; entry points are not used.

A module is imported when a target is looked for that no earlier module has, so that a transcriber does not
wait for the import of the others.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from whisperport.errors import UsageError
from whisperport.targets.base import RunOptions, Target

if TYPE_CHECKING:
    from whisperport.profiling import Profiler

__all__ = ["PROFILERS", "RUNTIMES", "TARGETS", "RunOptions", "Target", "get_target"]

# Each has `TARGETS`: the targets of one vendor or runtime.
MODULES = (
    "onnxruntime",
    "xnnpack.target",
    "litert.target",
    "openvino.target",
    "hailo.target",
    "mediatek.target",
    "qualcomm.target",
    "rockchip.target",
    "ethos_u.target",
    "aws_neuron.target",
)

TARGETS: tuple[Target, ...]  # every target; this and what follows are made when they are first used
# What measures compiled programs of a format that only one target has.
PROFILERS: "tuple[Profiler, ...]"
# Packages that run programs without a vendor's compiler.
RUNTIMES: tuple[str, ...]


def get_target(name: str) -> Target:
    """Return the target called `name`.

    Raises:
        UsageError: there is no such target.
    """
    others = []
    for target in globals().get("TARGETS") or _one_by_one():
        if target.spec.name == name:
            found: Target = target
            return found
        others.append(target.spec.name)
    raise UsageError(f"there is no target `{name}`", hint=f"targets are {', '.join(others)}")


def _one_by_one() -> Iterator[Target]:
    """Return all targets in their order; a module is imported when its first target is next."""
    for module in MODULES:
        yield from import_module(f"{__name__}.{module}").TARGETS


def __getattr__(name: str) -> Any:
    """Make `TARGETS`, `PROFILERS` or `RUNTIMES` when it is first used."""
    if name == "TARGETS":
        value: Any = tuple(_one_by_one())
    elif name == "PROFILERS":
        value = tuple(one.profiler for one in _one_by_one() if one.profiler is not None)
    elif name == "RUNTIMES":
        value = tuple(
            dict.fromkeys(one.spec.runtime for one in _one_by_one() if one.compiler is None)
        )
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, value)
