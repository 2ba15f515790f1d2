"""Stages and programs in another process: progress, interrupts, failures, logs, and arrays in and out."""

import gc
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fuzz.processes import has_ended

from whisperport.errors import BundleError, LoweringError, MissingPackageError, UsageError
from whisperport.system.progress import reporting
from whisperport.targets import TARGETS
from whisperport.targets.toolchain import (
    Failure,
    Installed,
    Job,
    ServedPrograms,
    Stage,
    driver,
    find_command,
    find_interpreter,
    has_unfinished_stages,
    kit,
    prepare,
    probe,
    run_driver,
)

# Stages in another process: progress, interrupts, failures, logs, and the choice of interpreter.

HERE = Path(sys.executable)
SCRIPT = """
import os, subprocess, sys, time

def version():
    return "1.2"

def check(version, settings):
    return settings.get("fault", "")

def copy(job, kit):
    print("python's stream")
    os.system("echo a child of it")
    sys.stderr.write("standard error" + chr(10))
    (job.folder / "out").write_text((job.folder / "in").read_text() + job.settings.get("end", ""))

def fail(job, kit):
    raise LookupError("first line" + chr(10) + "second line")

def die(job, kit):
    os.write(1, b"last words")
    os._exit(7)

def hang(job, kit):
    child = subprocess.Popen(["sh", "-c", "trap '' INT; sleep 300"])
    (job.folder / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(300)

def abort(job, kit):
    os.abort()  # as C++'s runtime does after an exception that nothing catches

STAGES = {"copy": copy, "fail": fail, "die": die, "hang": hang, "abort": abort}
"""


def _work(folder: Path, stage: str = "copy", settings: dict | None = None, **program) -> Path:
    work = folder / "work"
    (work / "p").mkdir(parents=True, exist_ok=True)
    if not (work / "p" / "in").exists():
        (work / "p" / "in").write_text("text")
    script = folder / "vendor.py"
    script.write_text(SCRIPT)
    job = Job(name="p", stages=(Stage(stage, ("in",), ("out",)),), settings=program)
    prepare(work, script, settings or {}, [job])
    return work


def test_a_stage_runs_once_is_reported_and_has_a_log(tmp_path):
    work = _work(tmp_path)
    messages: list[str] = []

    with reporting(messages.append):
        assert run_driver(HERE, work) is None
        assert run_driver(HERE, work) is None

    assert messages == ["p: copy", "p: copy is already finished"]
    assert (work / "p" / "out").read_text() == "text"
    log = (work / "p" / "copy.log").read_text()
    assert {"python's stream", "a child of it", "standard error"} <= set(log.splitlines())
    assert not has_unfinished_stages(work)


@pytest.mark.parametrize("change", ["input", "settings", "program", "output", "state"])
def test_a_stage_is_unfinished_if_a_file_that_it_read_or_wrote_has_changed(tmp_path, change):
    work = _work(tmp_path)
    driver.run(work, lambda _event, **_facts: None)
    assert not has_unfinished_stages(work)
    if change == "settings":
        _work(tmp_path, settings={"chip": "b"})
    elif change == "program":
        _work(tmp_path, end="!")
    else:
        files = {"input": "p/in", "output": "p/out", "state": "state.json"}
        (work / files[change]).write_text("{")
    assert has_unfinished_stages(work)


