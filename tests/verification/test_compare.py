import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions
from whisperport.targets.target_options import Option
from whisperport.verification import (
    GATES,
    LOWERED,
    REWRITTEN,
    Check,
    Gate,
    Report,
    bundle_check,
    compare,
    compare_output,
    gate_for,
)
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip
from whisperport.verification.precision import coarsest, precisions

FP32 = GATES["fp32"]
REPORT_ONLY = Gate(min_cosine=-1, min_sqnr_db=-math.inf, max_relative=math.inf, because="a test")


def features(seed: int = 0, shape: tuple[int, ...] = (1, 50, 64)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def noisy(expected: np.ndarray, sqnr_db: float, seed: int = 1) -> np.ndarray:
    """`expected` and noise of exactly this SQNR, in float64."""
    noise = np.random.default_rng(seed).standard_normal(expected.shape)
    power = np.sum(expected.astype(np.float64) ** 2) / 10 ** (sqnr_db / 10)
    return expected + noise * math.sqrt(power / np.sum(noise**2))


def test_equal_arrays_pass_every_gate() -> None:
    expected = features()

    for gate in GATES.values():
        result = compare("features", expected.copy(), expected, gate, frame_axis=1)

        assert result
        assert result.reason == ""
        assert result.cosine == pytest.approx(1)
        assert result.sqnr_db == math.inf
        assert result.max_abs == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["output", "reference", "both"])
def test_a_value_that_is_not_finite_fails_on_either_side(bad: float, side: str) -> None:
    actual, expected = features(), features()
    if side in ("output", "both"):
        actual[0, 3, 4] = bad
    if side in ("reference", "both"):
        expected[0, 3, 4] = bad

    result = compare("features", actual, expected, REPORT_ONLY)

    assert not result
    assert "1 of 3200" in result.reason
    assert "NaN or infinite" in result.reason


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (None, features(), "the output is missing"),
        (features(), None, "the reference is missing"),
        (None, None, "missing"),
        (np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32), "empty"),
        (features(), np.zeros((0, 4), np.float32), "the reference is empty"),
        (features(shape=(4, 3)), features(shape=(3, 4)), r"expected shape \(3, 4\), got \(4, 3\)"),
        (features(shape=(12,)), features(shape=(1, 12)), "expected shape"),
        (np.ones((3, 4), np.int32), np.ones((3, 4), np.float32), "expected float32, got int32"),
        (np.ones((3, 4), np.float32), np.ones((3, 4), np.int64), "expected int64, got float32"),
        (np.ones(3, bool), np.ones(3, bool), "not an array of numbers but bool"),
        (np.ones(3, complex), np.ones(3, complex), "not an array of numbers"),
        (np.array(["a"]), np.array(["a"]), "not an array of numbers"),
        (np.array([None]), np.array([None]), "not an array of numbers"),
        ([1.0, 2.0], np.array([1.0, 2.0]), "not an array of numbers but list"),
        (np.zeros((3, 4)), np.zeros((3, 4)), "all zeros"),
        (np.ones((3, 4)), np.zeros((3, 4)), "all zeros"),
    ],
)
def test_what_cannot_be_compared_fails_with_the_reason(
    actual: object, expected: object, reason: str
) -> None:
    result = compare("features", actual, expected, REPORT_ONLY)  # type: ignore[arg-type]

    assert not result
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(result.reason)
    assert math.isnan(result.cosine)


def test_zeros_in_place_of_an_output_fail_every_gate() -> None:
    for gate in GATES.values():
        assert not compare("features", np.zeros((1, 50, 64)), features(), gate)


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0])
def test_a_rescaled_output_fails_although_its_cosine_is_perfect(factor: float) -> None:
    expected = features()

    for gate in GATES.values():
        assert not compare("features", expected * np.float32(factor), expected, gate)


def test_a_dead_frame_fails_even_where_the_averages_forgive_it() -> None:
    expected = features(shape=(1, 1500, 16))
    actual = expected.copy()
    actual[0, 700] = 0

    averaged = compare("features", actual, expected, GATES["w8a8"])
    by_frame = compare("features", actual, expected, GATES["w8a8"], frame_axis=1)

    assert averaged
    assert not by_frame
    assert "frame 700" in by_frame.reason
    assert by_frame.worst_frame == 700
    assert by_frame.worst_frame_cosine == 0


