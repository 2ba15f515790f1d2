"""Text of others, such as names of files and words of a tokenizer, never reaches the terminal raw."""

import ast
import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

import whisperport.apps.cli
from whisperport.apps.cli import console, live
from whisperport.apps.cli.console import AudioBar, Stages, print_error, print_next, print_table
from whisperport.errors import WhisperportError
from whisperport.speech.text import Segment, Word
from whisperport.system.printable import is_printable
from whisperport.transcription import Transcript
from whisperport.transcription.live.transcriber import LiveUpdate

pytestmark = pytest.mark.usefixtures("any_bundle")

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\nhint: forged\nerror: forged\u2028\u202egnp\x9b31m\x7f\udce9"
HOSTILE += " :smile: [red]"


def assert_safe(text: str) -> None:
    """Nothing that a terminal obeys, and no line that looks like one of ours."""
    assert is_printable(text.replace("\n", ""))
    assert not [line for line in text.splitlines() if line.startswith(("hint: f", "error: f"))]


VERBS = [
    ["transcribe", HOSTILE],
    ["transcribe", "talk.wav", "--bundle", HOSTILE],
    ["transcribe", "talk.wav", "--model", HOSTILE],
    ["transcribe", "talk.wav", "--language", HOSTILE],
    ["transcribe", "talk.wav", "--task", HOSTILE],
    ["transcribe", "talk.wav", "--run-option", HOSTILE],
    ["transcribe", "talk.wav", "--suppress-tokens", HOSTILE],
    ["live", "-", "--raw", HOSTILE],
    ["verify", HOSTILE],
    ["bench", HOSTILE],
    ["bench", "--transcript", HOSTILE],
    ["inspect", HOSTILE],
    ["check", HOSTILE, "--target", "xnnpack"],
    ["check", "x.pt2", "--target", HOSTILE],
    ["lower", HOSTILE, "--target", "xnnpack", "--out", "x.pte"],
    ["lower", "x.pt2", "--target", HOSTILE, "--out", "x.pte"],
    ["export", HOSTILE, "--target", "onnxruntime", "--out", "out"],
    ["export", "default", "--target", HOSTILE, "--out", "out"],
    ["export", "default", "--target", "onnxruntime", "--placement", HOSTILE, "--out", "out"],
    ["import", HOSTILE, "--checkpoint", "default", "--out", "out"],
    ["compile", HOSTILE],
    ["explain", HOSTILE],
    ["demo", "--target", HOSTILE],
    [HOSTILE],
    [f"--{HOSTILE}"],
]


@pytest.mark.parametrize("arguments", VERBS, ids=lambda words: " ".join(map(repr, words))[:60])
def test_arguments_are_shown_escaped(run, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)

    ran = run(*arguments)

    assert ran.code in (1, 2)
    assert ran.out == ""
    assert [line for line in ran.lines if line.startswith("error: ")]
    assert "unexpected error" not in ran.err  # it was foreseen
    assert_safe(ran.err)


@pytest.mark.parametrize("odd", ["", ".", "/dev/null", "x" * 5000, "socket", "pipe", "\udcff"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["verify"],
        ["transcribe", "talk.wav", "--bundle"],
        ["check", "--target", "xnnpack"],
        ["lower", "--target", "xnnpack", "--out", "x.pte"],
        ["compile"],
        ["import", "--checkpoint", "default", "--out", "out"],
        ["export", "--target", "onnxruntime", "--out", "out"],
        ["explain"],
    ],
    ids=" ".join,
)
def test_arguments_that_name_nothing_usable_are_errors(run, monkeypatch, tmp_path, arguments, odd):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")

    ran = run(*arguments, odd)

    assert ran.code in (1, 2)
    assert "unexpected error" not in ran.err
    assert [line for line in ran.lines if line.startswith("error: ")]
    assert_safe(ran.err)


def test_what_packages_say_is_shown_escaped(run, monkeypatch):
    # given: warnings, log records of ours and of others, and an exception that nobody foresaw
    def hostile(_: Any) -> bool:
        warnings.warn(HOSTILE, stacklevel=1)
        logging.getLogger("whisperport.anything").warning(HOSTILE)
        logging.getLogger("some.library").warning(HOSTILE)
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr("whisperport.apps.cli.targets.is_installed", hostile)
    monkeypatch.setenv("WHISPERPORT_TRACEBACK", "1")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ran = run("targets")

    assert ran.err.count("warning: ") == 3
    assert ran.err.count(" :smile: [red]") >= 4  # neither markup nor an emoji
    assert "error: whisperport failed" in ran.err
    assert_safe(ran.err)


def test_lines_of_an_explanation_stay_lines(capsys):
    print_error(WhisperportError("it broke", why="one\ntwo\nhint: forged", hint="a\nb"))

    assert capsys.readouterr().err.splitlines() == [
        "error: it broke",
        "  why: one",
        "       two",
        "       hint: forged",
        "",
        "hint: a",
        "      b",
    ]


