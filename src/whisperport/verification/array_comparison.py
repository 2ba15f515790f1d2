"""Compare an output array with its reference. A comparison fails unless it passed.

The tolerances are in `tolerances.py`.

`mistaken_for` finds whether an output is that of another clip, an earlier frame, or another layout. An
SQNR of 13 dB can be a correct program of 8 bits, or an exact one that is a frame late. So an output must
not be clearly closer to a wrong expectation than to its own. Massive activations, single channels
hundreds of times larger than all others, would decide such a comparison alone; each channel is clipped
first.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The limits of a comparison at one precision."""

    min_cosine: float  # cosine similarity of the complete output; -1: no limit
    min_sqnr_db: float  # 10·log10(Σ expected² / Σ (actual − expected)²); −infinity: no limit
    max_relative: float  # max|actual − expected| / max|expected|; infinity: no limit
    because: str  # source of the limits

    @property
    def rule(self) -> str:
        """The limits in words, for reports."""
        parts = []
        if self.min_cosine > -1:
            parts.append(f"cosine ≥ {self.min_cosine:g}")
        if math.isfinite(self.min_sqnr_db):
            parts.append(f"SQNR ≥ {self.min_sqnr_db:g} dB")
        if math.isfinite(self.max_relative):
            parts.append(f"max|Δ| ≤ {self.max_relative:g} · max|expected|")
        return ", ".join(parts)


def min_sqnr_of(rule: str) -> float | None:
    """Return the least SQNR in dB of a gate's rule; None: the rule has none."""
    match = re.search(r"SQNR ≥ (-?[\d.]+) dB", rule)
    return float(match[1]) if match else None


