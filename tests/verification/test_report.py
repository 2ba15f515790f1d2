"""Reports: how comparisons pass and fail, and how a rejection lists every failure, worst first."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.errors import AudioError, BundleError
from whisperport.program.bundle import ProgramEntry
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec
from whisperport.speech.audio import SAMPLE_RATE
from whisperport.targets import TARGETS
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
from whisperport.verification.clips import clips_in
from whisperport.verification.error_rate import TextErrors, increase_bounds
from whisperport.verification.loss import Loss, loss_of
from whisperport.verification.reference import Reference, ReferenceClip
from whisperport.verification.report import rejection
from whisperport.verification.tolerances import FLOOR_DB, limit_of
from whisperport.verification.word_check import Transcribed, undecided, word_check

from ..wav import write_wav


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


def loss(sqnr_db: float) -> Loss:
    numbers = dict.fromkeys(("median", "p99", "p999", "largest"), 0.1)
    return Loss(sqnr_db=sqnr_db, speech_sqnr_db=30, worst_row_db=9, rms=2.0, **numbers)


def clip(text: str = "one two three", **changes: object) -> ReferenceClip:
    none = np.empty((0, 4), np.float32)
    samples = np.zeros(3200, np.int16)
    made = ReferenceClip("clip", text, samples, (1,), (2, 3), none, none, none)
    return replace(made, **changes)  # type: ignore[arg-type]


def failed(program: str, sqnr_db: float) -> Check:
    value, reason = {"sqnr_db": sqnr_db}, f"SQNR {sqnr_db} dB"
    return Check(
        level="arrays", program=program, what="x", value=value, rule="", passed=False, reason=reason
    )


def test_all_failures_are_listed_the_worst_first_with_what_torch_keeps() -> None:
    checks = [failed(f"program_{n}", n) for n in (9, 3, 8, 1, 7)]
    losses = {("fp16", "features"): loss(60), ("w8", "features"): loss(24)}
    lines = rejection(checks, Reference((clip(losses=losses),), 8), []).split("\n")

    assert [line.split(",")[0] for line in lines[:5]] == [f"program_{n}" for n in (1, 3, 7, 8, 9)]
    assert "keeps fp16 60 dB, w8 24 dB" in lines[5]


def on_litert(name: str, precision: str) -> ProgramEntry:
    spec, placement = ProgramSpec(name, (), ()), Placement("litert", precision)
    return ProgramEntry(spec=spec, placement=placement, method=name, files=())


def test_the_precisions_of_the_target_that_lose_less_are_named() -> None:
    losses = {("fp16", "features"): loss(60), ("w8", "features"): loss(FLOOR_DB - 1)}
    programs = [on_litert("encoder", "w8a8"), on_litert("step", "fp16"), on_litert("align", "fp16")]

    lines = rejection([], Reference((clip(losses=losses),), 8), programs).split("\n")

    # torch itself loses the encoder in w8, which w8a16 contains
    assert lines[1:] == [
        "`litert` also runs encoder in fp32, fp16: `--precision encoder=fp16`",
        "`litert` also runs step, align in fp32: `--precision step=fp32`",
    ]
    assert rejection([], Reference((), 8), [on_litert("step", "fp32")]) == ""


def test_every_precision_of_a_target_has_limits() -> None:
    assert {precision for one in TARGETS for precision in one.spec.runs.precisions} <= GATES.keys()


def test_the_words_that_were_lost_are_counted_or_what_the_clips_cannot_show() -> None:
    same = [transcribed("one two three", "one two three")] * 10
    lost = transcribed("one", "one two three")
    reference = Reference((), 8)

    none = rejection([word_check(same, "words", "w8a8")], reference, [])
    some = rejection([word_check([*same, lost], "words", "w8a8")], reference, [])

    assert none == (
        "words: none of 30 differs from float32's in 10 clips, which cannot show that the WER increases "
        "by less than 10.0 points"
    )
    assert some.split("\n")[1].startswith(
        "words: 2 of 33 differ from float32's in 11 clips (WER +6.1 points; with 95%, at most +"
    )
    assert "2 more errors in 33 words" in some.split("\n")[0]


def test_losses_and_margins_are_stored_with_the_reference() -> None:
    losses = {("bf16", "logits"): loss(40.5)}
    reference = Reference((clip(losses=losses, margins=np.array([2, 1], np.float32)),), 8)
    read = Reference.from_arrays(reference.to_arrays())

    assert read.loss("bf16", "logits") == loss(40.5)
    assert read.loss("fp16", "logits") is None
    assert read.clips[0].margins.tolist() == [2, 1]


def test_the_limit_follows_the_checkpoint_down_to_the_floor() -> None:
    assert limit_of("fp16", loss(65)).min_sqnr_db == 39
    assert limit_of("w8", loss(24)).min_sqnr_db == FLOOR_DB
    assert limit_of("fp32", loss(24)).min_sqnr_db == 60
    assert limit_of("fp16", None).min_sqnr_db == 35


def test_a_loss_that_is_not_finite_has_no_decibels() -> None:
    expected = np.ones((3, 4), np.float32)
    actual = expected.copy()
    actual[1, 1] = np.inf

    assert loss_of(actual, expected).sqnr_db == -np.inf


def transcribed(
    text: str, expected: str, transcript: str = "one two three", margin: float = 9
) -> Transcribed:
    made = clip(transcript, margins=np.array([margin], np.float32))
    return Transcribed(clip=made, tokens=(2,), text=text, expected=expected, unit="words")


def test_one_error_more_is_no_failure_below_float16_and_two_are() -> None:
    same = [transcribed("one two three", "one two three")] * 20
    one, two = transcribed("one two", "one two three"), transcribed("one", "one two three")

    assert word_check([*same, one], "words", "w8").passed
    assert not word_check([*same, one], "words", "fp16").passed
    found = word_check([*same, two], "words", "w8")
    assert "2 more errors in 63 words" in found.reason
    assert "0 of 60 words differ" in word_check(same, "words", "w8").rule


def test_a_clip_that_is_luck_decides_nothing() -> None:
    assert undecided(transcribed("one two three", "one two three"), "w8", loss(40)) == ""
    assert "0.05 logits" in undecided(transcribed("a", "a", margin=0.05), "w8", None)
    assert "float32 itself" in undecided(transcribed("one", "four"), "w8", None)
    assert undecided(transcribed("one", "four"), "fp32", None) == ""


def test_without_a_difference_the_bound_is_the_rule_of_three() -> None:
    equal = (TextErrors(length=100), TextErrors(length=100))
    worse = (TextErrors(deletions=30, length=100), TextErrors(length=100))

    assert increase_bounds([equal] * 4) == (0.0, 3 / 400)
    low, high = increase_bounds([worse] * 4)
    assert low == pytest.approx(0.3)
    assert 0.3 < high < 1  # one clip more may be as bad


def test_the_bound_holds_where_few_clips_lose_many_words() -> None:
    """40 sets of 150 clips, of which a tenth lose 1 to 6 words: a bound of 95% holds in at least 38."""
    random = np.random.default_rng(3)
    lost = np.zeros(1000, int)
    lost[:100] = random.choice([1, 1, 1, 2, 2, 3, -1, 4, 6], 100)
    true = lost.sum() / (10 * lost.size)

    held = 0
    for _ in range(40):
        pairs = [
            (TextErrors(insertions=5 + int(more), length=10), TextErrors(insertions=5, length=10))
            for more in random.choice(lost, 150)
        ]
        held += increase_bounds(pairs, n=500)[1] >= true

    assert held >= 38


def test_a_folder_of_recordings_gives_clips_with_their_transcripts(tmp_path: Path) -> None:
    for name in ("b.wav", "a.wav"):
        write_wav(tmp_path / name, np.zeros(SAMPLE_RATE // 2))
    (tmp_path / "b.txt").write_text("what b says\n")

    found = clips_in(tmp_path, "de")

    assert [(one.name, one.text, one.language) for one in found] == [
        ("a.wav", "", "de"),
        ("b.wav", "what b says", "de"),
    ]
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(AudioError, match="empty"):
        clips_in(tmp_path, "de")


def test_a_folder_without_recordings_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(AudioError):
            clips_in(folder, "en")
