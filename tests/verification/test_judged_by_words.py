"""An encoder of 8 bits above 10 dB is judged by the words that are decoded from it.

Noise stands in for quantization, behind the real encoder of the shipped bundle.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from whisperport.program.bundle import Bundle
from whisperport.program.runner import Array, Runner
from whisperport.targets import RunOptions
from whisperport.verification import Check, Report, bundle_check
from whisperport.verification.bundle_check import verify
from whisperport.verification.reference import Reference

from ..embedded import default_bundle

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
