"""The help of every verb. `RENEW_SNAPSHOTS=1 pytest tests/apps/cli/test_help.py` accepts a change."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from whisperport.apps.cli import given
from whisperport.apps.cli.main import cli

# The help of every verb. `RENEW_SNAPSHOTS=1 pytest tests/apps/cli/test_help.py` accepts a change.

SNAPSHOT = Path(__file__).with_name("help.txt")  # the help of each verb, after its command
VERBS = list(cli.commands)
RENEW = "RENEW_SNAPSHOTS=1 pytest tests/apps/cli/test_help.py"

# Packages for export and runtimes: the help must not import them.
HEAVY = ("torch", "onnx", "onnxruntime", "executorch", "transformers", "safetensors")


def test_help_says_what_the_snapshot_says(run):
    shown = ""
    for verb in ["", *VERBS]:
        ran = run(*verb.split(), "--help")
        assert ran.code == 0
        shown += f"$ {' '.join(['whisperport', *verb.split(), '--help'])}\n{ran.out}\n"

    if "RENEW_SNAPSHOTS" in os.environ:
        SNAPSHOT.write_text(shown, encoding="utf-8")
    assert shown == SNAPSHOT.read_text(encoding="utf-8"), f"if this is meant: {RENEW}"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_an_example_that_calls_it(run, verb):
    out = run(verb, "--help").out

    assert re.search(rf"^    \$ .*whisperport {verb}", out, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_can_be_parsed(run, verb, monkeypatch):
    monkeypatch.setattr(given, "is_there", lambda _: True)  # an example names the reader's files
    for line in re.findall(
        rf"^    \$ whisperport {verb}\b(.*)", run(verb, "--help").out, re.MULTILINE
    ):
        arguments = shlex.split(line.partition(">")[0])

        cli.commands[verb].make_context(verb, arguments)  # raises for an unknown option


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_heading_and_a_complete_phrase(verb):
    options = [param for param in cli.commands[verb].params if isinstance(param, click.Option)]

    for option in options:
        assert option.group
        assert re.fullmatch(r"[A-Z].*[^.]", option.help), option.help
        assert len(option.help.split()) > 3, option.help


@pytest.mark.parametrize("verb", VERBS)
def test_ranges_are_shown_in_words(run, verb):
    assert not re.search(r"RANGE|INTEGER|FLOAT|<=?x|x>", run(verb, "--help").out)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_can_answer_in_json(verb):
    assert "--json" in {o for p in cli.commands[verb].params for o in p.opts}


def test_no_line_of_help_is_cut_short(run):
    assert "..." not in run("--help").out.replace("[ARGS]...", "")


def test_without_a_verb_the_help_is_shown(run):
    ran = run()

    assert (ran.code, ran.err) == (0, "")
    assert ran.out == run("--help").out


def test_help_is_100_columns_wide_wherever_it_is_not_a_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")

    out = run("export", "--help").out

    assert 80 < max(len(line) for line in out.splitlines()) <= 100


def test_help_loads_no_torch_and_no_runtime():
    # given: an interpreter of its own, since other tests have loaded torch into this one
    code = (
        "import sys; from whisperport.apps.cli.main import cli; cli(['--help'], standalone_mode=False);"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stderr.strip() == "[]"


# NumPy's threads do not use the CPU while they wait.

SEEN = """
import sys
import whisperport.__main__ as command
assert "numpy" not in sys.modules, "NumPy would not read the variable any more"
sys.argv = ["whisperport", "--version"]
try:
    command.main()
finally:
    import os
    print(os.environ[command.BLAS_THREADS])
"""


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("3", "3")])
def test_the_command_uses_one_thread_of_numpy_unless_the_user_says_otherwise(given, seen):
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}

    done = subprocess.run(
        [sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True
    )

    assert done.stdout.splitlines()[-1] == seen, done.stderr
