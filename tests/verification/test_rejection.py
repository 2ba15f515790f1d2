"""A rejection lists every failure, worst first, the words, and what the checkpoint itself keeps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from whisperport.errors import AudioError
from whisperport.program.bundle import ProgramEntry
from whisperport.program.checks import Check
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec
from whisperport.speech.audio import SAMPLE_RATE
from whisperport.targets import TARGETS
from whisperport.verification.clips import clips_in
from whisperport.verification.error_rate import TextErrors, increase_bounds
from whisperport.verification.loss import Loss, loss_of
from whisperport.verification.reference import Reference, ReferenceClip
from whisperport.verification.rejection import rejection
from whisperport.verification.tolerances import FLOOR_DB, GATES, limit_of
from whisperport.verification.word_check import Transcribed, undecided, word_check

from ..wav import write_wav


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