# A frame whose root mean square is below this part of the strongest frame's rounds to 0 in 8 bits: half of
# 1/127.
FAINT = 1 / 254


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing one output. It is True if the comparison passed.

    A number that could not be computed is NaN.
    """

    output: str  # name of the output
    rule: str  # the limits in words
    reason: str  # why it failed; empty: it passed
    cosine: float = math.nan
    worst_frame_cosine: float = math.nan  # lowest cosine of a frame; NaN without a frame axis
    worst_frame: int | None = None  # index of that frame
    sqnr_db: float = math.nan
    max_abs: float = math.nan  # largest absolute error
    max_relative: float = math.nan  # the same, divided by the reference's largest absolute value
    speech_sqnr_db: float | None = None  # SQNR of the frames up to the end of the speech
    carriers: int | None = None  # number of values that carry 90 % of the squared error

    def __bool__(self) -> bool:
        return not self.reason

    def numbers(self) -> dict[str, float]:
        """Return the measured numbers by name."""
        numbers = {
            "cosine": self.cosine,
            "sqnr_db": self.sqnr_db,
            "max_abs": self.max_abs,
            "max_relative": self.max_relative,
        }
        if self.worst_frame is not None:
            numbers["worst_frame_cosine"] = self.worst_frame_cosine
            numbers["worst_frame"] = self.worst_frame
        if self.speech_sqnr_db is not None:
            numbers["speech_sqnr_db"] = self.speech_sqnr_db
        if self.carriers is not None:
            numbers["values_of_90_percent"] = self.carriers
        return numbers


def compare(
    name: str,
    actual: NDArray[Any] | None,
    expected: NDArray[Any] | None,
    gate: Gate,
    frame_axis: int | None = None,
    speech: int | None = None,
    wrong_references: Mapping[str, NDArray[Any]] | None = None,
) -> Comparison:
    """Compare one output with its reference; sums are computed in float64.

    The comparison fails if

    - either side is missing, empty, not numeric, or holds a NaN or an infinity;
    - the shapes differ, or one side is integer and the other floating-point;
    - the reference is all zeros;
    - a number is outside the limits of the gate;
    - the output is clearly closer to one of `wrong_references`, or to its reference early, late or
      transposed;
    - the cosine of a frame is 0 or less, which a mean over 1,500 frames would not show.

    Args:
        name: name of the output.
        actual: output of the lowered program; None: it has none.
        expected: the reference, of any shape.
        gate: the limits.
        frame_axis: axis of the frames, if each frame is to be compared too. Frames whose root mean square
            is below 1/254 of the strongest frame's are not compared.
        speech: number of first frames up to the end of the clip; None: all. Needs `frame_axis`.
        wrong_references: what a matrix with the frames first must not be mistaken for, by name, such as the
            features of another clip; None: this is not checked.
    """
    reason = _incomparable(actual, expected)
    if reason or actual is None or expected is None:
        return Comparison(output=name, rule=gate.rule, reason=reason)
    e, a, scale = _scaled(actual, expected)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = a - e
        noise = float(np.sum(difference**2))
        max_relative = float(np.max(np.abs(difference)))
    signal = float(np.sum(e**2))
    cosine = float(_cosine(a.reshape(1, -1), e.reshape(1, -1))[0])
    sqnr_db = 10 * math.log10(signal / noise) if 0 < noise < math.inf else _limit_db(noise)
    worst_frame, worst_frame_cosine = None, math.nan
    if frame_axis is not None:
        worst_frame, worst_frame_cosine = _worst_frame(a, e, frame_axis)
    misses = []
    if not cosine >= gate.min_cosine:
        misses.append(f"cosine {cosine:.6f} is below {gate.min_cosine:g}")
    if not sqnr_db >= gate.min_sqnr_db:
        misses.append(f"SQNR {sqnr_db:.1f} dB is below {gate.min_sqnr_db:g} dB")
    if not max_relative <= gate.max_relative:
        misses.append(
            f"the largest error divided by the reference's largest value is {max_relative:.2g}, above "
            f"{gate.max_relative:g}"
        )
    if worst_frame_cosine <= 0:
        misses.append(f"the cosine of frame {worst_frame} and its reference is 0 or less")
    if wrong_references is not None and (
        mistake := mistaken_for(a, e, _divided(wrong_references, scale), speech or len(e))
    ):
        misses.append(mistake)
    carriers = _carriers(difference) if misses else None
    if carriers is not None:
        misses.append(f"{carriers:,} of {e.size:,} values carry 90 % of the error")
    return Comparison(
        output=name,
        rule=gate.rule,
        reason="; ".join(misses),
        cosine=cosine,
        worst_frame_cosine=worst_frame_cosine,
        worst_frame=worst_frame,
        sqnr_db=sqnr_db,
        max_abs=max_relative * scale,
        max_relative=max_relative,
        speech_sqnr_db=None if frame_axis is None else _speech_db(a, e, frame_axis, speech),
        carriers=carriers,
    )


def compare_output(
    name: str, actual: NDArray[Any] | None, expected: NDArray[Any] | None, gate: Gate
) -> Comparison:
    """Compare one output, of any dtype, of two programs that had the same inputs.

    Unlike `compare`, it accepts everything that third-party programs return. Infinities, such as those of
    masks, must be in the same places; the gate applies to the other values. Integers and booleans must be
    identical. Two outputs of zeros are equal. A NaN, another shape or dtype, and an output without
    elements are failures.

    Args:
        name: name of the output.
        actual: output of the rewritten or lowered program; None: it has none.
        expected: output of the original program.
        gate: the limits for floating-point values.
    """
    if reason := _unlike(actual, expected):
        return Comparison(output=name, rule=gate.rule, reason=reason)
    assert actual is not None
    assert expected is not None
    if np.array_equal(actual, expected):
        return Comparison(
            output=name,
            rule=gate.rule,
            reason="",
            cosine=1.0,
            sqnr_db=math.inf,
            max_abs=0.0,
            max_relative=0.0,
        )
    if expected.dtype.kind != "f":
        wrong = int(np.count_nonzero(actual != expected))
        reason = (
            f"{wrong} of {expected.size} values of {expected.dtype} differ; they must be identical"
        )
        return Comparison(output=name, rule="identical", reason=reason)
    infinite = np.isinf(expected)
    if not np.array_equal(np.where(infinite, expected, 0), np.where(np.isinf(actual), actual, 0)):
        reason = "the infinite values of the output and of the reference differ"
        return Comparison(output=name, rule=gate.rule, reason=reason)
    return compare(name, actual[~infinite], expected[~infinite], gate)


def _unlike(actual: Any, expected: Any) -> str:
    """Return why two outputs differ without comparing their values; empty if nothing is found."""
    for side, array in (("reference", expected), ("output", actual)):
        if not isinstance(array, np.ndarray):
            return f"the {side} is missing"
        if array.dtype.kind == "f" and np.isnan(array).any():
            return (
                f"the {side} holds {np.count_nonzero(np.isnan(array))} NaN of {array.size} values"
            )
        if array.size == 0:
            return f"the {side} is empty, of shape {array.shape}"
    if actual.shape != expected.shape:
        return f"expected shape {expected.shape}, got {actual.shape}"
    if actual.dtype != expected.dtype:
        return f"expected {expected.dtype}, got {actual.dtype}"
    return ""


def _incomparable(actual: Any, expected: Any) -> str:
    """Return why two arrays cannot be compared; empty if they can."""
    for side, array in (("output", actual), ("reference", expected)):
        if array is None:
            return f"the {side} is missing"
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            kind = getattr(array, "dtype", type(array).__name__)
            return f"the {side} is not an array of numbers but {kind}"
        if array.size == 0:
            return f"the {side} is empty, of shape {array.shape}"
    if actual.shape != expected.shape:
        return f"expected shape {expected.shape}, got {actual.shape}"
    if (actual.dtype.kind == "f") != (expected.dtype.kind == "f"):
        return f"expected {expected.dtype}, got {actual.dtype}"
    for side, array in (("output", actual), ("reference", expected)):
        bad = int(np.count_nonzero(~np.isfinite(array)))
        if bad:
            return f"the {side} holds {bad} of {array.size} values that are NaN or infinite"
    if not np.any(expected):
        return "the reference is all zeros: the comparison would be meaningless"
    return ""


def _scaled(
    actual: NDArray[Any], expected: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return expected and actual in float64, divided by max|expected|, and max|expected|.

    Without the division, squares could overflow.
    """
    e = expected.astype(np.float64)
    scale = float(np.max(np.abs(e)))
    with np.errstate(over="ignore"):
        return e / scale, actual.astype(np.float64) / scale, scale


