"""Programs in another process: arrays in and out, failures, time limits, and the end of the process."""

import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fuzz.processes import has_ended

from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.targets.toolchain import Installed, ServedPrograms

ROOT = Path(__file__).parents[3]
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


def start(folder, *kinds, installed=HERE, run_s=60.0, **settings):
    """Start a process with programs of these kinds, each with the name of its kind."""
    script = folder / "stages.py"
    script.write_text(SCRIPT)
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


def in_a_parent(tmp_path, lines):
    """Run lines in another process, with programs of its own; return what it prints, and its exit status.

    pytest's own process has threads, and a fork of such a process can hang.
    """
    head = "import os, sys; from pathlib import Path; from tests.targets.toolchain.test_served import *; "
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
