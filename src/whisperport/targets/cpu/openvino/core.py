"""The one `openvino.Core` of the process."""

from functools import cache
from typing import Any


def shared_core() -> Any:
    """Return the process's `openvino.Core`, which lives until the process ends.

    OpenVINO's CPU plugin gives the thread an alternate stack for signals when a `Core` loads it, and takes
    it back when the `Core` is deleted. If two exist and the first is deleted first, the thread is left
    with a stack that is no longer mapped, and the next signal, such as Ctrl-C, is a segmentation fault.

    Source: openvino 2026.4.1, sigstack_manager.cpp of the plugin `intel_cpu`.

    Raises:
        ImportError: OpenVINO is not installed.
    """
    import openvino

    return _core_of(openvino)


@cache
def _core_of(openvino: Any) -> Any:
    return openvino.Core()
