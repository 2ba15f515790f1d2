"""The pages for contributors can be followed: their code is registered, and their own tests pass."""

from typing import Any

import pytest

from whisperport.model.inspection.rules import RULES
from whisperport.model.rewrites import REWRITES
from whisperport.program.spec import Limit

from ..model.inspection import test_rules
from .pages import ROOT, code_blocks

PAGES = ROOT / "docs" / "how-to"
LONGEST = 900  # words: a page that is read before the first change


@pytest.mark.parametrize("page", ["add-a-rule.md", "add-a-rewrite.md", "add-a-target.md"])
def test_a_page_for_contributors_is_short(page: str) -> None:
    assert len((PAGES / page).read_text(encoding="utf-8").split()) <= LONGEST


def test_the_rule_of_the_how_to_finds_what_its_case_says() -> None:
    check, case, limit = code_blocks(PAGES / "add-a-rule.md", "python")
    cases: dict[str, Any] = {}

    exec(check, {"__name__": "page"})
    exec(case, {**vars(test_rules), "CASES": cases})
    exec(limit, declared := {"Limit": Limit})

    ((code, (value, broken, reason, whole)),) = cases.items()
    (of_a_target,) = declared["LIMITS"]  # type: ignore[misc]
    rule = RULES.pop(code)
    assert of_a_target == Limit(rule=code, value=value, source=of_a_target.source)
    assert [finding.reason for finding in rule.check(broken, of_a_target)] == [reason]
    assert list(rule.check(whole, of_a_target)) == []
    assert rule.what_to_do


def test_the_rewrite_of_the_how_to_passes_its_own_test() -> None:
    rewrite, test = code_blocks(PAGES / "add-a-rewrite.md", "python")
    known = set(REWRITES)
    namespace = {"__name__": "page", "__package__": "tests.model.rewrites"}

    try:
        exec(rewrite, namespace)
        exec(test, namespace)
        namespace["test_a_square_becomes_a_multiplication"]()  # type: ignore[operator]
    finally:
        added = set(REWRITES) - known
        for name in added:
            del REWRITES[name]

    assert added == {"square-by-multiplication"}