def test_the_worst_frame_is_named_along_any_axis() -> None:
    expected = features(shape=(5, 6, 7))
    for axis in (0, 1, 2, -1):
        actual = expected.copy()
        frame = np.moveaxis(actual, axis, 0)[3]  # a view
        frame[0] *= 0.5

        result = compare("features", actual, expected, REPORT_ONLY, frame_axis=axis)

        assert result.worst_frame == 3
        assert 0 < result.worst_frame_cosine < 1


def test_a_silent_frame_is_not_held_against_rounding_noise() -> None:
    expected = features()
    expected[0, 7] = 0
    actual = expected.copy()
    actual[0, 7] = 1e-7

    result = compare("features", actual, expected, FP32, frame_axis=1)

    assert result
    assert result.worst_frame != 7


def test_sums_are_computed_in_float64() -> None:
    """Squares of float16 overflow at 256; a float32 sum of 4 M ones loses the small ones."""
    expected = np.full(4_000_000, 300, np.float16)
    actual = expected.copy()
    actual[::2] += 1  # float16 keeps 300 and 300.25 apart

    result = compare("features", actual, expected, REPORT_ONLY)

    assert result.sqnr_db == pytest.approx(10 * math.log10(300**2 / 0.5), abs=1e-9)
    assert result.max_abs == pytest.approx(1)


def test_the_reason_lists_each_number_that_misses() -> None:
    expected = features()

    result = compare("features", noisy(expected, 10), expected, FP32)

    assert "cosine 0.95" in result.reason
    assert "SQNR 10.0 dB is below 60 dB" in result.reason
    assert "largest error" in result.reason
    assert result.rule == "cosine ≥ 0.99999, SQNR ≥ 60 dB, max|Δ| ≤ 0.001 · max|expected|"


@pytest.mark.parametrize("precision", GATES)
def test_each_gate_passes_just_above_and_fails_just_below(precision: str) -> None:
    """In float32 the SQNR is the narrowest of the three, or the cosine; below it the SQNR alone decides."""
    gate = GATES[precision]
    expected = features(shape=(1, 500, 64)).clip(-1, 1)
    by_cosine = -math.inf
    if gate.min_cosine > 0:
        by_cosine = -10 * math.log10(1 / gate.min_cosine**2 - 1)  # cos = 1/√(1 + 10^(−SQNR/10))
    limit = max(gate.min_sqnr_db, by_cosine)
    limit = max(limit, -20 * math.log10(gate.max_relative / 5)) if gate.max_relative < 1 else limit

    assert compare("x", noisy(expected, limit + 0.3), expected, gate)
    assert not compare("x", noisy(expected, gate.min_sqnr_db - 0.1), expected, gate)
    assert len(gate.because) > 20


@settings(max_examples=50)
@given(sqnr_db=st.floats(-20, 100), seed=st.integers(0, 99))
def test_noise_of_a_given_sqnr_is_measured_as_that(sqnr_db: float, seed: int) -> None:
    expected = features(seed)

    result = compare("features", noisy(expected, sqnr_db, seed + 1), expected, REPORT_ONLY)

    assert result.sqnr_db == pytest.approx(sqnr_db, abs=1e-3)  # float64 at 100 dB keeps 6 digits


@settings(max_examples=50)
@given(exponent=st.integers(-250, 250), sign=st.sampled_from([1.0, -1.0]))
def test_scaling_both_sides_changes_nothing_but_the_absolute_error(
    exponent: int, sign: float
) -> None:
    expected = features().astype(np.float64)
    actual = noisy(expected, 30)
    scale = sign * 10.0**exponent

    plain = compare("features", actual, expected, REPORT_ONLY, frame_axis=1)
    scaled = compare("features", actual * scale, expected * scale, REPORT_ONLY, frame_axis=1)

    assert scaled.cosine == pytest.approx(plain.cosine)
    assert scaled.sqnr_db == pytest.approx(plain.sqnr_db)
    assert scaled.max_relative == pytest.approx(plain.max_relative)
    assert scaled.worst_frame == plain.worst_frame
    assert scaled.max_abs == pytest.approx(plain.max_abs * abs(scale))


