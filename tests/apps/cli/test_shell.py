"""The command in a shell: signals, pipes, completion and `--quiet`."""

import logging
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from whisperport.apps.cli.main import cli
from whisperport.apps.cli.serve import _Log
from whisperport.program.bundle import Bundle
from whisperport.targets import TARGETS

from .conftest import Ran

# What only a real process shows: pipes that close early, and terminals.

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


# Completion in bash and zsh: the lines of the documentation are evaluated, and the Tab key is pressed.

ROOT = Path(__file__).parents[3]
LINE = re.compile(
    r'^(eval "\$\(_WHISPERPORT_COMPLETE=(\w+)_source whisperport\)") *#', re.MULTILINE
)
LINES = {shell: line for line, shell in LINE.findall((ROOT / "docs" / "README.md").read_text())}
START = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}
PREPARE = {"bash": "", "zsh": "autoload -Uz compinit && compinit -D -u; "}
LIMIT_S = 60.0


def completed(shell: str, typed: str, expected: str, folder: Path) -> str:
    """What a shell shows on its terminal after `typed` and the Tab key, until `expected` is there."""
    (folder / "whisperport").write_text(f'#!/bin/sh\nexec {sys.executable} -m whisperport "$@"\n')
    (folder / "whisperport").chmod(0o755)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PS1": "$ "}
    environment |= {"TERM": "dumb", "HOME": str(folder)}
    ran = subprocess.Popen(
        [shell, *START[shell]], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    try:
        os.write(ours, f"{PREPARE[shell]}{LINES[shell]}; echo re''ady\n".encode())
        shown = _until(ours, "ready")
        assert "ready" in shown, shown
        os.write(ours, f"{typed}\t".encode())
        return _until(ours, expected)
    finally:
        ran.kill()
        ran.wait()
        os.close(ours)


def _until(terminal: int, expected: str) -> str:
    shown, end = "", time.monotonic() + LIMIT_S
    while expected not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\r", "")
    return shown


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_verbs_and_targets(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")

    for typed, expected in (
        ("whisperport transc", "transcribe"),
        ("whisperport check x.pt2 --target hailo10", "hailo10h"),
    ):
        assert expected in completed(shell, typed, expected, tmp_path)


def test_the_readme_has_a_line_for_each_shell() -> None:
    assert set(LINES) == {"bash", "zsh"}


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["whisperport", ""], ["export", "demo"]),
        (["whisperport", "check", "--target", ""], [one.spec.name for one in TARGETS]),
        (["whisperport", "transcribe", "--model", "large"], ["large-v3", "large-v3-turbo"]),
        (["whisperport", "transcribe", "--word-t"], ["--word-timestamps"]),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_completion_imports_no_package_for_export(words: list[str], some: list[str]) -> None:
    script = (
        "import sys; from whisperport.apps.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'onnx', 'onnxruntime'} & set(sys.modules), file=sys.stderr)"
    )
    asked = {"_WHISPERPORT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words)}
    asked["COMP_CWORD"] = str(len(words) - 1)

    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=True,
    )

    assert {f"plain,{one}" for one in some} <= set(ran.stdout.splitlines())
    assert ran.stderr.strip() == "set()"


# `--quiet`: results, warnings and errors, and nothing else.


def only_warnings(ran: Ran) -> bool:
    """Whether stderr has nothing but warnings: a random model reaches the limit of its tokens."""
    return all(line.startswith("warning: ") for line in ran.lines)


def test_every_verb_has_the_option():
    for name, verb in cli.commands.items():
        assert any("--quiet" in one.opts for one in verb.params), name


def test_a_quiet_verb_prints_its_result_alone(run, wav, bundle):
    ordinary = run("transcribe", wav, "--bundle", bundle)

    quiet = run("transcribe", wav, "--bundle", bundle, "--quiet")

    assert "next: whisperport" in ordinary.err
    assert (quiet.code, quiet.out) == (0, ordinary.out)
    assert only_warnings(quiet)


def test_several_files_are_counted_only_if_not_quiet(run, wav, bundle):
    ordinary = run("transcribe", wav, wav, "--bundle", bundle)

    quiet = run("transcribe", wav, wav, "--bundle", bundle, "-q")

    assert "2 of 2 audio files transcribed" in ordinary.err
    assert quiet.out == ordinary.out
    assert only_warnings(quiet)


def test_errors_are_printed_by_a_quiet_verb(run, tmp_path):
    ran = run("verify", tmp_path / "none", "--quiet")

    assert ran.code == 1
    assert ran.lines[0].startswith("error: there is no bundle at")
    assert ran.lines[-1].startswith("hint: ")


def test_the_next_command_without_the_option_is_not_quiet(run, wav, bundle):
    run("transcribe", wav, "--bundle", bundle, "--quiet")

    assert "next: " in run("transcribe", wav, "--bundle", bundle).err


def test_a_quiet_verb_shows_no_progress_on_a_terminal(wav, bundle):
    few = ("--max-tokens", "4", "--temperature", "0")
    arguments = ("transcribe", str(wav), "--bundle", str(bundle), *few)

    assert wav.name in in_a_terminal(*arguments)
    assert wav.name not in in_a_terminal(*arguments, "--quiet")


@pytest.mark.parametrize(("level", "shown"), [(logging.INFO, False), (logging.ERROR, True)])
def test_a_quiet_server_prints_its_failures_but_not_its_requests(run, capsys, level, shown):
    run("targets", "--quiet")

    _Log(as_json=False).emit(logging.LogRecord("x", level, "x.py", 1, "a line", (), None))

    assert ("a line" in capsys.readouterr().err) == shown
    run("targets")
