"""Read the compiler's estimate of time and memory: the summary that Vela writes as CSV.

It is an estimate of Vela's model of the NPU for a memory system that the user names. Nothing was run.
"""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whisperport.targets.compiler import Estimate

LARGEST = 2**16  # characters that are read
KIB = 1024

# Column of Vela 5.1 -> name in the manifest, and the factor to its unit.
_COLUMNS: Mapping[str, tuple[str, float]] = {
    "inference_time": ("estimated_s", 1),
    "cycles_total": ("cycles", 1),
    "core_clock": ("clock_hz", 1),
    "sram_memory_used": ("sram_bytes", KIB),
    "dram_memory_used": ("dram_bytes", KIB),
    "on_chip_flash_memory_used": ("on_chip_flash_bytes", KIB),
    "off_chip_flash_memory_used": ("off_chip_flash_bytes", KIB),
    "nn_macs": ("macs", 1),
}


def read_estimate(path: Path) -> dict[str, Any]:
    """Return the estimate in SI units and bytes; {} if the file is missing, damaged or another one."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            lines = file.read(LARGEST).splitlines()
        (row,) = csv.DictReader(lines)
        numbers = {name: _number(row[column], by) for column, (name, by) in _COLUMNS.items()}
        return {
            **numbers,
            "system_config": row["system_config"][:60],
            "memory_mode": row["memory_mode"][:60],
        }
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return {}


def to_estimate(estimate: Mapping[str, Any]) -> Estimate:
    """Return an estimate that `read_estimate` returned in the form that all compilers share.

    Raises:
        KeyError, TypeError, ValueError: it is not such an estimate.
    """
    numbers = {name: _number(estimate[name], 1) for name, _ in _COLUMNS.values()}
    flash = numbers["on_chip_flash_bytes"] + numbers["off_chip_flash_bytes"]
    memory = {"SRAM": numbers["sram_bytes"], "DRAM": numbers["dram_bytes"], "flash": flash}
    clock = f"{numbers['clock_hz'] / 1e6:g} MHz"
    return Estimate(
        seconds=numbers["estimated_s"],
        cycles=numbers["cycles"],
        memory_bytes={name: size for name, size in memory.items() if size},
        conditions=f"{clock}, {estimate['system_config']:.60}, {estimate['memory_mode']:.60}",
    )


def summary(estimate: Mapping[str, Any]) -> str:
    """Return an estimate that `read_estimate` returned as a line for users."""
    memory = to_estimate(estimate).memory_bytes
    used = ", ".join(f"{size / 1e6:.4g} MB of {name}" for name, size in memory.items())
    return (
        f"Vela estimates {1e3 * estimate['estimated_s']:.4g} ms at {estimate['clock_hz'] / 1e6:g} MHz, "
        f"and {used or 'no memory'}, with {estimate['system_config']} and {estimate['memory_mode']}; "
        "nothing was measured"
    )


def _number(text: str | float, factor: float) -> float:
    value = float(text) * factor
    if not 0 <= value < math.inf:  # false for NaN
        raise ValueError(f"{str(text)[:20]} is not a finite number")
    return value
