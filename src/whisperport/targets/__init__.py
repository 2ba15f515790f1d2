"""All targets. To add one, add its module to `MODULES`; entry points are not used.

A module is imported when a target is looked for that no earlier module has, so that a transcriber does not
wait for the import of the others.
"""

import difflib
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from whisperport.errors import UsageError
from whisperport.targets.base import RunOptions, Target

if TYPE_CHECKING:
    from whisperport.program.profiling import Profiler

__all__ = ["PROFILERS", "RUNTIMES", "TARGETS", "RunOptions", "Target", "get_target"]

# Each has `TARGETS`: the targets of one vendor or runtime.
MODULES = (
    "cpu.onnxruntime",
    "cpu.xnnpack.target",
    "cpu.litert",
    "cpu.openvino.target",
    "vendors.hailo.target",
    "vendors.mediatek.target",
    "vendors.qualcomm.target",
    "vendors.rockchip.target",
    "vendors.ethos_u.target",
    "vendors.aws_neuron.target",
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
    known: list[Target] = []
    for target in globals().get("TARGETS") or _one_by_one():
        if target.spec.name == name:
            match: Target = target
            return match
        known.append(target)
    near = similar_targets(name, known)
    raise UsageError(
        f"there is no target `{name[:40]}`",
        why=f"the targets with a similar name or description are {', '.join(near)}" if near else "",
        hint="choose one of these; `whisperport targets` describes all targets"
        if near
        else f"targets are {', '.join(candidate.spec.name for candidate in known)}",
    )


def similar_targets(name: str, targets: Sequence[Target]) -> list[str]:
    """Return the targets that a name can mean: misspelt, or a word for a vendor, a chip or a processor.

    The words of a target are its name, its summary, and the name and the `VENDOR_WORDS` of its folder. What
    a summary says after a semicolon is about another processor, which runs the rest.
    """
    word = name.lower()
    if meant := [
        target.spec.name for target in targets if len(word) > 2 and word in _words(target)
    ]:
        return meant
    return difflib.get_close_matches(
        word, [target.spec.name for target in targets], n=3, cutoff=0.8
    )


def _words(target: Target) -> str:
    group, folder = type(target).__module__.removeprefix(f"{__name__}.").split(".")[:2]
    words = getattr(sys.modules.get(f"{__name__}.{group}.{folder}"), "VENDOR_WORDS", ())
    main = target.spec.summary.partition(";")[0]
    return " ".join((target.spec.name, main, folder, *words)).lower()


def _one_by_one() -> Iterator[Target]:
    """Return all targets in their order; a module is imported when its first target is next."""
    for module in MODULES:
        yield from import_module(f"{__name__}.{module}").TARGETS


def __getattr__(name: str) -> Any:
    """Make `TARGETS`, `PROFILERS` or `RUNTIMES` when it is first used."""
    if name == "TARGETS":
        value: Any = tuple(_one_by_one())
    elif name == "PROFILERS":
        value = tuple(target.profiler for target in _one_by_one() if target.profiler is not None)
    elif name == "RUNTIMES":
        value = tuple(
            dict.fromkeys(
                target.spec.software.runtime for target in _one_by_one() if target.compiler is None
            )
        )
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, value)
