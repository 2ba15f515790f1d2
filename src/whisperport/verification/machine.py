"""Describe the machine and the packages of a measurement, without data that identifies its owner."""

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whisperport.system.machine import instruction_sets, text_of

BOARD = Path("/sys/firmware/devicetree/base/model")  # "Raspberry Pi 5 Model B Rev 1.0"
CPUS = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """Describe processor, instruction sets, number of usable cores, memory, operating system and Python.

    The description has no host name, user name or path.
    """
    return {
        "cpu": _cpu(),
        "architecture": platform.machine(),
        "instruction_sets": " ".join(instruction_sets()),
        "cores": len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count(),
        "memory_mib": _memory_mib(),
        "os": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package, or "not installed"."""
    installed = {}
    for name in names:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


_HAS_AFFINITY = hasattr(os, "sched_getaffinity")  # Linux


def _cpu() -> str:
    board = text_of(BOARD).strip("\0 \n")
    for line in text_of(CPUS).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return f"{board}, {value.strip()}" if board else value.strip()
    return board or platform.processor() or "unknown"


def _memory_mib() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    except (
        AttributeError,
        ValueError,
        OSError,
    ):  # Windows, or another system that does not have these values
        return None
