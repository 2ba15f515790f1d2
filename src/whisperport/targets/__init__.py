"""The targets, one per file. The list is a list: no discovery, no entry points."""

from whisperport.errors import UsageError
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.onnxruntime import OnnxRuntime
from whisperport.targets.xnnpack import Xnnpack

TARGETS: tuple[Target, ...] = (OnnxRuntime(), Xnnpack())

__all__ = ["TARGETS", "RunOptions", "Target", "get_target"]


def get_target(name: str) -> Target:
    """The target called `name`.

    Raises:
        UsageError: there is none.
    """
    for target in TARGETS:
        if target.spec.name == name:
            return target
    raise UsageError(
        f"no target is called `{name}`",
        hint=f"known: {', '.join(target.spec.name for target in TARGETS)}",
    )
