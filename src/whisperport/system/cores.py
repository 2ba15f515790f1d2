"""How many CPU cores this process may use, and their instruction sets.

The number of cores is the default number of threads of every runtime.

Runtimes count differently: some use all logical CPUs, none knows the CPU quota of a container. With more
threads than cores, each multiplication waits for the thread that has no core.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from whisperport.system.control_groups import control_groups, text_of

ROOT = Path("/")
CPU = "sys/devices/system/cpu/cpu{}/topology"
SIBLINGS = (
    "core_cpus_list",
    "thread_siblings_list",
)  # logical CPUs of a core; since Linux 5.3, before
# Those that runtimes choose their kernels by, as Linux calls them on x86 and on Arm.
INSTRUCTION_SETS = (
    *("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16", "sme"),
)


@cache
def usable_cores() -> int:
    """Return the physical cores of this process's affinity, at most the CPU quota of its control groups."""
    return cores_below(ROOT, _logical_cpus())


def cores_below(root: Path, cpus: set[int]) -> int:
    """Return the usable cores of a system whose files are below the folder `root`.

    Args:
        root: folder of the file system.
        cpus: the logical CPUs on which this process may run.
    """
    cores = {_siblings(root, cpu) or str(cpu) for cpu in cpus}
    return max(1, int(min([len(cores), *_quotas(root)])))


def instruction_sets(root: Path = ROOT) -> tuple[str, ...]:
    """Return which of `INSTRUCTION_SETS` the CPU has; none where the system, such as macOS, lists none."""
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            words = set(value.split())
            return tuple(known for known in INSTRUCTION_SETS if known in words)
    return ()


def _logical_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> str:
    """Return the logical CPUs of a core, as the system writes them; empty if it does not tell."""
    texts = (text_of(root / CPU.format(cpu) / name).strip() for name in SIBLINGS)
    return next(filter(None, texts), "")


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU time per time of every control group with a quota."""
    for folder, is_v2 in control_groups("cpu", root):
        if is_v2:
            words = text_of(folder / "cpu.max").split()
        else:
            words = [text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            yield int(words[0]) / int(words[1])
