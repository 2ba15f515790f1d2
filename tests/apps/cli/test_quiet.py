"""`--quiet`: results, warnings and errors, and nothing else."""

import logging

import pytest

from whisperport.apps.cli.main import cli
from whisperport.apps.cli.serve import _Log

from .conftest import Ran
from .test_shell import in_a_terminal


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
    arguments = ("transcribe", str(wav), "--bundle", str(bundle))

    assert wav.name in in_a_terminal(*arguments)
    assert wav.name not in in_a_terminal(*arguments, "--quiet")


@pytest.mark.parametrize(("level", "shown"), [(logging.INFO, False), (logging.ERROR, True)])
def test_a_quiet_server_prints_its_failures_but_not_its_requests(run, capsys, level, shown):
    run("targets", "--quiet")

    _Log(as_json=False).emit(logging.LogRecord("x", level, "x.py", 1, "a line", (), None))

    assert ("a line" in capsys.readouterr().err) == shown
    run("targets")
