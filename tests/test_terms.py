"""No page, message, docstring, comment or help uses a term that readers misunderstand: see `terms.py`."""

import re

import pytest

from .terms import EXCEPTIONS, ROOT, TERMS, excuse, files, helps, uses, uses_in_file

GOOD = [text for term in TERMS for text in term.good]


def report(found) -> list[str]:
    """One line for each use: where it is, its text, and what to write instead."""
    return [f"line {use.line}: {use.text!r}: write {use.term.instead}" for use in found]


def test_no_file_uses_one_of_the_terms():
    paths = files()

    assert len(paths) > 600
    assert [
        f"{path.relative_to(ROOT)}, {line}"
        for path in paths
        for line in report(use for use in uses_in_file(path) if excuse(path, use) is None)
    ] == []


def test_the_help_of_every_verb_uses_none_of_the_terms():
    assert [
        f"{verb}: {line}" for verb, text in helps().items() for line in report(uses(text))
    ] == []


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.bad)
def test_each_term_is_found_in_its_example(term):
    assert term in [use.term for use in uses(term.bad)]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.bad)
def test_a_term_is_found_in_the_next_line_too(term):
    # given: the example as the end of a paragraph, with its words on separate lines
    text = "First line.\n" + term.bad.replace(" ", "\n")

    assert term in [use.term for use in uses(text)]


@pytest.mark.parametrize("text", GOOD)
def test_similar_good_english_passes(text):
    assert report(uses(text)) == []


@pytest.mark.parametrize(
    "source",
    [
        '"""Say\nwhat was said."""\n',
        "# what was\n# said\n",
        'x = "what was " "said"\n',
        'x = f"{n} words said"\n',
    ],
    ids=["docstring", "comment", "string", "f-string"],
)
def test_a_term_is_found_in_the_text_of_a_module(tmp_path, source):
    path = tmp_path / "module.py"
    path.write_text(source)

    assert len(uses_in_file(path)) == 1


def test_names_in_code_are_not_read(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('said = f"{heard} words"\n"""See `said`."""\n')
    page = tmp_path / "page.md"
    page.write_text("See `said`.\n\n```python\nsaid = 1\n```\n")

    assert [*uses_in_file(path), *uses_in_file(page)] == []


def test_every_exception_is_used_and_has_a_reason():
    places = {path for path, _ in EXCEPTIONS}
    used = {excuse(ROOT / path, use) for path in places for use in uses_in_file(ROOT / path)}

    assert set(EXCEPTIONS) - used == set()
    assert all(EXCEPTIONS.values())


def test_the_glossary_is_in_alphabetical_order():
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")

    terms = re.findall(r"^- \*\*(.*?)\*\*:", text, re.MULTILINE)

    assert len(terms) > 30
    assert terms == sorted(terms, key=str.casefold)
