"""What the machine gives to this process: CPU cores, instruction sets, and the limits of control groups.

The number of cores is the default number of threads of every runtime.

Runtimes count differently: some use all logical CPUs, none knows the CPU quota of a container. With more
threads than cores, each multiplication waits for the thread that has no core.

Control groups (cgroups) are how Linux limits a container's memory and cores.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of every group of this process, and of those above it.

    Args:
        controller: such as "memory" or "cpu".
        root: folder of the file system.

    Yields:
        The folder, and whether the group is of version 2; else it is of version 1.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, not controllers
            if folder == mount:
                break


def text_of(path: Path) -> str:
    """Return the text of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def memory_kills(root: Path = Path("/")) -> int:
    """Return the number of processes that were ended because memory was short, since the system started.

    A process that ended while this number rose was probably one of them. The counter is that of this
    process's control group, which its children share, or else that of the system; 0 without any.

    Args:
        root: folder of the file system.
    """
    groups = control_groups("memory", root)
    files = [folder / ("memory.events" if v2 else "memory.oom_control") for folder, v2 in groups]
    for file in (*files, root / "proc/vmstat"):
        for line in text_of(file).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
