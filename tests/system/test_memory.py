"""Arrays that share blocks of memory: each is separate, aligned, and of its own shape and dtype."""

from pathlib import Path

import numpy as np
import pytest

from whisperport.system.memory import ALIGNMENT, Memory, room
from whisperport.system.memory_kills import memory_kills


@pytest.mark.parametrize("block", [1, 1000, 2**20])
def test_arrays_are_separate_and_begin_at_a_cache_line(block: int) -> None:
    memory = Memory(block)
    shapes = [((3, 5), np.float32), ((1,), np.float16), ((1000,), np.float32), ((0, 2), np.float32)]

    arrays = [memory.array(shape, dtype) for shape, dtype in shapes * 5]
    for number, array in enumerate(arrays):
        array[...] = number

    assert [(array.shape, array.dtype) for array in arrays] == shapes * 5
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays if array.size)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)


def test_small_arrays_share_a_block() -> None:
    memory = Memory(4096)

    first, second = memory.array((10,)), memory.array((10,))

    assert second.ctypes.data - first.ctypes.data == ALIGNMENT


def test_arrays_fit_into_a_block_of_their_room() -> None:
    shapes = [(3,), (64, 64), (1, 5)]
    memory = Memory(sum(map(room, shapes)))

    arrays = [memory.array(shape) for shape in shapes]

    places = [array.ctypes.data for array in arrays]
    assert places == sorted(places)
    assert places[-1] - places[0] < sum(map(room, shapes))


# Counters of Linux about processes that were ended because memory was short.


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
