"""Commands and code in the pages are valid for the command line and the package."""

import ast
import re
from functools import cache

import click
import pytest

import whisperport
from whisperport.apps.cli import given
from whisperport.apps.cli.main import cli
from whisperport.errors import WhisperportError

from ..dummy_vendor import listed  # noqa: F401  # the how-to shows the dummy vendor's code
from .pages import ROOT, code_blocks, name_of, pages, shell_commands

SHELL = sorted(
    {
        (name_of(page), " ".join(words))
        for page in pages()
        for words in shell_commands(page)
        if words[0] in ("whisperport", "make")
    }
)
PYTHON = [(name_of(page), code) for page in pages() for code in code_blocks(page, "python")]


def complaint(words: list[str]) -> str:
    """Return the usage error of the command line for these words; empty if they are valid."""
    end = next((i for i, word in enumerate(words) if word in (">", "|", "&&")), len(words))
    name, *arguments = words[1:end]
    verb = cli.commands.get(name)
    if verb is None:
        return f"there is no verb {name}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(given, "is_there", lambda _: True)  # a page names files of its reader
            verb.make_context(name, arguments)
    except (click.UsageError, WhisperportError) as error:
        return str(error)
    return ""


@cache
def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_pages_show_commands_and_code():
    assert len(SHELL) > 15  # or else the tests below prove nothing
    assert len(PYTHON) > 3


@pytest.mark.parametrize(("page", "command"), SHELL)
def test_a_shown_command_is_understood(page, command):
    words = command.split()

    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= make_targets(), page
    else:
        assert complaint(words) == "", page


@pytest.mark.parametrize(
    "command",
    [
        "whisperport export default --traget xnnpack --out x",
        "whisperport export default --out x",
        "whisperport sing",
        "whisperport verify a b",
        "whisperport verify default",
    ],
)
def test_a_wrong_command_is_found(command):
    assert complaint(command.split())


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_shown_code_compiles_and_uses_public_names(page, code):
    tree = ast.parse(code)

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "whisperport":
            assert node.attr in whisperport.__all__, page
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whisperport"):
            module = __import__(node.module, fromlist=["*"])
            assert all(hasattr(module, alias.name) for alias in node.names), page


def test_every_verb_is_shown_in_the_readme_or_a_tutorial():
    shown = {command.split()[1] for page, command in SHELL if command.startswith("whisperport ")}

    assert shown == set(cli.commands)


def test_continuous_integration_runs_what_the_readme_says():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    assert re.search(r"^exec make test\b", script, re.MULTILINE)
    assert ("README.md", "make test") in SHELL
    assert ("README.md", "make demo") in SHELL
