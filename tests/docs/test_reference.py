"""The pages agree with the code."""

import importlib.util
import json
import re
import tomllib
from dataclasses import fields
from functools import cache

import pytest

import whisperport
from whisperport import errors
from whisperport.apps.cli.main import cli
from whisperport.model.inspection.rejections import limits_of
from whisperport.model.trace.variants import program_names
from whisperport.program.bundle import FORMAT_VERSION, MANIFEST, REFERENCE, Manifest, ProgramEntry
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.checks import Check
from whisperport.program.evidence import KINDS, STATUSES, Evidence
from whisperport.program.placement import Placement
from whisperport.targets import MODULES, TARGETS
from whisperport.verification.project_evidence import status_words

from .pages import ROOT, name_of, pages

DOCS = ROOT / "docs"
HEADINGS = [
    "What runs where",
    "What you need",
    "Limits",
    "Options",
    "Rewrites",
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


SCRIPT = module_at("docs/make_reference.py")
GENERATED = SCRIPT.pages()


def test_the_pages_of_measurements_show_the_newest():
    pages = module_at("docs/measured_pages.py").PAGES

    assert [page for page, text in pages.items() if page.read_text() != text()] == [], "`make docs`"


def own_options(section):
    """Return the options that a section of the command line explains."""
    return set(re.findall(r"^- `.*?(--[\w-]+)", section, re.MULTILINE))


def test_the_page_of_the_command_line_shows_every_option_once():
    script = module_at("docs/cli_page.py")
    text = script.PAGE.read_text(encoding="utf-8")

    verbs = {name: set(script.options_of(verb, name)) for name, verb in cli.commands.items()}
    sections = {s.split("\n")[0]: s for s in re.split(r"^## ", text, flags=re.MULTILINE)}

    assert text == script.cli_page(), "run `make docs`"
    for name, options in verbs.items():
        section = sections[name]
        if earlier := re.search(r"those of \[(\w+)\].* without (.*)\.", section):  # of a long list
            lacking = set(re.findall(r"`(\S+)`", earlier[2]))
            assert lacking == verbs[earlier[1]] - options - own_options(sections[earlier[1]])
            section = section[: earlier.start()] + sections[earlier[1]]
        for option in options:
            assert f"`{option}`" in section or f"{option} " in section, (name, option)
    lines = re.findall(r"^- .*$", text, re.MULTILINE)
    assert len(lines) == len(set(lines))


def test_the_table_of_apps_names_the_oldest_and_the_newest_run(tmp_path, monkeypatch):
    results = json.loads(SCRIPT.MEASURED.read_text(encoding="utf-8"))
    results["layouts"]["rows"][0] |= {"measured_on": "2020-01-02", "cpu": "another"}
    results["layouts"]["rows"][1] |= {"measured_on": "2099-01-02"}
    (tmp_path / "apps.json").write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.setattr(SCRIPT, "ROOT", tmp_path)
    monkeypatch.setattr(SCRIPT, "MEASURED", tmp_path / "apps.json")

    table = SCRIPT._measured()

    assert ", another, 2020-01-02 to 2099-01-02, `" in table


@pytest.mark.parametrize("page", GENERATED, ids=name_of)
def test_a_generated_page_is_current(page):
    assert page.read_text(encoding="utf-8") == GENERATED[page], "run `make docs`"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.spec.name)
def test_every_target_has_a_page_with_the_six_headings_and_a_source_for_each_limit(target):
    text = read(f"docs/reference/targets/{SCRIPT.page_of(target)}.md")

    rules = set(re.findall(r"\.\./rules\.md#(wp\d+)", text.split("## Limits")[1].split("## ")[0]))

    # then: a page is called as its target, or has a table of its targets
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert text.startswith(f"# {target.spec.name}\n") or f"`{target.spec.name}`" in text
    assert {limit.rule.lower() for limit in target.spec.supports.limits} <= rules
    assert all(limit.source for limit in limits_of(target.spec))
    assert all(f"\n## {rule.upper()}\n" in read("docs/reference/rules.md") for rule in rules)


def test_the_readme_shows_the_newest_times_and_the_statuses_that_follow_from_the_evidence():
    script = module_at("docs/make_readme.py")

    assert script.with_tables(read("README.md")) == read("README.md"), "run `make docs`"


