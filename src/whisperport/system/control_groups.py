"""The control groups (cgroups) of this process, with which Linux limits a container's memory and cores."""

from collections.abc import Iterator
from pathlib import Path


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
