"""Compare one output with its reference, as arrays: a rule, its numbers, and failure by default.

The tolerances are in `tolerances.py`.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What an output must reach at one precision.

    `because` says where the numbers come from.
    """

    min_cosine: float  # of the whole output; -1: reported, not judged
    min_sqnr_db: float  # 10·log10(Σ expected² / Σ (actual − expected)²); −infinity: reported
    max_relative: float  # max|actual − expected| / max|expected|; infinity: reported, not judged
    because: str

    @property
    def rule(self) -> str:
        parts = []
        if self.min_cosine > -1:
            parts.append(f"cosine ≥ {self.min_cosine:g}")
        if math.isfinite(self.min_sqnr_db):
            parts.append(f"SQNR ≥ {self.min_sqnr_db:g} dB")
        if math.isfinite(self.max_relative):
            parts.append(f"max|Δ| ≤ {self.max_relative:g} · max|expected|")
        return ", ".join(parts) or "every value finite, and no dead frame; the words decide"


# A frame weaker than this share of the strongest rounds to nothing in 8 bits: half of 1/127.
FAINT = 1 / 254


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One output, compared. `reason` is empty when it passed; a number is NaN if there is none."""

    output: str
    rule: str
    reason: str
    cosine: float = math.nan
    worst_frame_cosine: float = math.nan  # NaN also where no frame axis was given
    worst_frame: int | None = None
    sqnr_db: float = math.nan
    max_abs: float = math.nan
    max_relative: float = math.nan

    def __bool__(self) -> bool:
        return not self.reason

    def numbers(self) -> dict[str, float]:
        """What was measured, by name."""
        numbers = {
            "cosine": self.cosine,
            "sqnr_db": self.sqnr_db,
            "max_abs": self.max_abs,
            "max_relative": self.max_relative,
        }
        if self.worst_frame is not None:
            numbers["worst_frame_cosine"] = self.worst_frame_cosine
            numbers["worst_frame"] = self.worst_frame
        return numbers


def compare(
    name: str,
    actual: NDArray[Any] | None,
    expected: NDArray[Any] | None,
    gate: Gate,
    frame_axis: int | None = None,
) -> Comparison:
    """Compare one output with its reference, summing in float64.

    It fails, with the reason in words, if either side is missing, empty, holds a NaN or an
    infinity, or is no array of numbers; if shapes or kinds of numbers differ; if the reference is
    all zeros, which compares nothing; or if a number misses the gate. It also fails if a frame has
    nothing in common with its reference (cosine ≤ 0): the mean over 1,500 frames hides a dead one.

    Args:
        actual: what the lowered program gave; None if it gave nothing.
        expected: the reference, of any shape.
        frame_axis: the axis that counts frames: each is then also compared on its own. Frames
            fainter than 1/254 of the strongest are left out.
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
            f"the largest error is {max_relative:.2g} of the reference's largest value, above "
            f"{gate.max_relative:g}"
        )
    if worst_frame_cosine <= 0:
        misses.append(f"frame {worst_frame} has nothing in common with its reference")
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
    )


def compare_output(
    name: str, actual: NDArray[Any] | None, expected: NDArray[Any] | None, gate: Gate
) -> Comparison:
    """Compare one output of two programs that were given the same inputs, of any dtype.

    It differs from `compare` in what third-party programs return: equal infinities are equal, as in
    masks of -inf, and the other values are held to the gate; integers and booleans must be
    identical; outputs of zeros are equal if both are all zeros. A NaN, another shape or dtype, and
    an output without elements are failures.
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
        reason = "the infinite values of the output and of the reference are not the same"
        return Comparison(output=name, rule=gate.rule, reason=reason)
    return compare(name, actual[~infinite], expected[~infinite], gate)


def _unlike(actual: Any, expected: Any) -> str:
    """Why two outputs cannot be equal, before their values are looked at."""
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
    for side, array in (("output", actual), ("reference", expected)):
        if array is None:
            return f"the {side} is missing"
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            kind = getattr(array, "dtype", type(array).__name__)
            return f"the {side} is no array of numbers but {kind}"
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
        return "the reference is all zeros, which compares nothing"
    return ""


def _scaled(
    actual: NDArray[Any], expected: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Expected, actual, max|expected|: float64, divided by the last so that no square overflows."""
    e = expected.astype(np.float64)
    scale = float(np.max(np.abs(e)))
    with np.errstate(over="ignore"):
        return e / scale, actual.astype(np.float64) / scale, scale


def _limit_db(noise: float) -> float:
    return math.inf if noise == 0 else -math.inf


def _cosine(a: NDArray[np.float64], e: NDArray[np.float64]) -> NDArray[np.float64]:
    """Row by row, (n, k) and (n, k) -> (n,); 0 where a row of `a` has no direction."""
    with np.errstate(invalid="ignore", divide="ignore"):
        a = a / np.max(np.abs(a), axis=1, keepdims=True)
        e = e / np.max(np.abs(e), axis=1, keepdims=True)
        cosine = np.sum(a * e, axis=1) / np.sqrt(np.sum(a * a, axis=1) * np.sum(e * e, axis=1))
    clipped: NDArray[np.float64] = np.clip(np.nan_to_num(cosine, nan=0.0), -1.0, 1.0)
    return clipped


def _worst_frame(
    a: NDArray[np.float64], e: NDArray[np.float64], frame_axis: int
) -> tuple[int, float]:
    e_frames = np.moveaxis(e, frame_axis, 0).reshape(e.shape[frame_axis], -1)
    a_frames = np.moveaxis(a, frame_axis, 0).reshape(e.shape[frame_axis], -1)
    strength = np.sqrt(np.mean(e_frames**2, axis=1))
    cosines = np.where(strength >= FAINT * strength.max(), _cosine(a_frames, e_frames), 1.0)
    worst = int(np.argmin(cosines))
    return worst, float(cosines[worst])
