import copy
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.errors import BundleError
from whisperport.verification import (
    GATES,
    LEVELS,
    TOKEN_GATES,
    Check,
    Level,
    Report,
    compare,
    compare_logits,
    compare_tokens,
)


def check(level: Level = "arrays", **changes: Any) -> Check:
    fields: dict[str, Any] = {"value": {"cosine": 1.0}, "rule": "cosine ≥ 0.99", "passed": True}
    return Check(level=level, program="encoder", what="features", **(fields | changes))


FAILED = check(passed=False, reason="cosine 0.5 is below 0.99", value={"cosine": 0.5})
PASSED = Report(subject="nano", checks=tuple(check(level) for level in LEVELS), seconds=1.5)


def test_a_report_passes_when_every_level_was_checked_and_passed() -> None:
    assert PASSED
    assert PASSED.failures() == ()


@pytest.mark.parametrize("required", [LEVELS, ("arrays",), ()])
def test_nothing_compared_is_a_failure(required: tuple[Level, ...]) -> None:
    report = Report(subject="nano", checks=(), required=required)

    assert not report
    assert "nothing was compared" in report.failures()[0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_required_level_without_a_check_is_a_failure(level: Level) -> None:
    checks = tuple(c for c in PASSED.checks if c.level != level)

    report = replace(PASSED, checks=checks)

    assert not report
    assert report.failures() == (f"nothing was compared at the level `{level}`",)
    assert replace(report, required=tuple(c.level for c in checks))


def test_one_failed_check_among_many_fails_the_report() -> None:
    report = replace(PASSED, checks=(*PASSED.checks, FAILED, check()))

    assert not report
    assert report.failures() == ("encoder, features (arrays): cosine 0.5 is below 0.99",)


def test_a_failed_check_of_a_level_not_required_still_fails() -> None:
    assert not Report(subject="nano", checks=(check("tokens"), FAILED), required=("tokens",))


@pytest.mark.parametrize(
    "changes",
    [
        {"value": {}},
        {"value": {"cosine": math.nan}},
        {"reason": "but"},
        {"passed": False},
        {"level": "vibes"},
    ],
)
def test_a_check_that_contradicts_itself_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"check|level"):
        check(**changes)


def test_comparisons_become_checks() -> None:
    array = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)
    good = compare("features", array, array, GATES["fp32"], frame_axis=0)
    missing = compare("features", None, array, GATES["fp32"])
    logits = compare_logits(array, array, TOKEN_GATES["fp32"])
    tokens = compare_tokens([1, 2], [1, 3])

    checks = (
        Check.of("arrays", "encoder", "features", good),
        Check.of("arrays", "encoder", "features", missing),
        Check.of("tokens", "step", "logits", logits),
        Check.of("tokens", "transcribe", "clip 1", tokens),
    )

    assert [c.passed for c in checks] == [True, False, True, False]
    assert checks[0].value["sqnr_db"] == math.inf
    assert "missing" in checks[1].reason
    report = Report(subject="nano", checks=checks)
    assert Report.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False))) is not None


def test_the_summary_has_one_row_for_each_check() -> None:
    rows = replace(PASSED, checks=(*PASSED.checks, FAILED)).summary()

    assert len(rows) == 5
    assert rows[0] == {
        "level": "arrays",
        "program": "encoder",
        "what": "features",
        "measured": "cosine 1",
        "rule": "cosine ≥ 0.99",
        "result": "pass",
    }
    assert rows[4]["result"] == "FAIL: cosine 0.5 is below 0.99"


numbers = st.one_of(st.integers(0, 2**40), st.floats(allow_nan=False))


@settings(max_examples=100)
@given(values=st.dictionaries(st.text(min_size=1, max_size=5), numbers, min_size=1, max_size=4))
def test_a_report_survives_the_round_trip_infinities_included(values: dict[str, float]) -> None:
    given = replace(PASSED, checks=(check(value=values), FAILED))

    text = json.dumps(given.to_json(), allow_nan=False)

    assert Report.from_json(json.loads(text)) == given


def test_a_nan_survives_the_round_trip() -> None:
    failed = replace(FAILED, value={"cosine": math.nan, "low": -math.inf})

    text = json.dumps(replace(PASSED, checks=(failed,)).to_json(), allow_nan=False)
    back = Report.from_json(json.loads(text))

    assert math.isnan(back.checks[0].value["cosine"])
    assert back.checks[0].value["low"] == -math.inf


def test_numpys_own_numbers_are_written() -> None:
    report = replace(PASSED, checks=(check(value={"a": np.float32(0.5), "b": np.int64(3)}),))

    text = json.dumps(report.to_json(), allow_nan=False)

    assert Report.from_json(json.loads(text)).checks[0].value == {"a": 0.5, "b": 3}


def test_a_verdict_that_its_checks_do_not_support_is_rejected() -> None:
    document = replace(PASSED, checks=(FAILED,)).to_json()
    document["passed"] = True

    with pytest.raises(BundleError, match="passed"):
        Report.from_json(document)


def test_a_passing_check_with_a_nan_is_rejected() -> None:
    document = json.loads(json.dumps(PASSED.to_json()))
    document["checks"][0]["value"]["cosine"] = "nan"

    with pytest.raises(BundleError, match=r"checks\[0\]"):
        Report.from_json(document)


@pytest.mark.parametrize("name", [*PASSED.to_json()])
@pytest.mark.parametrize("wrong", [None, 7, "text", [7], {"a": 7}, True])
def test_each_wrong_or_missing_field_is_named(name: str, wrong: Any) -> None:
    document = json.loads(json.dumps(PASSED.to_json()))
    missing = copy.deepcopy(document)
    del missing[name]
    damaged = document | {name: wrong}

    with pytest.raises(BundleError, match=name):
        Report.from_json(missing)
    free = type(wrong) is type(document[name]) or (name == "seconds" and wrong == 7)
    if free or (name == "machine" and isinstance(wrong, dict)):
        return
    with pytest.raises(BundleError, match=name):
        Report.from_json(damaged)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=200)
@given(data=st.data())
def test_any_value_anywhere_raises_a_bundle_error_or_nothing(data: st.DataObject) -> None:
    document = json.loads(json.dumps(PASSED.to_json()))
    place = data.draw(st.sampled_from([document, document["checks"][0], document["checks"]]))
    key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else [0, 1]))
    place[key] = data.draw(ANYTHING)

    try:
        report = Report.from_json(document)
    except BundleError:
        return

    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == document
