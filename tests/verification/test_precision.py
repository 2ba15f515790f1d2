"""A program on a chip of 8 bits is judged by what 8 bits can keep, and the others as ever."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions
from whisperport.targets.options import Option
from whisperport.verification import Check, Report, bundle_check
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip
from whisperport.verification.precision import coarsest, precisions

EMULATED = RunOptions(threads=1, options={"fake.emulate": "on"})


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """The run option of the fake target."""

    emulate: Annotated[Literal["off", "on"], Option("Run the programs on the CPU")] = "off"


@pytest.fixture
def hybrid(micro_checkpoint: Any, fake_targets: Any, quick_tracing: None, tmp_path: Path) -> Bundle:
    """The micro model, its encoder on a target that computes in 8 bits."""
    fake_targets["fake"].spec = replace(
        fake_targets["fake"].spec,
        runs=replace(
            fake_targets["fake"].spec.runs, precisions=("w8a8",), emulation={"emulate": "on"}
        ),
    )
    fake_targets["fake"].run_options = Emulation
    random = np.random.default_rng(0)
    clips = [
        Clip(f"clip {i}", "", (0.1 * random.standard_normal(3200)).astype(np.float32))
        for i in range(3)
    ]
    options = ExportOptions(clips=clips, run=EMULATED, placement={"encoder": "fake"})
    return export(micro_checkpoint, "other", tmp_path / "bundle", options)


def in_precision(bundle: Bundle, precision: str) -> Bundle:
    """The bundle, whose manifest states this precision for every program."""
    programs = tuple(
        replace(entry, placement=replace(entry.placement, precision=precision))
        for entry in bundle.manifest.programs
    )
    return replace(bundle, manifest=replace(bundle.manifest, programs=programs))


def noise_of(sqnr_db: float) -> Callable[[np.ndarray], np.ndarray]:
    """Adds the same noise to the same features each time, as rounding does."""

    def noisy(features: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(7).standard_normal(features.shape)
        power = np.sum(features.astype(np.float64) ** 2) / 10 ** (sqnr_db / 10)
        return features + noise * np.sqrt(power / np.sum(noise**2))

    return noisy


def failed(report: Report) -> set[tuple[str, str]]:
    return {(check.level, check.program) for check in report.checks if not check.passed}


def of(report: Report, level: str, program: str) -> Check:
    return next(c for c in report.checks if (c.level, c.program) == (level, program))


def test_a_chip_of_8_bits_has_its_own_precision_and_emulated_float32(
    hybrid: Bundle,
) -> None:
    assert precisions(hybrid)["encoder"] == "w8a8"
    assert precisions(hybrid)["step"] == "fp32"
    assert set(precisions(hybrid, EMULATED).values()) == {"fp32"}


def test_a_precision_without_limits_is_rejected_by_name(hybrid: Bundle) -> None:
    newer = in_precision(hybrid, "int4")

    with pytest.raises(BundleError) as rejected:
        precisions(newer)

    assert "`int4`" in rejected.value.what


def test_the_precision_of_which_least_is_asked_is_the_coarsest() -> None:
    assert coarsest(["fp32", "w8a8", "fp16"]) == "w8a8"
    assert coarsest(["fp32", "fp16"]) == "fp16"


def test_an_encoder_of_8_bits_is_judged_apart_and_the_decoder_behind_it_as_float32(
    hybrid: Bundle, fake_targets: Any
) -> None:
    fake_targets["fake"].wrong = {"encoder": {"features": noise_of(25)}}

    report = verify(hybrid)

    assert of(report, "arrays", "encoder").passed
    assert 24 < of(report, "arrays", "encoder").value["sqnr_db"] < 26
    assert of(report, "arrays", "encoder").rule == "SQNR ≥ 10 dB"
    for program in ("prefill", "step", "prefill, longer", "align"):
        assert of(report, "arrays", program).passed
        assert of(report, "arrays", program).value["sqnr_db"] > 60
        assert "SQNR ≥ 60 dB" in of(report, "arrays", program).rule
    assert "100.0%" in of(report, "tokens", "prefill + step").rule  # on the reference's features
    assert "at most 0.5% above" in of(report, "words", "all programs").rule


def test_a_wrong_decoder_is_found_behind_an_encoder_of_8_bits(
    hybrid: Bundle, fake_targets: Any
) -> None:
    fake_targets["fake"].wrong = {"encoder": {"features": noise_of(25)}}
    fake_targets["other"].wrong = {"step": {"logits": lambda logits: logits * 1.01}}

    assert ("arrays", "step") in failed(verify(hybrid))


def test_the_same_noise_of_emulation_fails(hybrid: Bundle, fake_targets: Any) -> None:
    fake_targets["fake"].wrong = {"encoder": {"features": noise_of(25)}}

    assert ("arrays", "encoder") in failed(verify(hybrid, run=EMULATED))


def test_tokens_that_8_bits_chose_are_reported_and_the_words_decide(
    hybrid: Bundle, fake_targets: Any
) -> None:
    fake_targets["other"].wrong = {"prefill_4": {"logits": lambda logits: logits[:, ::-1]}}

    report = verify(hybrid)
    free = [c for c in report.checks if c.what.endswith(", free")]

    assert all(check.passed for check in free)
    assert any(check.value["n_same"] < check.value["n_expected"] for check in free)
    assert {check.rule for check in free} == {"reported only: the error rate decides"}
    assert ("tokens", "prefill + step") in failed(report)  # the reference was sure


def test_an_empty_result_is_a_failure_at_any_precision(
    hybrid: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = bundle_check.decode_window

    def nothing(*arguments: Any) -> Any:
        return replace(heard(*arguments), tokens=())

    monkeypatch.setattr(bundle_check, "decode_window", nothing)

    free = [c for c in verify(hybrid).checks if c.what.endswith(", free")]

    assert len(free) == 3
    assert not any(check.passed for check in free)


def test_a_dead_encoder_of_8_bits_fails(hybrid: Bundle, fake_targets: Any) -> None:
    fake_targets["fake"].wrong = {"encoder": {"features": np.zeros_like}}

    assert ("arrays", "encoder") in failed(verify(hybrid))
