"""A bundle is verified by its reference, and a reference that compares nothing verifies nothing."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.apps.demo import lowest_sqnr_db
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle import EMBEDDING, REFERENCE, Bundle
from whisperport.program.runner import Array, Runner
from whisperport.program.signatures import LOGSUMEXP
from whisperport.runtime.engine.scores import Scores, log_sum_exp
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions
from whisperport.verification import LEVELS, Check, Report, bundle_check
from whisperport.verification.batch_check import TOLERANCE, sum_checks
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip
from whisperport.verification.reference import Reference, ReferenceClip

from ..embedded import default_bundle
from ..extent import core_or_all

# A bundle is verified by its reference, and a reference that compares nothing verifies nothing.

ONE_THREAD = RunOptions(threads=1)


@pytest.fixture
def bundle(micro_bundle: Bundle, tmp_path: Path) -> Bundle:
    """The micro model on a target that compiles nothing: verified in a tenth of a second."""
    return Bundle.open(shutil.copytree(micro_bundle.folder, tmp_path / "bundle"))


@pytest.fixture
def with_reference(bundle: Bundle) -> Callable[..., Bundle]:
    """`with_reference(change)`: the bundle with another reference; hashes are not asked."""

    return partial(referred, bundle)


def referred(bundle: Bundle, change: Callable[[Reference], Reference]) -> Bundle:
    changed = change(Reference.from_arrays(bundle.reference()))
    np.savez(bundle.folder / REFERENCE, allow_pickle=False, **changed.to_arrays())
    return bundle


def every_clip(
    change: Callable[[ReferenceClip], dict[str, Any]],
) -> Callable[[Reference], Reference]:
    return lambda reference: replace(
        reference, clips=tuple(replace(clip, **change(clip)) for clip in reference.clips)
    )


def first_clip(
    change: Callable[[ReferenceClip], dict[str, Any]],
) -> Callable[[Reference], Reference]:
    def changed(reference: Reference) -> Reference:
        first, *others = reference.clips
        return replace(reference, clips=(replace(first, **change(first)), *others))

    return changed


def test_an_untouched_bundle_passes_at_every_level(bundle: Bundle) -> None:
    told: list[str] = []

    with reporting(told.append):
        report = verify(bundle.folder, run=ONE_THREAD)

    assert report
    assert {check.level for check in report.checks} == set(LEVELS)
    assert {check.program for check in report.checks if check.level == "arrays"} == {
        *("encoder", "prefill", "prefill, longer", "step", "align")
    }
    assert report.machine
    assert "whisperport" in report.versions
    assert Report.from_json(report.to_json()) == report
    assert told


def spoiled(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    if array.size:
        array.flat[-1] = value
    return array


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["features", "logits"])
def test_a_reference_that_is_no_number_fails(with_reference: Any, name: str, value: float) -> None:
    bundle = with_reference(first_clip(lambda clip: {name: spoiled(getattr(clip, name), value)}))

    report = verify(bundle, run=ONE_THREAD)

    assert not report
    assert any("NaN or infinite" in failure for failure in report.failures())


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("encoder", "features"),
        ("cross_kv", "cross_k_0"),
        ("prefill_4", "logits"),
        ("prefill_64", "logits"),
        ("step", "logits"),
        ("align", "scores"),
    ],
)
def test_a_program_that_returns_a_nan_is_a_failed_check_that_names_it(
    bundle: Bundle, fake_targets: Any, program: str, output: str
) -> None:
    fake_targets["fake"].wrong = {program: {output: lambda array: spoiled(array, np.nan)}}

    report = verify(bundle, run=ONE_THREAD)

    assert not report
    failed = [check for check in report.checks if not check.passed]
    assert {check.program for check in failed} == {program}
    assert all("a NaN or an infinity" in check.reason for check in failed)
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    "wrong",
    [lambda s: s[::-1].copy(), lambda s: np.roll(s, 1, axis=-1), np.zeros_like, lambda s: 1.01 * s],
    ids=["heads in reverse", "a position later", "zeros", "one percent more"],
)
def test_wrong_attention_scores_fail_though_every_token_is_right(
    bundle: Bundle, fake_targets: Any, wrong: Any
) -> None:
    fake_targets["fake"].wrong = {
        "align": {"scores": lambda array: wrong(array).astype(array.dtype)}
    }

    report = verify(bundle, run=ONE_THREAD)

    failed = [check for check in report.checks if not check.passed]
    assert {(check.level, check.program) for check in failed} == {("arrays", "align")}
    assert all("attention scores" in check.what for check in failed)


def test_a_reference_of_an_earlier_version_has_no_attention_scores(with_reference: Any) -> None:
    bundle = with_reference(every_clip(lambda clip: {"scores": clip.scores[:0]}))

    report = verify(bundle, run=ONE_THREAD)

    assert report
    assert not [check for check in report.checks if "attention scores" in check.what]


def test_a_reference_without_arrays_fails(with_reference: Any) -> None:
    bundle = with_reference(
        every_clip(lambda clip: {"features": clip.features[:0], "logits": clip.logits[:0]})
    )

    report = verify(bundle, run=ONE_THREAD)

    assert report.failures() == ("nothing was compared at the level `arrays`",)


def test_a_reference_without_clips_fails_at_every_level(with_reference: Any) -> None:
    bundle = with_reference(lambda reference: replace(reference, clips=()))

    report = verify(bundle, run=ONE_THREAD)

    assert not report
    failed = " ".join(report.failures())
    for level in ("arrays", "tokens", "isolation"):
        assert f"nothing was compared at the level `{level}`" in failed
    assert "the reference has no words" in failed


def test_only_the_named_clips_are_run(bundle: Bundle) -> None:
    report = verify(bundle, run=ONE_THREAD, clips=["clip 1"])

    assert report
    named = {check.what.split(",")[0].removesuffix(" after others") for check in report.checks}
    assert named == {"clip 1", "word error rate"}


@pytest.mark.parametrize(
    ("clips", "words"),
    [
        (["clip 1", "clip 9"], "the bundle's reference has no clip `clip 9`"),
        (["clip 2"], "the reference has no arrays of clip 2"),
    ],
)
def test_a_clip_that_cannot_be_verified_with_is_a_usage_error(
    bundle: Bundle, clips: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        verify(bundle, run=ONE_THREAD, clips=clips)

    assert "clip 0, clip 1" in refused.value.hint


@pytest.fixture
def chinese(
    micro_checkpoint: Any, fake_targets: Any, quick_tracing: None, tmp_path: Path
) -> Bundle:
    """A bundle of the micro model, which knows Chinese, verified with two clips of it and one more."""
    checkpoint = replace(
        micro_checkpoint,
        generation=replace(micro_checkpoint.generation, languages={"en": 51, "zh": 52}),
        tokenizer_json=micro_checkpoint.tokenizer_json.replace(b"<|de|>", b"<|zh|>"),
    )
    random = np.random.default_rng(0)
    spoken = [("请右转", "zh"), ("", "Chinese"), ("so they say", "en")]
    clips = [
        Clip(f"clip {i}", text, (0.1 * random.standard_normal(3200)).astype(np.float32), language)
        for i, (text, language) in enumerate(spoken)
    ]
    options = ExportOptions(clips=clips, run=ONE_THREAD)
    return export(checkpoint, "fake", tmp_path / "bundle", options)


def test_a_language_without_spaces_is_judged_by_its_characters(chinese: Bundle) -> None:
    report = verify(chinese, run=ONE_THREAD)

    assert report
    words, characters = (check for check in report.checks if check.level == "words")
    assert words.what == "word error rate"
    assert words.value["clips"] == 1
    assert words.value["words"] == 3
    assert words.value["wer"] == words.value["reference_wer"]
    assert characters.what == "character error rate"
    assert characters.value["clips"] == 2
    assert characters.value["characters"] == 3
    assert characters.value["cer"] == characters.value["reference_cer"]
    assert characters.rule.startswith("CER at most 0.1% above the reference's. 0 of ")
    assert Report.from_json(report.to_json()) == report


def test_a_rise_is_named_by_what_was_counted(chinese: Bundle) -> None:
    message = every_clip(lambda _: {"text": "abc", "tokens": (0, 1, 2, 49)})

    failures = verify(referred(chinese, message), run=ONE_THREAD).failures()

    assert any("word error rate (words): the WER is" in failure for failure in failures)
    assert any("character error rate (words): the CER is" in failure for failure in failures)


def test_each_clip_is_transcribed_in_its_own_language(chinese: Bundle) -> None:
    prompts = [clip.prompt[1] for clip in Reference.from_arrays(chinese.reference()).clips]

    assert prompts == [52, 52, 51]


def test_a_language_that_the_checkpoint_does_not_have_is_rejected(
    micro_checkpoint: Any, fake_targets: Any, quick_tracing: None, tmp_path: Path
) -> None:
    clips = [Clip("clip", "請右轉", np.zeros(3200, np.float32), "yue")]

    with pytest.raises(UsageError, match="no language `yue`"):
        export(micro_checkpoint, "fake", tmp_path / "bundle", ExportOptions(clips=clips))


def test_a_clip_without_tokens_fails(with_reference: Any) -> None:
    bundle = with_reference(every_clip(lambda _: {"tokens": ()}))

    report = verify(bundle, run=ONE_THREAD)

    assert not report
    assert any("the reference holds no tokens" in failure for failure in report.failures())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (first_clip(lambda c: {"tokens": (*c.tokens[:-1], 1)}), "first to differ"),
        (first_clip(lambda c: {"tokens": (*c.tokens[:-1], 49)}), "first to differ"),
        (first_clip(lambda c: {"tokens": c.tokens[:-1]}), "first to differ"),
        (first_clip(lambda c: {"logits": c.logits * np.float32(1.01)}), "SQNR"),
        (first_clip(lambda c: {"scores": c.scores * np.float32(1.01)}), "SQNR"),
        (first_clip(lambda c: {"features": c.features[::-1].copy()}), "cosine"),
        (first_clip(lambda c: {"features": c.features[:, :8]}), "expected shape"),
    ],
    ids=[
        "another token",
        "an end",
        "a token less",
        "logits",
        "scores",
        "frames in reverse",
        "shape",
    ],
)
def test_another_reference_is_not_agreed_with(with_reference: Any, change: Any, words: str) -> None:
    report = verify(with_reference(change), run=ONE_THREAD)

    assert not report
    assert any(words in failure for failure in report.failures())


def test_an_end_of_text_does_not_equal_another_last_token(
    with_reference: Any, fake_targets: Any
) -> None:
    """The model ends where the reference, cut by its limit, decoded one token more."""
    bundle = with_reference(lambda reference: replace(reference, max_tokens=20))
    end = bundle.manifest.generation.end_of_text
    steps = iter(range(10_000))

    def end_at_the_last_step(logits: np.ndarray) -> np.ndarray:
        logits = logits.copy()
        if next(steps) % 19 == 18:
            logits[0, end] = 1e3
        return logits

    fake_targets["fake"].wrong = {"step": {"logits": end_at_the_last_step}}

    report = verify(with_reference(every_clip(lambda c: {"logits": c.logits[:0]})), run=ONE_THREAD)

    assert any("free" in failure and "token 19" in failure for failure in report.failures())


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("names"),
        lambda arrays: arrays.pop("tokens_1"),
        lambda arrays: arrays.update(samples_0=arrays["samples_0"].astype(np.float64)),
        lambda arrays: arrays.update(features_0=arrays["features_0"][None]),
        lambda arrays: arrays.update(max_tokens=np.array(["many"])),
    ],
    ids=[
        "no names",
        "no tokens",
        "samples in float64",
        "features of rank 3",
        "a word for a number",
    ],
)
def test_a_reference_of_another_form_is_a_bundle_error(
    bundle: Bundle, change: Callable[[Any], Any]
) -> None:
    arrays = bundle.reference()
    change(arrays)
    np.savez(bundle.folder / REFERENCE, allow_pickle=False, **arrays)

    with pytest.raises(BundleError, match="reference cannot be read"):
        verify(bundle, run=ONE_THREAD)


def test_a_bundle_whose_bytes_changed_is_not_even_run(bundle: Bundle) -> None:
    data = bytearray((bundle.folder / EMBEDDING).read_bytes())
    data[-1] ^= 1
    (bundle.folder / EMBEDDING).write_bytes(data)

    with pytest.raises(BundleError, match="damaged"):
        verify(bundle.folder, run=ONE_THREAD)


def test_a_session_that_remembers_is_found(
    bundle: Bundle, fake_targets: Any, eager_runners: Any
) -> None:
    """Clip after clip: the logits of a step drift with every call."""
    calls = iter(range(10_000))
    fake_targets["fake"].wrong = {
        "step": {"logits": lambda logits: logits * np.float32(1 + 1e-6 * next(calls))}
    }

    report = verify(bundle, run=ONE_THREAD)

    isolation = [check for check in report.checks if check.level == "isolation"]
    assert [check.passed for check in isolation] == [False]


# With ONNX Runtime -------------------------------------------------------------------------------


@pytest.fixture
def copied(exported: Callable[[str], Bundle], tmp_path: Path) -> Bundle:
    bundle = exported("onnxruntime")
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "copied"))
    return Bundle(folder, bundle.manifest)  # hashes are not asked: they would find it, too


def test_a_real_bundle_is_verified_again(copied: Bundle) -> None:
    assert verify(copied, run=ONE_THREAD)


@pytest.mark.parametrize("share", core_or_all([0.5], [0.05, 0.5, 0.9]))
def test_flipped_signs_in_its_weights_are_found(copied: Bundle, share: float) -> None:
    file = copied.folder / "onnxruntime/weights.bin"
    weights = np.memmap(file, dtype=np.float32, mode="r+")
    start = int(share * weights.size)
    weights[start : start + 4096] *= -1
    weights.flush()

    report = verify(copied, run=ONE_THREAD)

    assert not report
    assert report.failures()


def test_another_embedding_is_found(copied: Bundle) -> None:
    table = np.load(copied.folder / EMBEDDING)
    np.save(copied.folder / EMBEDDING, np.roll(table, 1, axis=0))

    report = verify(copied, run=ONE_THREAD)

    failed = {check.program for check in report.checks if not check.passed}
    assert {"prefill", "step"} <= failed
    assert "encoder" not in failed


# The sum of exponentials that a program returns is verified, singly and in a batch.


def scores(error: float) -> Scores:
    row = (4 * np.random.default_rng(0).standard_normal(51_865)).astype(np.float32)
    return Scores(row, log_sum_exp(row) + error)


@pytest.mark.parametrize("error", [0.0, 0.5 * TOLERANCE, -0.5 * TOLERANCE])
def test_a_right_sum_passes(error: float) -> None:
    (check,) = sum_checks("step", "clip", [scores(0), scores(error)])

    assert check.passed
    assert check.value["sum_error"] == pytest.approx(abs(error), abs=2e-5)


@pytest.mark.parametrize("error", [2 * TOLERANCE, -2 * TOLERANCE, -30.0, 30.0])
def test_a_wrong_sum_fails(error: float) -> None:
    (check,) = sum_checks("step", "clip", [scores(0), scores(error), scores(0)])

    assert not check.passed
    assert check.reason.startswith("the largest difference is")


def test_a_nan_fails_wherever_it_is() -> None:
    for place in range(3):
        found = [scores(0) for _ in range(3)]
        found[place] = scores(float("nan"))

        (check,) = sum_checks("step", "clip", found)

        assert not check.passed


def test_a_program_without_the_output_is_not_checked() -> None:
    assert not list(sum_checks("step", "clip", [Scores(np.zeros(5, np.float32))]))


def test_the_sums_of_a_real_bundle_are_checked(
    exported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = exported("onnxruntime", "micro", batch=2)
    of_sums = [check for check in verify(bundle, run=ONE_THREAD).checks if "sum" in check.what]
    assert {check.program for check in of_sums} == {"step", "step_2"}
    assert all(check.passed for check in of_sums)
    for entry in bundle.manifest.programs:
        has_sum = LOGSUMEXP in [output.name for output in entry.spec.outputs]
        assert has_sum == (entry.spec.name in ("step", "step_2"))

    assert (
        60 < lowest_sqnr_db(verify(bundle, run=ONE_THREAD).checks) < 300
    )  # those of the other arrays

    monkeypatch.setattr("whisperport.verification.batch_check.TOLERANCE", -1)
    report = verify(bundle, run=ONE_THREAD)

    assert {check.program for check in report.checks if not check.passed} == {"step", "step_2"}


# An encoder of 8 bits above 10 dB is judged by the words that are decoded from it.
#
# Noise stands in for quantization, behind the real encoder of the shipped bundle.

CLIPS = 2


class _Changed(Runner):
    """An encoder whose features are changed, the same way each time."""

    def __init__(self, encoder: Runner, change: Callable[[Array], Array]) -> None:
        super().__init__(encoder.spec)
        self._encoder, self._change = encoder, change

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        names = [tensor.name for tensor in self.spec.inputs]
        outputs = self._encoder.run(dict(zip(names, inputs, strict=True)))
        return [self._change(array).astype(np.float32) for array in outputs.values()]


@pytest.fixture
def report_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """`report_of(change)`: of the shipped bundle, with an encoder of 8 bits and changed features."""
    bundle = Bundle.open(default_bundle())
    load, precisions = bundle_check.load_engine, bundle_check.precisions
    reference = Reference.from_arrays(bundle.reference())
    few = replace(reference, clips=reference.clips[:CLIPS])

    def report_of(change: Callable[[Array], Array], precision: str = "w8a8") -> Report:
        def changed(runner: Runner) -> Runner:
            return _Changed(runner, change) if runner.spec.name == "encoder" else runner

        monkeypatch.setattr(Reference, "from_arrays", staticmethod(lambda _: few))
        monkeypatch.setattr(
            bundle_check, "precisions", lambda *a: precisions(*a) | {"encoder": precision}
        )
        monkeypatch.setattr(bundle_check, "load_engine", lambda b, run: load(b, run, changed))
        return verify(bundle, run=RunOptions(threads=1))

    return report_of


def noise_of(sqnr_db: float) -> Callable[[Array], Array]:
    """Noise of this SQNR, the same each time, as rounding's is."""

    def noisy(features: Array) -> Array:
        noise = np.random.default_rng(7).standard_normal(features.shape)
        power = np.sum(features.astype(np.float64) ** 2) / 10 ** (sqnr_db / 10)
        return features + noise * np.sqrt(power / np.sum(noise**2))

    return noisy


