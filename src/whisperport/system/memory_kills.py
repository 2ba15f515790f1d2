"""How often Linux has ended processes because memory was short."""

from pathlib import Path

from whisperport.system.control_groups import control_groups, text_of


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
