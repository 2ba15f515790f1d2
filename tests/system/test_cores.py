"""The number of cores in containers, with two threads per core, and with an affinity."""

from pathlib import Path

import pytest

from whisperport.system.cores import cores_below
from whisperport.targets import RunOptions

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
