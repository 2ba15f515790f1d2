"""The targets, one per file. The list is a list: no discovery, no entry points."""

from whisperport.errors import UsageError
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.hailo.chips import HAILO8, HAILO8L, HAILO10H
from whisperport.targets.hailo.target import Hailo
from whisperport.targets.onnxruntime import OnnxRuntime
from whisperport.targets.xnnpack.target import Xnnpack

TARGETS: tuple[Target, ...] = (
    OnnxRuntime(),
    Xnnpack(),
    Hailo(HAILO8),
    Hailo(HAILO8L),
    Hailo(HAILO10H),
)

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