def test_a_name_is_neither_markup_nor_an_emoji(capsys):
    print_error(WhisperportError("[red]:smile:[/red]"))
    print_table(["name"], [[":smile:"]])

    shown = capsys.readouterr()
    assert shown.err == "error: [red]:smile:[/red]\n"
    assert ":smile:" in shown.out


def test_cells_of_a_table_cannot_forge_rows(capsys):
    print_table(["name", "result"], [[f"{HOSTILE}\nencoder  pass", "FAIL"]])

    out = capsys.readouterr().out
    assert_safe(out)
    assert not [line for line in out.splitlines() if line.startswith("encoder")]


SEGMENT = Segment(0.0, 1.0, f" {HOSTILE}\n\n9\n00:00:09,000 ---> 00:00:10,000\nforged\t0\t1")


@pytest.mark.usefixtures("talk")
@pytest.mark.parametrize("form", ["txt", "srt", "vtt", "tsv", "json"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_transcript_is_shown_escaped(run, monkeypatch, form, as_json):
    from whisperport.apps.cli import transcribe as verb

    transcript = Transcript(SEGMENT.text.strip(), (SEGMENT,), "en", 1.0, ())
    monkeypatch.setattr(verb, "run_transcribe", lambda *_, **__: transcript)

    ran = run("transcribe", "talk.wav", "--output-format", form, *["--json"] * as_json)

    assert ran.code == 0
    assert_safe(ran.out.replace("\t", ""))
    if as_json:
        assert json.loads(ran.out)["text"] == transcript.text
    elif form == "json":
        assert json.loads(ran.out)["segments"][0]["text"] == SEGMENT.text
    else:
        assert len(ran.out.splitlines()) == {"txt": 1, "srt": 4, "vtt": 5, "tsv": 2}[form]


def a_terminal() -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, force_terminal=True, width=80, emoji=False), shown


def test_progress_is_shown_escaped(monkeypatch):
    terminal, shown = a_terminal()
    monkeypatch.setattr(console, "MIN_REPORTED_S", 0.0)

    with Progress(console=terminal) as progress:
        AudioBar(progress, HOSTILE)
        stages = Stages(progress)
        stages(HOSTILE)
        stages.finish()

    assert all(is_printable(task.description) for task in progress.tasks)
    assert r"\x1b]0;title\x07" in shown.getvalue()
    assert "\x1b]0;" not in shown.getvalue()


def test_the_live_screen_shows_words_escaped(monkeypatch, capsys):
    terminal, shown = a_terminal()
    monkeypatch.setattr(live, "stderr", terminal)
    word = Word(HOSTILE, 0.0, 1.0, 0.5)

    screen = live.Screen(text=True)
    screen.show(LiveUpdate((word,), (), (word,), HOSTILE, 1.0))
    screen.show(LiveUpdate((), (SEGMENT,), (), HOSTILE, 1.0))

    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert_safe(out)
    assert "\x1b]0;" not in shown.getvalue()
    assert "\n" not in shown.getvalue()


NAMES = [
    b"caf\xe9.wav",
    b"\x1b]0;title\x07 it's a \\ \xff.wav",
    "\u202etxt.vaw\n; rm -rf $HOME `id` 日本".encode(),
    b"a\nb",
    b"plain name's.wav",
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="a next command is for a shell")
def test_a_next_command_with_any_name_can_be_copied_to_bash(capsysbinary):
    print_next("transcribe", *map(os.fsdecode, NAMES))

    command = capsysbinary.readouterr().err.decode().strip().removeprefix("next: ")
    assert is_printable(command)
    script = f'whisperport() {{ printf "%s\\0" "$@"; }}; {command}'
    copied = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    assert copied.split(b"\0")[:-1] == [b"transcribe", *NAMES]


def test_everything_is_printed_by_the_console():
    """`print` and click's `echo` would go around the one place that escapes."""
    folder = Path(whisperport.apps.cli.__file__).parent
    for file in folder.glob("*.py"):
        if file.name == "console.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in (
                    "print",
                    "click.echo",
                    "click.secho",
                    "echo",
                ), f"{file.name}:{node.lineno}"


INTERRUPTED = """
import os, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Interrupting())
from whisperport.__main__ import main
sys.argv = ["whisperport", "targets"]
main()
"""


@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143)])
def test_an_interrupt_during_imports_has_no_traceback(number, status):
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(number=number)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ran.returncode, ran.stdout) == (status, "")
    assert ran.stderr == "interrupted: nothing was left half-written\n"


TWICE = """
import atexit, os, signal, sys
import whisperport.apps.cli.doctor
from whisperport.__main__ import main

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def examine():
    try:
        interrupt()
    finally:
        interrupt()

whisperport.apps.cli.doctor.examine = examine
atexit.register(interrupt)
sys.argv = ["whisperport", "doctor"]
main()
"""


def test_more_interrupts_while_it_tidies_up_have_no_traceback():
    ran = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=False)

    assert ran.returncode == -2  # by the last one, which ends the process at once
    assert ran.stderr == "interrupted: nothing was left half-written\n"
