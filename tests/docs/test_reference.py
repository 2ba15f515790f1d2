"""The pages agree with the code."""

import importlib.util
import re
import tomllib
from dataclasses import fields
from functools import cache

import pytest

import whisperport
from whisperport import errors
from whisperport.bundle import FORMAT_VERSION, MANIFEST, REFERENCE, Manifest, ProgramEntry
from whisperport.bundle.program_facts import ProgramFacts
from whisperport.checks import Check
from whisperport.evidence import KINDS, STATUSES, Evidence
from whisperport.placement import Placement
from whisperport.programs.variants import program_names
from whisperport.targets import TARGETS
from whisperport.verification.project_evidence import status_words

from .pages import ROOT, name_of, pages

DOCS = ROOT / "docs"
HEADINGS = [
    "What runs where",
    "What you need",
    "Options",
    "Limits",
    "Rewrites applied",
    "When it fails",
]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def module_at(path: str):
    """Import a script that is not part of the package."""
    spec = importlib.util.spec_from_file_location("script", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED = module_at("docs/make_reference.py").pages()


def test_the_page_of_npu_compilers_shows_the_newest_measurement():
    script = module_at("docs/npu_page.py")

    assert script.PAGE.read_text(encoding="utf-8") == script.npu_page(), "run `make docs`"


@pytest.mark.parametrize("page", GENERATED, ids=name_of)
def test_a_generated_page_is_current(page):
    assert page.read_text(encoding="utf-8") == GENERATED[page], "run `make docs`"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.spec.name)
def test_every_target_has_a_page_with_the_six_headings_and_a_source_for_each_limit(target):
    # given
    text = read(f"docs/reference/targets/{target.spec.name}.md")

    # when / then
    found = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [heading for heading in found if heading in HEADINGS] == HEADINGS
    assert "not stated" not in text.split("## Limits")[1].split("## ")[0].replace(
        "the compiler decides | not stated", ""
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.spec.name)
def test_the_readme_states_the_status_that_follows_from_the_evidence(target):
    # when
    row = re.search(rf"^\| `{target.spec.name}` \|.*$", read("README.md"), re.MULTILINE)

    # then
    assert row
    assert f"| {status_words(target.spec.name)} |" in row[0]


def test_no_page_is_for_a_target_that_is_not_there():
    there = {page.stem for page in (DOCS / "reference" / "targets").glob("*.md")}

    assert there == {target.spec.name for target in TARGETS}


def test_every_error_class_is_documented_and_no_other():
    # given
    classes = {n for n in vars(errors) if n.endswith("Error")}

    # when
    documented = set(re.findall(r"^## (\w+)$", read("docs/reference/errors.md"), re.MULTILINE))

    # then
    assert documented == classes


@cache
def words_of_the_sources() -> str:
    """All sources in one line, with adjacent strings joined."""
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src" / "whisperport").rglob("*.py")
    )
    return re.sub(r"\s+", " ", re.sub(r'"\s*\n?\s*f?"', "", sources))


@pytest.mark.parametrize(
    "message",
    re.findall(r"^\| ([^|]+?) \|", read("docs/reference/errors.md"), re.MULTILINE),
)
def test_every_documented_message_is_one_that_the_code_can_say(message):
    """The words between placeholders must occur in the sources; line breaks are ignored."""
    # given
    if message in ("Message", "Exit code", "---") or message.isdigit():
        return
    said = words_of_the_sources()

    # when: each alternative, each run of words around what differs from case to case
    pieces = [
        piece.strip(" ,.") for piece in re.split(r"`[^`]*`|;|…|\b\d[\d,\[\]\- ]*\b|\bN\b", message)
    ]

    # then
    for piece in pieces:
        assert piece in said, f"nothing says {piece!r}"


def test_every_field_of_a_manifest_is_documented():
    # given
    text = read("docs/reference/bundle-format.md")

    # when
    classes = (Manifest, ProgramEntry, ProgramFacts, Placement, Evidence, Check)
    names = {field.name for cls in classes for field in fields(cls)}
    names = names - {"facts", "others"} | {"delegation"}

    # then
    assert [name for name in names if f"`{name}`" not in text] == []
    assert [status for status in STATUSES if f"| *{status}* |" not in text] == []
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []
    assert f"Format version {FORMAT_VERSION}" in text
    assert MANIFEST in text
    assert REFERENCE in text


def test_every_program_is_documented():
    for page in ("docs/explanation/programs.md", "docs/how-to/place-programs.md"):
        text = read(page)
        assert [name for name in program_names() if f"`{name}`" not in text] == [], page


def test_the_import_table_is_the_one_that_a_test_enforces():
    # given
    layers = module_at("tests/test_imports.py").LAYERS
    table = read("ARCHITECTURE.md").split("## Who may import whom")[1].split("## ")[0]

    # when
    rows = re.findall(r"^\| \w+ \| ([^|]*`[^|]*) \|", table, re.MULTILINE)
    shown = [tuple(re.findall(r"`(\w+)`", row)) for row in rows]

    # then
    assert shown == list(layers)


def test_every_path_that_architecture_names_is_there():
    # given: folders of the package, as the drawing and the tables name them
    named = set(re.findall(r"(?<![\w/.])(\w+/)(?![\w.(\[])", read("ARCHITECTURE.md")))

    # when / then: those that the first design had are named as such
    former = {"export/", "verify/", "inspect/"}
    package = ROOT / "src" / "whisperport"
    assert [name for name in named - former if not (package / name).is_dir()] == []


def test_the_newest_entry_of_the_changelog_is_this_version():
    # given
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]

    # when
    newest = re.search(r"^## (\d+\.\d+\.\d+)", read("CHANGELOG.md"), re.MULTILINE)

    # then
    assert newest
    assert newest[1] == version == whisperport.__version__


FORBIDDEN = {
    "a machine's path": r"(?<![\w.])/(work|root|home|opt|Users)/\w",
    "a package registry": r"pypi\.org|pythonhosted|download\.pytorch|--index-url|find-links",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_page_names_a_machine_or_a_registry(what):
    # given
    project = [*pages(), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]

    # when
    naming = [
        name_of(page) for page in project if re.search(FORBIDDEN[what], page.read_text("utf-8"))
    ]

    # then
    assert naming == []
