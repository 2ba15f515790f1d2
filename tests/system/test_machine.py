"""The number of cores, and arrays that share memory."""

from pathlib import Path

import numpy as np
import pytest

from whisperport.system.machine import cores_below, instruction_sets, memory_kills
from whisperport.system.memory import ALIGNMENT, Memory, room
from whisperport.targets import RunOptions

# The number of cores in containers, with two threads per core, and with an affinity.

CGROUP = "proc/self/cgroup"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def cores(pairs: dict[int, str], name: str = "core_cpus_list") -> dict[str, str]:
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": f"{text}\n"
        for cpu, text in pairs.items()
    }


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_two_logical_cpus_of_one_core_count_once(tmp_path: Path, name: str) -> None:
    system(tmp_path, cores({0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}, name))

    assert cores_below(tmp_path, {0, 1, 4, 5}) == 2
    assert cores_below(tmp_path, {0, 4}) == 1  # the affinity
    assert cores_below(tmp_path, {0, 1}) == 2


def test_a_system_that_does_not_tell_has_a_core_per_logical_cpu(tmp_path: Path) -> None:
    assert cores_below(tmp_path, {0, 1, 2}) == 3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu sse2 avx2 fma avx512_vnni", ("fma", "avx2", "avx512_vnni")),
        ("Features\t: fp asimd asimddp", ("asimd", "asimddp")),
        ("model name\t: avx2", ()),
    ],
)
def test_instruction_sets_are_those_that_the_kernel_lists(
    tmp_path: Path, line: str, expected: tuple[str, ...]
) -> None:
    system(tmp_path, {"proc/cpuinfo": f"processor\t: 0\n{line}\n"})

    assert instruction_sets(tmp_path) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        (
            {
                CGROUP: "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "600000 100000\n",
            },
            3,
        ),
        (
            {
                CGROUP: "3:memory:/x\n2:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                CGROUP: "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense 0\n"}, 8),
    ],
    ids=["quota", "below 1", "no quota", "a group above", "version 1", "none in 1", "unreadable"],
)
def test_the_quota_of_a_container_counts(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert cores_below(system(tmp_path, files), set(range(8))) == expected


def test_every_runtime_gets_this_number_unless_the_user_gives_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("whisperport.targets.base.usable_cores", lambda: 3)

    assert RunOptions().cores == 3
    assert RunOptions(threads=5).cores == 5


# Arrays that share blocks of memory: each is separate, aligned, and of its own shape and dtype.


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