def _divided(wrong_references: Mapping[str, NDArray[Any]], scale: float) -> dict[str, NDArray[Any]]:
    return {name: array.astype(np.float64) / scale for name, array in wrong_references.items()}


def _carriers(difference: NDArray[np.float64]) -> int:
    """Return how many values, the largest first, carry 90 % of the squared error."""
    with np.errstate(over="ignore", invalid="ignore"):
        summed = np.cumsum(np.sort(difference.ravel() ** 2)[::-1])
        return int(np.searchsorted(summed, 0.9 * summed[-1])) + 1


def _speech_db(
    a: NDArray[np.float64], e: NDArray[np.float64], frame_axis: int, speech: int | None
) -> float:
    """Return the SQNR of the first `speech` frames."""
    a, e = (np.moveaxis(array, frame_axis, 0)[:speech] for array in (a, e))
    with np.errstate(over="ignore", invalid="ignore"):
        signal, noise = float(np.sum(e**2)), float(np.sum((a - e) ** 2))
    return 10 * math.log10(signal / noise) if signal and 0 < noise < math.inf else _limit_db(noise)


def _limit_db(noise: float) -> float:
    return math.inf if noise == 0 else -math.inf


def _cosine(a: NDArray[np.float64], e: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosine of each row, (n, k) and (n, k) -> (n,); 0 for a row of zeros."""
    with np.errstate(invalid="ignore", divide="ignore"):
        a = a / np.max(np.abs(a), axis=1, keepdims=True)
        e = e / np.max(np.abs(e), axis=1, keepdims=True)
        cosine = np.sum(a * e, axis=1) / np.sqrt(np.sum(a * a, axis=1) * np.sum(e * e, axis=1))
    clipped: NDArray[np.float64] = np.clip(np.nan_to_num(cosine, nan=0.0), -1.0, 1.0)
    return clipped


def _worst_frame(
    a: NDArray[np.float64], e: NDArray[np.float64], frame_axis: int
) -> tuple[int, float]:
    """Return index and cosine of the frame with the lowest cosine, among frames that are not faint."""
    e_frames = np.moveaxis(e, frame_axis, 0).reshape(e.shape[frame_axis], -1)
    a_frames = np.moveaxis(a, frame_axis, 0).reshape(e.shape[frame_axis], -1)
    strength = np.sqrt(np.mean(e_frames**2, axis=1))
    cosines = np.where(strength >= FAINT * strength.max(), _cosine(a_frames, e_frames), 1.0)
    worst = int(np.argmin(cosines))
    return worst, float(cosines[worst])


SHIFTS = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)  # rows that an output may be early or late
CLEARLY = 0.8  # a wrong expectation is clearly closer at this part of the distance to the right one
WIDEST = 6.0  # a channel is clipped at this multiple of its median distance to its median

Rows = NDArray[np.float64]


def mistaken_for(
    actual: NDArray[Any],
    expected: NDArray[Any],
    wrong_references: Mapping[str, NDArray[Any]],
    rows: int,
) -> str:
    """Return what an output is instead of the expected one, as a reason; empty if it is the expected one.

    Args:
        actual: (T, d) output, finite and of the shape of `expected`.
        expected: (T, d) reference.
        wrong_references: what else it might be -> (at least `rows`, d), such as another clip's reference.
        rows: number of first rows that are compared, such as the frames of speech.
    """
    center = np.median(expected, axis=0).astype(np.float64)
    spread = np.median(np.abs(expected - center), axis=0) + 1e-30
    clipped = _clipped(actual[:rows], center, spread)
    own = _distance(clipped, _clipped(expected[:rows], center, spread))
    for what, mistake in _mistakes(expected, wrong_references, rows):
        if _distance(clipped, _clipped(mistake, center, spread)) < CLEARLY * own:
            return f"it is closer to {what} than to its reference"
    return ""


def _mistakes(
    expected: NDArray[Any], wrong_references: Mapping[str, NDArray[Any]], rows: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield wrong expectations of at least `rows` rows, each with its name."""
    for what, reference in wrong_references.items():
        if len(reference) >= rows:
            yield what, reference[:rows]
    for shift in SHIFTS:
        if abs(shift) < rows:
            late = np.roll(expected, shift, axis=0)
            yield f"its reference {abs(shift)} rows {'late' if shift > 0 else 'early'}", late[:rows]
    transposed = expected.T.reshape(expected.shape)  # as a reader of (d, T) understands (T, d)
    yield "its reference read transposed", transposed[:rows]
    if len(expected) > rows + 1:
        rest = np.median(expected[rows:], axis=0)
        yield "what follows the speech", np.broadcast_to(rest, expected[:rows].shape)


def _clipped(array: NDArray[Any], center: Rows, spread: Rows) -> Rows:
    clipped: Rows = np.clip((array - center) / spread, -WIDEST, WIDEST)
    return clipped


def _distance(a: Rows, b: Rows) -> float:
    """Return the median over rows of the squared distance, so that a few wild rows do not decide."""
    return float(np.median(np.sum((a - b) ** 2, axis=1)))