@pytest.mark.parametrize(
    ("stage", "settings", "expected"),
    [
        (
            "fail",
            {},
            Failure(
                kind="failed",
                message="first line",
                program="p",
                stage="fail",
                classes=["LookupError", "Exception", "BaseException", "object"],
                log=Path("p/fail.log"),
            ),
        ),
        (
            "die",
            {},
            Failure(
                kind="died",
                message="the process ended with exit status 7 and did not report a result",
                program="p",
                stage="die",
                log=Path("p/die.log"),
            ),
        ),
        ("copy", {"fault": "too old"}, Failure(kind="unsuitable", message="too old")),
    ],
    ids=["raises", "dies", "unsuitable"],
)
def test_a_failure_says_what_failed_and_where_its_log_is(tmp_path, stage, settings, expected):
    work = _work(tmp_path, stage, settings)

    failure = run_driver(HERE, work)

    assert failure is not None
    log = failure.log and failure.log.relative_to(work)
    assert {**_fields(failure), "log": log} == _fields(expected)
    if failure.log:
        words = failure.log.read_text()
        assert "second line" in words or "last words" in words


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")
@pytest.mark.parametrize("limit", [10**12, None], ids=["limited", "unlimited"])
def test_an_abort_is_blamed_on_memory_only_if_memory_is_limited(tmp_path, limit):
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        failure = run_driver(HERE, _work(tmp_path, "abort"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

    assert failure is not None
    assert failure.kind == "died"
    assert "SIGABRT" in failure.message
    assert ("at most 1000.0 GB of memory" in failure.message) == (limit is not None)
    assert ("ulimit -v" in failure.hint) == (limit is not None)


def _fields(failure: Failure) -> dict:
    return {name: getattr(failure, name) for name in Failure.__slots__}


def test_an_interpreter_that_cannot_start_the_driver_is_explained_by_its_own_log(tmp_path):
    work = _work(tmp_path)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    broken.chmod(0o755)

    failure = run_driver(broken, work)

    assert failure is not None
    assert failure.kind == "died"
    assert failure.log is not None
    assert failure.log.read_text() == "no such library\n"
    found = probe(broken, tmp_path / "vendor.py", {})
    assert found is not None
    assert found.message == "no such library"


def test_an_interrupt_ends_the_stage_and_its_children(tmp_path):
    work = _work(tmp_path, "hang")

    def interrupted(_: str) -> None:
        while not (work / "p" / "pids").exists():
            time.sleep(0.02)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), reporting(interrupted):
        run_driver(HERE, work)

    assert all(has_ended(int(pid)) for pid in (work / "p" / "pids").read_text().split())


def test_a_driver_whose_parent_died_ends_too(tmp_path):
    work = _work(tmp_path, "hang")
    process = subprocess.Popen(
        [HERE, work / "compile.py", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (work / "p" / "pids").exists():
        time.sleep(0.02)

    process.stdin.close()

    assert process.wait(30) == 130


def test_another_interpreter_does_not_import_packages_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\necho "${{PYTHONPATH-none}}" >&2\nexec "{HERE}" "$@"\n')
    other.chmod(0o755)
    work = _work(tmp_path)
    assert run_driver(other, work) is None
    assert (work / "driver.log").read_text().splitlines()[0] == "none"


def test_an_interpreter_is_found_in_the_order_option_environment_this_one(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.symlink_to(HERE)  # kept as it is: a virtual environment's interpreter is a link
    monkeypatch.setenv("WHISPERPORT_TOOLCHAIN_SOME_NPU", str(second))
    assert find_interpreter("some-npu", "no_such_sdk", {"some-npu": str(first)}) == first
    assert find_interpreter("some-npu", "no_such_sdk", {}) == second
    monkeypatch.delenv("WHISPERPORT_TOOLCHAIN_SOME_NPU")
    assert find_interpreter("some-npu", "json", {}) == HERE
    assert find_interpreter("some-npu", "no_such_sdk", {}) is None
    with pytest.raises(UsageError, match="has no interpreter"):
        find_interpreter("some-npu", "json", {"some-npu": str(tmp_path / "missing")})


def test_an_sdk_that_is_a_program_is_found_in_the_order_option_environment_path(
    tmp_path, monkeypatch
):
    program = tmp_path / "some-compiler"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    arguments = ("some-npu", "some-compiler", ("VENDORS_SDK",))
    own = "WHISPERPORT_TOOLCHAIN_SOME_NPU"
    assert find_command(*arguments, {}) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_command(*arguments, {})
    assert (found.path, found.interpreter) == (program, HERE)
    for place, where in (("vendor", "VENDORS_SDK"), ("own", own)):
        (tmp_path / place).mkdir()
        monkeypatch.setenv(where, str(tmp_path / place))
        assert find_command(*arguments, {}).path == tmp_path / place
    (tmp_path / "given").mkdir()
    found = find_command(*arguments, {"some-npu": str(tmp_path / "given")})
    assert found.environment == {own: str(tmp_path / "given")}  # its stages read this variable
    with pytest.raises(UsageError, match="has no SDK at"):
        find_command(*arguments, {"some-npu": str(tmp_path / "missing")})


def test_the_stages_of_an_sdk_that_is_a_program_see_its_path(tmp_path):
    work = _work(tmp_path)
    script = work / "stages.py"
    script.write_text(script.read_text().replace('"1.2"', 'os.environ["SDK_OF_THE_TEST"]'))
    installed = Installed(tmp_path, HERE, {"SDK_OF_THE_TEST": "3.4"})
    assert run_driver(installed, work) is None
    assert json.loads((work / "state.json").read_text())["p"]["copy"]["compiler"] == "3.4"


def test_the_job_is_plain_json(tmp_path):
    work = _work(tmp_path, settings={"chip": "a"}, end="!")
    job = json.loads((work / "job.json").read_text())
    stage = {"name": "copy", "reads": ["in"], "writes": ["out"]}
    assert job == {
        "settings": {"chip": "a"},
        "programs": [{"name": "p", "stages": [stage], "settings": {"end": "!"}}],
    }
    assert os.access(work / "compile.py", os.R_OK)


def test_an_sdk_may_print_lines_that_look_like_json(tmp_path):
    script = tmp_path / "stages.py"
    script.write_text(
        'def version():\n    import os\n    os.write(1, b"{\'a\': 1}\\n")\n    raise ImportError("no")\n'
    )
    interpreter = tmp_path / "python"
    interpreter.write_text(
        f'#!/bin/sh\necho "{{ loading SDK"\necho "[1]"\nexec {sys.executable} "$@"\n'
    )
    interpreter.chmod(0o755)

    failure = probe(interpreter, script, {})

    assert failure is not None
    assert (failure.kind, failure.message) == ("missing", "no")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"programs": [1]}', "[" * 100_000])
def test_a_damaged_job_is_reported_and_not_a_traceback(tmp_path, content):
    prepare(tmp_path, Path(__file__), {}, [])
    (tmp_path / driver.JOB).write_text(content)

    failure = run_driver(Path(sys.executable), tmp_path)

    assert failure is not None
    assert failure.kind == "died"
    assert "job.json is missing or damaged" in failure.message
    assert (tmp_path / "driver.log").read_text() == ""


@pytest.mark.parametrize("content", ["[]", '{"a": 1}', '{"encoder": {"parse": {"made": 1}}}'])
def test_a_damaged_state_runs_every_stage_again(tmp_path, content):
    (tmp_path / driver.STATE).write_text(content)
    assert driver._state(tmp_path) == {}


# What stages share: versions, files that are complete or absent, and runs over samples.

REQUIRED = {"chip": "chip1", "sdk": "the-sdk", "oldest": [2, 7]}
WITH_REQUIREMENT = [
    one.compiler for one in TARGETS if one.compiler and "requires" in one.compiler.settings()
]


@pytest.mark.parametrize("version", ["2.7.0", "2.10.0", "3.0", "", "unknown"])
def test_versions_are_compared_as_numbers_and_an_unknown_one_is_accepted(version: str) -> None:
    assert kit.version_fault(version, REQUIRED) == ""


def test_an_older_version_is_rejected_with_both_versions() -> None:
    fault = kit.version_fault("1.24.0", REQUIRED)

    assert fault == "chip1 needs the-sdk 2.7 or later; version 1.24.0 is installed"


def test_another_major_version_is_rejected_where_the_chip_needs_the_same() -> None:
    required = {**REQUIRED, "sdk": "", "same_major": True}

    assert kit.version_fault("2.9", required) == ""
    assert "needs version 2.7 or a later 2.x" in kit.version_fault("3.0", required)


@pytest.mark.parametrize("compiler", WITH_REQUIREMENT, ids=lambda one: one.target)
def test_a_compiler_that_requires_a_version_rejects_the_one_before(compiler) -> None:
    required = compiler.settings()["requires"]
    major, minor = required["oldest"]

    assert kit.version_fault(f"{major}.{minor}.0", required) == ""
    before = f"{major}.{minor - 1}" if minor else f"{major - 1}.99"
    assert compiler.target in kit.version_fault(before, required)


def _stopped_in_the_middle(path: Path) -> None:
    with kit.written(path) as partial:
        partial.write_text("a part")
        raise LookupError


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.write_text("before")

    with pytest.raises(LookupError):
        _stopped_in_the_middle(path)
    with pytest.raises(kit.NotWrittenError, match="made"), kit.written(path):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["made"]
    assert path.read_text() == "before"

    with kit.written(path) as partial:
        partial.write_text("after")
    assert path.read_text() == "after"


def test_a_program_runs_once_per_sample(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))

    kit.run_samples(tmp_path, {"x": "x.npy"}, ["y.npy"], lambda inputs: [2 * inputs["x"]])

    made = np.load(tmp_path / "y.npy")
    assert made.dtype == np.float32
    assert (made == 2 * np.arange(6.0).reshape(3, 2)).all()


@pytest.mark.parametrize("outputs", [None, [], [np.zeros(1)] * 2])
def test_other_outputs_than_the_program_has_are_an_error(tmp_path: Path, outputs) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))

    with pytest.raises(kit.SimulationError, match="expected 1"):
        kit.run_samples(tmp_path, {"x": "x.npy"}, ["y.npy"], lambda _: outputs)

    assert not (tmp_path / "y.npy").exists()


