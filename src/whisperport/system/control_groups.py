"""The control groups (cgroups) of this process, with which Linux limits a container."""

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
