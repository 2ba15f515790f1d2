"""Programs in another process: arrays in and out, failures, time limits, and the end of the process."""

import gc
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.toolchain import Installed, ServedPrograms

HERE = Installed(Path(sys.executable), Path(sys.executable))
SCRIPT = """
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


@pytest.fixture
def served(tmp_path):
    """Return what starts a process with programs of these kinds, each with the name of its kind."""
    script = tmp_path / "stages.py"
    script.write_text(SCRIPT)

    def start(*kinds: str, installed: Installed = HERE, run_s: float = 60, **settings):
        files = {}
        for kind in kinds:
            path = tmp_path / kind
            path.write_text(kind)
            files[kind] = [path]
        return ServedPrograms(installed, script, settings, files, "the emulator", run_s=run_s)

    return start


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
    without = Installed(HERE.path, HERE.interpreter, {"NO_SDK": "1"})
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


def test_a_fork_does_not_end_the_process_of_its_parent(served):
    programs = served("scaled")
    child = os.fork()
    if child == 0:
        programs.close()
        os._exit(0)

    assert os.waitpid(child, 0)[1] == 0
    assert len(programs.run("scaled", INPUTS)) == 2


def test_the_process_ends_when_its_parent_is_killed(served, tmp_path):
    """The parent is a fork that starts the process, tells its number, and is killed."""
    note = tmp_path / "child"
    parent = os.fork()
    if parent == 0:
        programs = served("process")
        note.write_text(str(int(programs.run("process", {})[0])))
        os.kill(os.getpid(), 9)
    os.waitpid(parent, 0)
    child = int(note.read_text())

    for _ in range(1000):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("the process still runs")
