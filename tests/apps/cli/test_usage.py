"""Command lines that do not say what to do: exit code 2, and which help to read."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sing"], "no such command 'sing'"),
        (["--loud"], "no such option '--loud'"),
        (["export"], "missing argument 'CHECKPOINT'"),
        (["export", "default"], "missing option '--target' / '-t'"),
        (["verify"], "missing argument 'BUNDLE'"),
        (["transcribe"], "missing argument 'AUDIO'"),
        (["transcribe", "a.wav", "--threads", "0"], "0 is not in the range 1 to 1024"),
        (["transcribe", "a.wav", "--task", "sing"], "'sing' is not one of"),
        (["transcribe", "a.wav", "--run-option", "fast"], "expected NAME=VALUE, got 'fast'"),
        (["verify", "a", "b"], "got unexpected extra argument"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_help(run, arguments, says):
    ran = run(*arguments)

    assert (ran.code, ran.out) == (2, "")
    assert ran.lines[0].startswith("error: ")
    assert says in ran.lines[0]
    assert ran.lines[1].startswith("  usage: whisperport ")
    assert ran.lines[-1].startswith("hint: whisperport ")
    assert ran.lines[-1].endswith("--help")


def test_version_is_the_package_s(run):
    from whisperport import __version__

    ran = run("--version")

    assert (ran.code, ran.out) == (0, f"whisperport, version {__version__}\n")
