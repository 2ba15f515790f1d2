"""Pages of the documentation: links, commands and limits are those of the package."""

import ast
import math
import re
from functools import cache
from pathlib import Path

import click
import pytest

import whisperport
from whisperport.apps.cli import given
from whisperport.apps.cli.main import cli
from whisperport.errors import WhisperportError
from whisperport.verification.tolerances import (
    FLOOR_DB,
    GATES,
    MARGINS_DB,
    REWRITTEN,
    limit_of,
)
from whisperport.verification.word_check import max_change

from ..dummy_vendor import listed  # noqa: F401  # the how-to shows the dummy vendor's code
from .pages import ROOT, code_blocks, name_of, pages, shell_commands

# Every link inside the project leads to an existing file and heading.

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of headings, as GitHub makes them."""
    headings = HEADING.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """List the links of `page` to missing files or missing headings."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in LINK.finditer(CODE.sub("", text)):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue  # elsewhere: tests are offline
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_relative_links_resolve(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n[ok](#a-heading) [no](#none) [gone](gone.md) [far](https://x.org)\n"
        "`[code](no.md)`\n[ref]: lost.md\n"
    )

    assert broken_links(page) == ["#none", "gone.md", "lost.md"]


# Commands and code in the pages are valid for the command line and the package.

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


# The limits that pages state are those of the tables in the code.

VERIFICATION = "docs/explanation/verification.md"
HOW_TO = "docs/how-to"
W8A8 = GATES["w8a8"].min_sqnr_db
NUMBER = r"(\d[\de.-]*)"
# A page, a sentence of it with numbers, and these numbers.
STATED = (
    (
        VERIFICATION,
        f"In `fp32`, the cosine must be at least {NUMBER}, the SQNR {NUMBER} dB, and the largest error at "
        f"most {NUMBER} of",
        (GATES["fp32"].min_cosine, GATES["fp32"].min_sqnr_db, GATES["fp32"].max_relative),
    ),
    (VERIFICATION, f"at least {NUMBER} dB, and the words decide", (FLOOR_DB,)),
    (
        VERIFICATION,
        f"torch's own `w8` has {NUMBER} dB or less, the limit is {NUMBER} dB",
        (FLOOR_DB + MARGINS_DB["w8"], FLOOR_DB),
    ),
    (VERIFICATION, f"No limit is below {NUMBER} dB", (FLOOR_DB,)),
    (VERIFICATION, f"reference's features as its input, at {NUMBER} dB", (60.0,)),
    (VERIFICATION, f"in 8 bits, the words decide, above {NUMBER} dB", (FLOOR_DB,)),
    (VERIFICATION, f"so below {NUMBER} dB an encoder fails", (FLOOR_DB,)),
    (
        VERIFICATION,
        f"may be at most {NUMBER} percentage points above that of the reference",
        (100 * max_change("fp32"),),
    ),
    (
        VERIFICATION,
        f"than `fp32` and `fp16`, {NUMBER} points",
        (100 * max_change("w8a8"),),
    ),
    (
        VERIFICATION,
        f"error rate may increase by {NUMBER} percentage points",
        (100 * max_change("w8a8"),),
    ),
    (
        "docs/explanation/third-party-programs.md",
        f"a cosine of at least {NUMBER}, an SQNR of at least {NUMBER} dB, and no error above {NUMBER} of",
        (
            REWRITTEN["float32"].min_cosine,
            REWRITTEN["float32"].min_sqnr_db,
            REWRITTEN["float32"].max_relative,
        ),
    ),
    (f"{HOW_TO}/compare-two-programs.md", rf"\({NUMBER} dB for a quantized program\)", (W8A8,)),
    (f"{HOW_TO}/ethos-u85.md", f"`prefill_4` 7.1 dB; the limit is {NUMBER} dB", (W8A8,)),
    (
        f"{HOW_TO}/raspberry-pi-hailo.md",
        f"judges an 8-bit encoder of at least {NUMBER} dB",
        (FLOOR_DB,),
    ),
    (
        f"{HOW_TO}/mediatek-genio.md",
        f"which is rejected, because the limit is {NUMBER} dB",
        (FLOOR_DB,),
    ),
    ("docs/reference/targets/litert.md", f"`export` requires {NUMBER} dB", (FLOOR_DB,)),
)


def _text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def _rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is `heading`."""
    after = (ROOT / page).read_text(encoding="utf-8").partition(f"\n| {heading} |")[2]
    lines = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(("page", "sentence", "limits"), STATED)
def test_the_limits_of_a_sentence_are_those_of_the_code(page, sentence, limits):
    # given the sentence on its page
    found = re.search(sentence, _text(page))
    # when its numbers are read
    assert found, sentence
    # then they are the limits
    assert [float(number) for number in found.groups()] == pytest.approx(limits)


def test_the_limits_for_the_vendor_are_those_of_a_verification():
    # given the table of the page
    rows = _rows(f"{HOW_TO}/mediatek-genio.md", "Precision of the encoder")
    # when the limits of an encoder are written in its form
    expected = []
    for precision in ("fp32", "fp16", "w8a16", "w8a8"):
        gate = limit_of(precision, None, encoder=True)
        expected.append(
            (
                precision,
                f"{gate.min_sqnr_db:g} dB",
                "no limit" if gate.min_cosine == -1 else f"{gate.min_cosine:g}",
                "no limit" if math.isinf(gate.max_relative) else f"{gate.max_relative:g}",
                f"{100 * max_change(precision):g} points",
            )
        )
    # then the table is the same
    assert [(row[0].split("`")[1], *row[1:]) for row in rows] == expected


def test_the_margins_against_torch_are_those_of_the_code():
    # given the table of the page, without the row of the precision that has no margin
    rows = _rows(VERIFICATION, "Precision")
    # when its margins are read by precision
    stated = {
        precision: float(row[1].removesuffix(" dB"))
        for row in rows
        for precision in re.findall(r"`(\w+)`", row[0])
        if row[1] != "none"
    }
    # then they are those of the code
    assert stated == MARGINS_DB