@settings(max_examples=50)
@given(seed=st.integers(0, 99))
def test_the_order_of_elements_changes_nothing(seed: int) -> None:
    expected, random = features(), np.random.default_rng(seed)
    actual, order = noisy(expected, 25), random.permutation(expected.size)

    plain = compare("x", actual.ravel(), expected.ravel(), REPORT_ONLY)
    mixed = compare("x", actual.ravel()[order], expected.ravel()[order], REPORT_ONLY)

    assert mixed.sqnr_db == pytest.approx(plain.sqnr_db)
    assert mixed.cosine == pytest.approx(plain.cosine)


@settings(max_examples=100)
@given(
    a=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=3, max_size=3),
    e=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=3, max_size=3),
    gate=st.sampled_from(sorted(GATES)),
)
def test_any_numbers_give_a_verdict_and_only_near_ones_pass(
    a: list[float], e: list[float], gate: str
) -> None:
    actual, expected = np.array(a), np.array(e)

    result = compare("x", actual, expected, GATES[gate], frame_axis=0)

    if result:
        limit = 10 ** (-GATES[gate].min_sqnr_db / 20)  # of the norm
        scale = np.abs(expected).max()
        error = np.linalg.norm(actual / scale - expected / scale)
        assert error <= limit * np.linalg.norm(expected / scale) * (1 + 1e-9)


MASK = np.array([0.0, -np.inf, 1.5], np.float32)


@pytest.mark.parametrize(
    "same",
    [MASK, np.zeros(3, np.float32), np.array([1, 2]), np.array([True, False])],
    ids=["infinities", "zeros", "integers", "booleans"],
)
def test_outputs_of_any_dtype_that_are_identical_are_equal(same):
    found = compare_output("y", same.copy(), same, LOWERED["float32"])

    assert found
    assert (found.cosine, found.sqnr_db, found.max_relative) == (1.0, math.inf, 0.0)


def test_equal_infinities_are_equal_and_the_other_values_are_held_to_the_gate():
    gate = LOWERED["float32"]
    near, far = MASK + np.float32(1e-6), MASK + np.float32(1e-2)

    assert compare_output("y", near, MASK, gate)
    found = compare_output("y", far, MASK, gate)
    assert "SQNR" in found.reason
    assert found.max_abs == pytest.approx(1e-2, rel=1e-4)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (np.array([0.0, -1e30, 1.5], np.float32), MASK, "infinite values"),
        (np.array([0.0, np.inf, 1.5], np.float32), MASK, "infinite values"),
        (np.array([-np.inf, -np.inf, 1.5], np.float32), MASK, "infinite values"),
        (np.array([0.0, np.nan, 1.5], np.float32), MASK, "the output holds 1 NaN of 3 values"),
        (MASK, np.array([0.0, np.nan, 1.5], np.float32), "the reference holds 1 NaN"),
        (MASK[:2], MASK, "expected shape (3,), got (2,)"),
        (MASK.astype(np.float64), MASK, "expected float32, got float64"),
        (np.array([1, 2, 4]), np.array([1, 2, 3]), "1 of 3 values of int64 differ"),
        (np.array([True]), np.array([False]), "1 of 1 values of bool differ"),
        (np.full(3, 1e-9, np.float32), np.zeros(3, np.float32), "all zeros"),
        (None, MASK, "the output is missing"),
        (MASK[:0], MASK[:0], "the reference is empty"),
    ],
)
def test_outputs_that_differ_fail_with_a_reason(actual, expected, message):
    found = compare_output("y", actual, expected, LOWERED["float32"])

    assert not found
    assert message in found.reason


def test_the_gate_is_that_of_the_coarsest_dtype_that_a_program_computes_in():
    assert gate_for(LOWERED, ["int64", "float32"]) is LOWERED["float32"]
    assert gate_for(LOWERED, ["float32", "float16"]) is LOWERED["float16"]
    assert gate_for(REWRITTEN, ["bfloat16", "float16"]) is REWRITTEN["bfloat16"]
    assert gate_for(REWRITTEN, []) is REWRITTEN["float32"]


# A program on a chip of 8 bits is judged by what 8 bits can keep, and the others as ever.

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
