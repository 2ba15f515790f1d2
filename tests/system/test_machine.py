"""The number of cores, arrays that share memory, and machines without space, memory, home or clock.

`make test-machine` runs every verb under every condition, and writes build/conditions.md, a table of what
a user sees.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from whisperport.build.layouts import layout_of
from whisperport.build.layouts.environments import command_of
from whisperport.errors import (
    BundleError,
    MissingPackageError,
    OutOfMemoryError,
    WhisperportError,
    needs,
    out_of_memory,
)
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.writing import check_writable
from whisperport.system import outputs
from whisperport.system.atomic import write_atomic
from whisperport.system.machine import cores_below, instruction_sets, memory_kills
from whisperport.system.memory import ALIGNMENT, Memory, room
from whisperport.targets import RunOptions

from ..embedded import default_bundle

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


# What is short, or missing, is what the error names.


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 64 bytes"),
        RuntimeError("Failed to allocate memory for requested buffer of size 4096"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_a_lack_of_memory_is_told_from_every_other_error(error: Exception) -> None:
    outer = ValueError("cannot be read")
    outer.__cause__ = error

    assert out_of_memory(error)
    assert out_of_memory(outer)
    assert out_of_memory(ValueError("the header is damaged")) is None


def test_a_library_that_finds_no_memory_is_not_said_to_be_missing() -> None:
    with pytest.raises(OutOfMemoryError, match="failed to map segment"), needs("cannot export"):
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
    with pytest.raises(MissingPackageError, match="cannot export"), needs("cannot export"):
        raise ModuleNotFoundError("No module named 'torch'")


def test_a_bundle_that_finds_no_memory_was_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(default_bundle())

    def read(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(Path, "open", read)

    with pytest.raises(OutOfMemoryError):
        Bundle.open(default_bundle())
    with pytest.raises(OutOfMemoryError), bundle.unchanged():
        pass


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(WhisperportError, match=r"ulimit -f") as error:
            write_atomic(tmp_path / "a.srt", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert error.value.why == "File too large"
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="POSIX systems have it")
@pytest.mark.parametrize(("flag", "why"), [(1, "is read-only"), (0, "is not writable")])
def test_a_disk_that_is_read_only_has_no_wrong_permissions(
    flag: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = [*os.statvfs(tmp_path)]
    fields[8] = flag
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))

    with pytest.raises(WhisperportError, match=why):
        outputs.check_outputs([outputs.Output(tmp_path / "a.html", "--html", "page")])


@pytest.mark.parametrize("cache", ["no home", "no permission"])
def test_without_a_cache_no_app_is_installed_and_nothing_fails(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = layout_of("faster-whisper").apps["faster-whisper"]
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody/x" if cache == "no home" else str(tmp_path))
    if cache == "no permission":

        def denied(_: Path) -> bool:
            raise PermissionError

        monkeypatch.setattr(Path, "is_file", denied)

    assert command_of(app) in (None, [sys.executable])


BYTES = os.fsdecode(b"a\xff")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_path_that_libraries_cannot_open_is_rejected_before_any_work(tmp_path: Path) -> None:
    (tmp_path / BYTES).mkdir()
    (tmp_path / "link").symlink_to(BYTES)

    for opened in (
        lambda: Bundle.open(tmp_path / "link"),
        lambda: check_writable(tmp_path / BYTES),
    ):
        with pytest.raises(BundleError) as error:
            opened()
        assert "bytes that are not UTF-8" in error.value.why


# Conditions of a machine, and every verb under each.

EVERY = os.environ.get("WHISPERPORT_TEST_MACHINE") == "1"
TABLE = Path(__file__).parents[2] / "build" / "conditions.md"
PREPARED = """\
mount --make-rprivate /
mount -t tmpfs -o size=64m conditions "$ROOM" && cd "$ROOM"
"""
FULL = "dd if=/dev/zero of=fill bs=4096 2>/dev/null\n"
READ_ONLY = "mount -o remount,bind,ro /\nmount -t tmpfs -o ro,size=4k conditions /dev/shm\n"
DEVICES = """\
mkdir dev
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mount --rbind dev /dev
"""
NO_FOLDERS = {"XDG_CACHE_HOME": "", "XDG_STATE_HOME": ""}
LOST = "cannot be written to standard output"
DEEP = "while [ ${#PWD} -lt 3900 ]; do name=$(printf %0150d 0); mkdir $name; cd $name; done"
TERMINAL = 'exec script -qec "stty cols 20; $(printf "%q " "$@")" /dev/null'
ANYONE = """\
mount --make-rprivate /
mount -t tmpfs -o size=64m,mode=777 conditions /mnt && cd /mnt
unset HOME
"""
NO_USER = "exec setpriv --reuid 12345 --regid 12345 --clear-groups"
MAY_READ = "--inh-caps +dac_read_search --ambient-caps +dac_read_search"
CLOCK = """\
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static struct timespec start;
__attribute__((constructor)) static void begin(void) {
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &start);
}
static long jumped(void) { /* half a second after the start of each process */
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  long ms = (now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000;
  return ms > 500 ? atol(getenv("CLOCK_JUMP")) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *t) {
  int failed = syscall(SYS_clock_gettime, clock, t);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += jumped();
  return failed;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
"""


@dataclass(frozen=True)
class Condition:
    """A machine: what a shell does before it runs the command, and what then fails with which words."""

    name: str
    shell: str = ""
    run: str = 'exec "$@"'
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: bool = False
    fails: Mapping[str, str] = field(default_factory=dict)
    age: float | None = None  # time of the last change of every input

    def command(self, arguments: list[str]) -> list[str]:
        whisperport = [sys.executable, "-m", "whisperport", *arguments]
        inside = ["sh", "-c", f"{self.shell}\n{self.run}", "sh", *whisperport]
        return ["unshare", "--mount", *inside] if self.mounts else inside


SPACE, CACHE, MEMORY = "No space left|too little space", "XDG_CACHE_HOME", "enough memory"
VERBS: dict[str, list[str]] = {
    "transcribe": ["transcribe", "{wav}", "--bundle", "{bundle}", "--output-dir", "."],
    "verify": ["verify", "{bundle}"],
    "archive": ["archive", "{clips}", "--bundle", "{bundle}", "--out", "archive"],
    "plan": ["plan", "{bundle}", "--target", "aws-neuron"],
    "apps": ["apps"],
    "doctor": ["doctor"],
    "serve": ["serve", "--bundle", "{bundle}", "--port", "0"],
    "export": ["export", "{micro}", "-t", "onnxruntime", "--window", "2", "--out", "exported"],
    "model": ["transcribe", "{wav}", "--model", "{micro}"],
    "demo": ["demo", "--out", "demo"],
}
VERBS["export"] += ["--verify-with", "{clips}"]
RARE = ("model", "demo")  # they take a minute, so they run only where a condition names them


def failing(words: str, *verbs: str) -> dict[str, str]:
    return dict.fromkeys(verbs, words)


CONDITIONS = (
    Condition("nothing unusual", fails=failing("", "demo")),
    Condition(
        "a full disk",
        PREPARED + FULL,
        mounts=True,
        fails=failing(SPACE, "transcribe", "archive", "export", "demo"),
    ),
    Condition(
        "a full disk of temporary files and cache",
        f'{PREPARED}{FULL}cd "$OLDPWD"',
        environment={"TMPDIR": "{room}", "XDG_CACHE_HOME": "{room}", "XDG_STATE_HOME": "{room}"},
        mounts=True,
        fails=failing(SPACE, "model"),
    ),
    Condition("`ulimit -f`, 100 kB", "ulimit -f 200", fails=failing("ulimit -f", "export")),
    Condition(
        "a read-only root",
        PREPARED + READ_ONLY + 'cd "$OLDPWD"',
        mounts=True,
        fails=failing("[Rr]ead-only", "transcribe", "archive", "export"),
    ),
    Condition("a read-only root and a tmpfs", PREPARED + READ_ONLY, mounts=True),
    Condition("no HOME", environment={"HOME": "", **NO_FOLDERS}),
    Condition(
        "a HOME that cannot be",
        environment={"HOME": "/dev/null/x", **NO_FOLDERS},
        fails=failing(CACHE, "model"),
    ),
    Condition(
        "a user without a name and a home",
        ANYONE,
        f'{NO_USER} {MAY_READ} "$@"',
        environment=NO_FOLDERS,
        mounts=True,
        fails=failing(CACHE, "model"),
    ),
    Condition("no /dev/shm", PREPARED + DEVICES, mounts=True),
    Condition(
        "`ulimit -v`, 512 MB",
        "ulimit -v 524288",
        fails=failing(MEMORY, "transcribe", "verify", "archive", "serve", "export"),
    ),
    Condition("`ulimit -d`, 512 MB", "ulimit -d 524288", fails=failing(MEMORY, "export")),
    Condition("one core", run='exec taskset -c 0 "$@"'),
    Condition("a clock that jumps back an hour", environment={"CLOCK_JUMP": "-3600"}),
    Condition("a clock that jumps ahead a year", environment={"CLOCK_JUMP": "31536000"}),
    Condition("files of 1960", age=-315_000_000),
    Condition("files of the future", age=4e9),
    Condition("umask 077", "umask 077"),
    Condition(
        "LC_ALL=C without UTF-8",
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        fails=failing("PYTHONUTF8=1", "transcribe", "verify", "archive", "plan", "serve", "export"),
    ),
    Condition("a folder of 4,000 bytes", DEEP),
    Condition("standard input closed", run='exec "$@" <&-'),
    Condition("standard output closed", run='exec "$@" >&-', fails=failing(LOST, *VERBS)),
    Condition("standard error closed", run='exec "$@" 2>&-'),
    Condition("a full disk for standard error", run='exec "$@" 2>/dev/full'),
    Condition(
        "a full disk for standard output", run='exec "$@" >/dev/full', fails=failing(LOST, *VERBS)
    ),
    Condition("a reader that is gone", run='"$@" 2>&1 >out | true; cat out'),
    Condition("a terminal of 20 columns", run=TERMINAL),
)
ALL = [
    pytest.param(condition, verb, id=f"{condition.name}: {verb}")
    for condition in CONDITIONS
    for verb in VERBS
    if verb not in RARE or verb in condition.fails
]
CORE = {
    "a full disk for standard error: transcribe",
    "a read-only root: transcribe",
    "a HOME that cannot be: apps",
    "a clock that jumps back an hour: transcribe",
    "a folder of 4,000 bytes: archive",
    "LC_ALL=C without UTF-8: transcribe",
}


@pytest.fixture(scope="module")
def inputs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Copies of a bundle, clips and, if every verb runs, a checkpoint, under hostile names."""
    folder = tmp_path_factory.mktemp("conditions") / 'e\u0301 \n\'"$(x)"'
    (folder / "clips").mkdir(parents=True)
    clip = files("whisperport") / "speech" / "data" / "speech" / "01-espeak.wav"
    (folder / "clips" / f"{BYTES}.wav").write_bytes(clip.read_bytes())
    (folder / "clips" / f"{BYTES}.txt").write_text("the code is nine six three")
    shutil.copytree(default_bundle(), folder / "bundle")
    found = {name: str(folder / name) for name in ("clips", "bundle")}
    found["wav"] = f"{found['clips']}/{BYTES}.wav"
    if EVERY:
        found["micro"] = str(
            shutil.copy(request.getfixturevalue("one_layer_pt"), folder / "micro.pt")
        )
    return found


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that is loaded before the C library, and lets its clock jump."""
    source = tmp_path_factory.mktemp("clock") / "clock.c"
    source.write_text(CLOCK)
    library = source.with_suffix(".so")
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no C compiler, or no Linux")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """The rows of the table of what a user sees, which is written if every verb runs."""
    rows = [
        "| Condition | Verb | Exit status | Last lines | What, why, next |",
        "|---|---|---|---|---|",
    ]
    yield rows
    if EVERY:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("\n".join(rows) + "\n", encoding="utf-8")


def ran(
    command: list[str], environment: dict[str, str], folder: Path, verb: str
) -> tuple[int, str]:
    """Exit status and output of a command; a server gets one request, and then SIGTERM."""
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    shown = b""
    try:
        for line in process.stdout if verb == "serve" else ():
            shown += line
            if address := re.search(rb"listening on (\S+)", line):
                with urllib.request.urlopen(
                    f"{address[1].decode()}/v1/models", timeout=60
                ) as answer:
                    assert answer.status == 200
                os.killpg(process.pid, signal.SIGTERM)
        rest, _ = process.communicate(timeout=300)
        return process.returncode, (shown + rest).decode(errors="backslashreplace")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="the conditions are made with Linux's tools")
@pytest.mark.parametrize(
    ("condition", "verb"), ALL if EVERY else [one for one in ALL if one.id in CORE]
)
def test_a_verb_under_a_condition(
    condition: Condition,
    verb: str,
    inputs: dict[str, str],
    table: list[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if (
        condition.mounts
        and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
    ):
        pytest.skip("this user may not mount")
    room = tmp_path / "room"
    room.mkdir()
    environment = {**os.environ, "ROOM": str(room), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    environment |= {name: text.format(room=room) for name, text in condition.environment.items()}
    if "CLOCK_JUMP" in environment:
        environment["LD_PRELOAD"] = request.getfixturevalue("clock")
    for path in Path(inputs["bundle"]).parent.rglob("*") if condition.age else ():
        os.utime(path, (condition.age or 0,) * 2)

    if verb == "serve" and ("standard" in condition.name or condition.run.startswith('"$@"')):
        pytest.skip("its address is printed on standard error")
    arguments = [word.format(**inputs) for word in VERBS[verb]]
    status, shown = ran(condition.command(arguments), environment, tmp_path, verb)

    last = " / ".join(line.strip() for line in shown.splitlines()[-3:])
    form = "; ".join(label for label in ("error:", "why:", "hint:") if label in shown)
    table.append(f"| {condition.name} | {verb} | {status} | {last.replace('|', ' ')} | {form} |")
    assert "Traceback" not in shown
    assert "unexpected error" not in shown
    if condition.fails.get(verb):
        assert status == 1, shown
        assert re.search(condition.fails[verb], shown), shown
        assert all(label in shown for label in ("error: ", "  why: ", "hint: ")), shown
    else:
        assert status == 0, shown
