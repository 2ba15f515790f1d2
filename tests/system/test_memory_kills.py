"""Counters of Linux about processes that were ended because memory was short."""

from pathlib import Path

import pytest

from whisperport.system.memory_kills import memory_kills


@pytest.mark.parametrize(
    ("files", "count"),
    [
        (
            {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.events": "oom 9\noom_kill 3\n"},
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 2\n",
                "proc/vmstat": "oom_kill 7\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free_pages 1\noom_kill 7\n"}, 7),
        ({}, 0),
    ],
)
def test_the_counter_is_that_of_the_group_or_else_of_the_system(
    files: dict[str, str], count: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert memory_kills(tmp_path) == count
