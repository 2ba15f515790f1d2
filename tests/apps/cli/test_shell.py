"""What only a real process shows: pipes that close early, and terminals."""

import os
import pty
import shlex
import signal
import subprocess
import sys
from typing import Any

import pytest

from whisperport.program.bundle import Bundle

WHISPERPORT = [sys.executable, "-m", "whisperport"]


def test_a_reader_that_stops_early_gets_no_traceback():
    # given: a pipe whose reader has gone, as after `| head -1`
    reader, writer = os.pipe()
    os.close(reader)

    ran = subprocess.run(
        [*WHISPERPORT, "targets", "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)

    assert (ran.returncode, ran.stderr) == (141, "")  # as of a process that SIGPIPE ended


def in_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    ran = subprocess.Popen(
        [*WHISPERPORT, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    ran.wait()
    os.close(ours)
    return shown.decode()


CHINESE = """
import sys
from whisperport.apps.cli import main, transcribe
from whisperport.transcription import Transcript
transcribe.run_transcribe = lambda *_, **__: Transcript("右转", (), "zh", 1.0, ())
sys.argv = ["whisperport", "transcribe", "talk.wav", "--bundle", "."]
main()
"""


@pytest.mark.usefixtures("talk")
def test_a_character_that_the_output_cannot_hold_is_escaped():
    ran = subprocess.run(
        [sys.executable, "-c", CHINESE],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ran.returncode, ran.stdout) == (0, "\\u53f3\\u8f6c\n"), ran.stderr


def test_no_color_takes_the_colour_from_errors():
    coloured = in_a_terminal("verify", "no-such-bundle", NO_COLOR="")
    plain = in_a_terminal("verify", "no-such-bundle", NO_COLOR="1")

    red = "\x1b[1;31m"
    assert red in coloured
    assert red not in plain
    assert "error: there is no bundle at no-such-bundle" in plain


def test_a_sound_from_the_terminal_is_rejected_rather_than_awaited(tmp_path):
    shown = in_a_terminal("transcribe", "-", "--bundle", str(tmp_path))

    # then: one of the two errors is printed; neither waits for the keyboard
    assert "error: " in shown


def test_the_next_command_can_be_copied_to_a_shell(run, bundle, wav, tmp_path):
    # given: a name that a shell would cut in three
    folder = tmp_path / "my 'own' bundle"
    folder.symlink_to(bundle)

    ran = run("transcribe", wav, "--bundle", folder)

    assert str(folder) in shlex.split(ran.lines[-1].removeprefix("next: "))


def in_a_shell(script: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """`script`, where `$W` is whisperport."""
    words = shlex.join(WHISPERPORT)
    return subprocess.run(
        ["sh", "-c", script.replace("$W", words)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux alone has it")
def test_a_result_that_cannot_be_written_is_an_error_without_a_traceback():
    ran = in_a_shell("$W targets > /dev/full")

    assert ran.returncode == 1
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_closed_stderr_and_stdin_do_not_matter():
    ran = in_a_shell("$W targets 2>&- <&-")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert "onnxruntime" in ran.stdout


@pytest.mark.parametrize("redirected", [">&-", "1</dev/null"])
def test_a_result_that_nobody_can_get_is_an_error_before_any_work(redirected):
    ran = in_a_shell(f"$W transcribe no-such-file {redirected}")

    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: the result cannot be written to standard output\n  why: ")
    assert "hint: redirect it" in ran.stderr


def test_a_deleted_working_directory_is_an_error(tmp_path):
    ran = in_a_shell(
        "mkdir x && cd x && rmdir ../x && $W export default -t xnnpack -o y", cwd=tmp_path
    )

    assert ran.returncode == 1
    assert ran.stderr.startswith("error: the working directory does not exist any more")


@pytest.fixture
def default_signals():
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.usefixtures("default_signals")
def test_being_stopped_by_another_program_is_as_ctrl_c(number, status, run, monkeypatch, tmp_path):
    # given: `timeout`, or a terminal that is closed, in the middle of a verb
    monkeypatch.setattr(Bundle, "open", lambda *_, **__: os.kill(os.getpid(), number))

    ran = run("verify", tmp_path)

    assert ran.code == status
    assert ran.err.strip() == "interrupted: nothing was left half-written"


@pytest.mark.usefixtures("default_signals")
def test_what_nohup_ignores_stays_ignored(run):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    run("targets")

    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