def test_the_readme_has_a_row_for_each_vendor_and_names_each_target():
    table = read("README.md").split("<!-- generated: vendors -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| \[.*$", table, re.MULTILINE)

    assert len(rows) == len(MODULES)
    for target in TARGETS:
        (row,) = [row for row in rows if f"`{target.spec.name}`" in row]
        assert status_words(target.spec.name) in row


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_the_first_pages_are_short(page):
    assert len(read(page).split()) <= 800


def test_the_pages_grow_no_further():
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS.rglob("*.md"))

    # A new page or rule is paid for by shorter sentences elsewhere.
    assert words <= 68_050


def test_every_page_is_linked_from_the_index():
    # given: the index, and that of the rules if each has a page of its own
    indexes = [DOCS / "README.md", *(DOCS / "reference" / "rules").glob("README.md")]

    linked = {
        (index.parent / link).resolve()
        for index in indexes
        for link in re.findall(r"\]\(([^)#:]+\.md)", index.read_text(encoding="utf-8"))
    }

    lost = set(DOCS.rglob("*.md")) - linked - {DOCS / "README.md"}
    assert sorted(map(name_of, lost)) == []


def test_no_page_is_for_a_target_that_is_not_there():
    there = {page.stem for page in (DOCS / "reference" / "targets").glob("*.md")}

    assert there == set(SCRIPT.targets_by_page())
    assert all(f"](reference/targets/{name}.md)" in read("docs/README.md") for name in there)


def test_every_error_class_is_documented_and_no_other():
    classes = {n for n in vars(errors) if n.endswith("Error")}

    documented = set(re.findall(r"^## (\w+)$", read("docs/reference/errors.md"), re.MULTILINE))

    assert documented == classes


@cache
def words_of_the_sources() -> str:
    """All sources in one line, with adjacent strings joined."""
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src" / "whisperport").rglob("*.py")
    )
    return re.sub(r"\s+", " ", re.sub(r'"\s*\n?\s*f?"', "", sources))


def documented_messages() -> list[str]:
    """List the messages of errors.md and of the targets' pages, each in bold at the start of an item."""
    pages = [DOCS / "reference" / "errors.md", *(DOCS / "reference" / "targets").glob("*.md")]
    texts = [page.read_text(encoding="utf-8").split("## When it fails")[-1] for page in pages]
    return sorted(
        {m for text in texts for m in re.findall(r"^- \*\*(.+?)\*\*:", text, re.MULTILINE)}
    )


def test_messages_are_documented():
    assert len(documented_messages()) > 100  # or else the test below proves nothing


@pytest.mark.parametrize("message", documented_messages())
def test_every_documented_message_is_one_that_the_code_can_say(message):
    """The words between placeholders must occur in the sources; line breaks are ignored."""
    said = words_of_the_sources()

    # when: each alternative, each run of words around what differs from case to case
    pieces = [
        piece.strip(" ,.") for piece in re.split(r"`[^`]*`|;|…|\b\d[\d,\[\]\- ]*\b|\bN\b", message)
    ]

    for piece in pieces:
        assert piece in said, f"nothing says {piece!r}"


def test_every_field_of_a_manifest_is_documented():
    text = read("docs/reference/bundle-format.md")

    classes = (Manifest, ProgramEntry, ProgramFacts, Placement, Evidence, Check)
    names = {field.name for cls in classes for field in fields(cls)}
    names = names - {"facts", "target_facts"} | {"delegation"}

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


def test_every_path_that_architecture_names_is_there():
    # given: folders of the package, as the drawing and the tables name them
    named = set(re.findall(r"(?<![\w/.])(\w+/)(?![\w.(\[])", read("ARCHITECTURE.md")))

    # when / then: those of former designs are named as such
    former = {"verify/", "inspect/", "programs/", "exporting/", "compilation/"}
    package = ROOT / "src" / "whisperport"
    known = {f"{path.name}/" for path in package.rglob("*") if path.is_dir()}
    assert not named - former - known


def test_the_newest_entry_of_the_changelog_is_this_version():
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]

    newest = re.search(r"^## (\d+\.\d+\.\d+)", read("CHANGELOG.md"), re.MULTILINE)

    assert newest
    assert newest[1] == version == whisperport.__version__


FORBIDDEN = {
    "a machine's path": r"(?<![\w.])/(work|root|home|opt|Users)/\w",
    "a package registry": r"pypi\.org|pythonhosted|download\.pytorch|--index-url|find-links",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_page_names_a_machine_or_a_registry(what):
    project = [*pages(), ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]

    naming = [
        name_of(page) for page in project if re.search(FORBIDDEN[what], page.read_text("utf-8"))
    ]

    assert naming == []