def _failed(report: Report) -> set[tuple[str, str]]:
    return {(check.level, check.program) for check in report.checks if not check.passed}


def _checks(report: Report, level: str, program: str) -> list[Check]:
    return [c for c in report.checks if (c.level, c.program) == (level, program)]


def test_an_encoder_of_12_db_that_keeps_the_words_passes_and_its_decibels_are_reported(
    report_of: Any,
) -> None:
    report = report_of(noise_of(12))

    assert report, report.failures()
    encoder = _checks(report, "arrays", "encoder")
    assert [check.value["sqnr_db"] for check in encoder] == pytest.approx([12] * CLIPS, abs=0.1)
    assert {check.rule for check in encoder} == {"SQNR ≥ 10 dB"}
    (words,) = _checks(report, "words", "all programs")
    assert words.value["change"] == 0
    assert words.value["words"] > 10


def test_an_encoder_below_10_db_fails_although_its_words_are_right(report_of: Any) -> None:
    """The words of short, clear clips alone would pass an encoder that has no reserve left."""
    report = report_of(noise_of(8))

    assert _failed(report) == {("arrays", "encoder")}
    assert any("SQNR 8.0 dB is below 10 dB" in failure for failure in report.failures())


def test_an_encoder_that_loses_words_fails_by_the_words_too(report_of: Any) -> None:
    report = report_of(noise_of(-6))

    assert _failed(report) == {("arrays", "encoder"), ("words", "all programs")}
    assert any("the WER is" in failure for failure in report.failures())


def test_an_encoder_of_16_bit_activations_is_judged_by_its_decibels(report_of: Any) -> None:
    assert ("arrays", "encoder") in _failed(report_of(noise_of(12), "w8a16"))


def _dead_frame(features: Array) -> Array:
    features = features.copy()
    features[:, 500] *= -1
    return features


def _nan(features: Array) -> Array:
    features = features.copy()
    features[0, 5, 3] = np.nan
    return features


@pytest.mark.parametrize("change", [_dead_frame, _nan, np.zeros_like], ids=lambda f: f.__name__)
def test_a_dead_frame_a_nan_and_zeros_fail_whatever_the_words_are(
    report_of: Any, change: Any
) -> None:
    assert ("arrays", "encoder") in _failed(report_of(change))