def test_a_log_is_read_without_colours(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\x1b[31mE build:\x1b[0m no\xff\n")

    assert kit.read_log(tmp_path / "log") == "E build: no\ufffd\n"
    assert kit.read_log(tmp_path / "absent") == ""


# Programs in another process: arrays in and out, failures, time limits, and the end of the process

ROOT = Path(__file__).parents[3]
SERVER = Installed(Path(sys.executable), Path(sys.executable))
ECHO_SCRIPT = """
import os, time

def version():
    if os.environ.get("NO_SDK"):
        raise ImportError("No module named 'sdk'")
    return "1.2"

def check(version, settings):
    return settings.get("fault", "")

def load(files):
    print("an SDK's message")
    os.system("echo a message of a child")
    kind = files[0].read_text()
    if kind == "damaged":
        raise ValueError("no such graph" + chr(10) + "second line")
    return globals()[kind]

def scaled(inputs):
    print("a message of a run")
    return [2 * inputs["a"], inputs["b"].T]

def failing(inputs):
    raise LookupError("an operator is missing")

def dying(inputs):
    os.write(2, b"first words" + bytes([10]) + b"last words")
    os._exit(7)

def killed(inputs):
    os.kill(os.getpid(), 9)

def hanging(inputs):
    time.sleep(300)

def process(inputs):
    import numpy
    return [numpy.array(os.getpid())]
"""
INPUTS = {"a": np.float32([[1, -2]]), "b": np.arange(6, dtype=np.int64).reshape(2, 3)}


def start(folder, *kinds, installed=SERVER, run_s=60.0, **settings):
    """Start a process with programs of these kinds, each with the name of its kind."""
    script = folder / "stages.py"
    script.write_text(ECHO_SCRIPT)
    files = {}
    for kind in kinds:
        path = folder / kind
        path.write_text(kind)
        files[kind] = [path]
    return ServedPrograms(installed, script, settings, files, "the emulator", run_s=run_s)


@pytest.fixture
def served(tmp_path):
    """`start` in a folder of the test."""
    return partial(start, tmp_path)


def test_arrays_of_any_type_arrive_and_return_although_the_sdk_prints(served):
    programs = served("scaled")

    for _ in range(2):
        first, second = programs.run("scaled", INPUTS)
        np.testing.assert_array_equal(first, np.float32([[2, -4]]), strict=True)
        np.testing.assert_array_equal(second, INPUTS["b"].T, strict=True)


def test_a_program_that_fails_says_why_and_the_others_still_run(served):
    programs = served("scaled", "failing")

    with pytest.raises(BundleError, match="`failing` failed in the emulator") as failed:
        programs.run("failing", INPUTS)

    assert failed.value.why == "LookupError: an operator is missing"
    assert len(programs.run("scaled", INPUTS)) == 2


def test_a_program_that_cannot_be_loaded_says_why(served):
    with pytest.raises(BundleError, match="`damaged` failed in the emulator") as failed:
        served("scaled", "damaged")

    assert failed.value.why == "ValueError: no such graph"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("dying", "exit status 7 and did not report a result; last words"),
        ("killed", "memory ran out"),
    ],
)
def test_a_process_that_ends_is_reported_with_its_last_words(served, kind, why):
    programs = served(kind)

    with pytest.raises(BundleError, match=f"cannot run `{kind}` in the emulator") as failed:
        programs.run(kind, INPUTS)
    assert why in failed.value.why
    with pytest.raises(BundleError, match="its process was closed"):
        programs.run(kind, INPUTS)


def test_a_run_that_takes_too_long_is_ended(served):
    programs = served("hanging", run_s=0.2)

    with pytest.raises(BundleError, match=r"took longer than 0\.2 s"):
        programs.run("hanging", INPUTS)


def test_a_missing_or_unsuitable_sdk_is_reported_with_its_interpreter(served):
    without = Installed(SERVER.path, SERVER.interpreter, {"NO_SDK": "1"})
    with pytest.raises(MissingPackageError, match="the emulator cannot be used") as missing:
        served("scaled", installed=without)
    with pytest.raises(LoweringError, match="version 2 is needed"):
        served("scaled", fault="version 2 is needed")

    assert missing.value.why == "No module named 'sdk'"
    assert sys.executable in missing.value.hint


@pytest.mark.parametrize("delete", [True, False])
def test_the_process_ends_with_its_object_or_when_it_is_closed(served, delete):
    programs = served("process")
    child = int(programs.run("process", {})[0])
    os.kill(child, 0)  # it runs

    if delete:
        del programs
        gc.collect()
    else:
        programs.close()

    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def in_a_parent(tmp_path, lines):
    """Run lines in another process, with programs of its own; return what it prints, and its exit status.

    pytest's own process has threads, and a fork of such a process can hang.
    """
    head = "import os, sys; from pathlib import Path; "
    head += "from tests.targets.toolchain.test_toolchain import *; "
    head += f"programs = start(Path({str(tmp_path)!r}), 'scaled', 'process')\n"
    command = [sys.executable, "-c", head + lines]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    return done.stdout, done.returncode


def test_a_fork_does_not_end_the_process_of_its_parent(tmp_path):
    lines = """
if not os.fork():
    programs.close()
    os._exit(0)
print(os.wait()[1], len(programs.run("scaled", INPUTS)))
"""

    assert in_a_parent(tmp_path, lines) == ("0 2\n", 0)


def test_the_process_ends_when_its_parent_is_killed(tmp_path):
    lines = """
print(int(programs.run("process", {})[0]), flush=True)
os.kill(os.getpid(), 9)
"""

    printed, status = in_a_parent(tmp_path, lines)

    assert status == -9
    assert has_ended(int(printed))
