"""What only a real process shows: pipes that close early, and terminals."""

import os
import pty
import subprocess
import sys

WHISPERPORT = [sys.executable, "-c", "from whisperport.cli import main; main()"]


def test_a_reader_that_stops_early_gets_no_traceback():
    # given: a pipe whose reader has gone, as after `| head -1`
    reader, writer = os.pipe()
    os.close(reader)

    # when
    ran = subprocess.run(
        [*WHISPERPORT, "targets", "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)

    # then
    assert (ran.returncode, ran.stderr) == (1, "")


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


def test_no_color_takes_the_colour_from_errors():
    # when
    coloured = in_a_terminal("verify", "no-such-bundle", NO_COLOR="")
    plain = in_a_terminal("verify", "no-such-bundle", NO_COLOR="1")

    # then
    red = "\x1b[1;31m"
    assert red in coloured
    assert red not in plain
    assert "error: there is no bundle at no-such-bundle" in plain


def test_a_sound_from_the_terminal_is_refused_rather_than_awaited(tmp_path):
    # when
    shown = in_a_terminal("transcribe", "-", "--bundle", str(tmp_path))

    # then: whichever of the two is wrong is said; neither waits for the keyboard
    assert "error: " in shown
