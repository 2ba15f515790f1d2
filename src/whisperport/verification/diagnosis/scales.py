"""Scale and zero point: the line x = a·r + b between the values x of a file and the reference r.

The line is fitted to sums over blocks of consecutive values of the file, so that a part of the file that
holds something else does not disturb the fit.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.readings import Reading

Doubles = NDArray[np.float64]

BLOCKS = 256  # number of blocks that a file is cut into
WORST = 0.5  # a block's error is counted up to this part of the reference's variance
WORST_OF_COST = 4.0  # the same in the cost, so that a wrong scale costs more than unrelated values
SMALLEST = 1e-6  # errors below this part of the variance (60 dB) are equal: float32's tolerance
PER_CAUSE_DB = 6.0  # a cause must lower the error by this much: half of the amplitude
WHOLE = 0.1  # a fitted zero point this near to an integer is that integer
SMALLEST_FACTOR = 1e-30  # of a line
NEGLIGIBLE = (
    1e-3  # a scale within 0.1 % of 1, or an offset below 0.1 % of the deviation, is no cause
)


@dataclass(frozen=True, slots=True)
class Line:
    """x = a·r + b."""

    a: float = 1.0
    b: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ScaleFit:
    """A line that was fitted to a file and a reference.

    Attributes:
        line: the line.
        causes: number of causes that the line implies.
        blocks: mean square error of each block, divided by the variance of a·r; NaN without values.
        error: the mean of these, each counted up to `WORST`.
    """

    line: Line
    causes: int
    blocks: Doubles
    error: float

    def cost_db(self, floor: float) -> float:
        """The error in dB, at least `floor`, plus the price of the causes."""
        known = self.blocks[np.isfinite(self.blocks)]
        error = float(np.mean(np.minimum(known, WORST_OF_COST))) if known.size else 1.0
        return 10 * math.log10(max(error, floor)) + PER_CAUSE_DB * self.causes


class BlockSums:
    """Sums over blocks of a file, from which the error of any line follows.

    Args:
        x: (n,) values of the file.
        r: (n,) values of the reference in the order of the file.
        ok: (n,) whether a value counts.
    """

    def __init__(self, x: Doubles, r: Doubles, ok: NDArray[np.bool_]) -> None:
        self.counted = max(1, int(np.count_nonzero(ok)))
        self.mx, self.mr = _mean(x, ok, self.counted), _mean(r, ok, self.counted)
        u = np.where(ok, x - self.mx, 0.0)
        v = np.where(ok, r - self.mr, 0.0)
        self.starts = block_starts(x.size)
        self.n = np.add.reduceat(ok.astype(np.float64), self.starts)
        self.u, self.v = np.add.reduceat(u, self.starts), np.add.reduceat(v, self.starts)
        self.uu = np.add.reduceat(u * u, self.starts)
        self.vv = np.add.reduceat(v * v, self.starts)
        self.uv = np.add.reduceat(u * v, self.starts)
        self.variance = float(self.vv.sum()) / self.counted
        self.mean_square = self.variance + self.mr**2

    def errors(self, line: Line) -> Doubles:
        """Return the mean square error of every block, divided by that of a·r; NaN without values."""
        errors: Doubles = self._errors(np.array([line.a]), np.array([line.b]))[0]
        return errors

    def squares(self, line: Line) -> Doubles:
        """Return the sum of the square errors of every block."""
        squares: Doubles = self._squares(np.array([line.a]), np.array([line.b]))[0]
        return squares

    def _squares(self, a: Doubles, b: Doubles) -> Doubles:
        """Return the same for several lines (k,): (k, blocks)."""
        a = a[:, None]
        b = b[:, None] - self.mx + a * self.mr  # of the centred values
        total = self.uu - 2 * a * self.uv - 2 * b * self.u + a * a * self.vv
        total += 2 * a * b * self.v + b * b * self.n
        return np.maximum(total, 0.0)

    def _errors(self, a: Doubles, b: Doubles) -> Doubles:
        with np.errstate(invalid="ignore", divide="ignore"):
            means: Doubles = self._squares(a, b) / self.n / (a[:, None] ** 2 * self.mean_square)
        return np.where(self.n > 0, means, np.nan)

    def fit(self, *, scale: bool, offset: bool) -> ScaleFit | None:
        """Return the line with the smallest error of most blocks; None if none is determined."""
        a, b = self._lines(scale=scale, offset=offset)
        if not a.size:
            return None
        blocks = self._errors(a, b)
        errors = np.nansum(np.minimum(blocks, WORST) * self.n, axis=1) / self.n.sum()
        best = 0
        for i in range(1, a.size):
            if errors[i] < 0.99 * errors[best]:
                best = i
        line = Line(float(a[best]), float(b[best]))
        return ScaleFit(line, int(scale) + int(offset), blocks[best], float(errors[best]))

    def _lines(self, *, scale: bool, offset: bool) -> tuple[Doubles, Doubles]:
        """Return the least-squares lines (k,), (k,) through sets of blocks that determine them."""
        if not scale and not offset:
            return np.ones(1), np.zeros(1)
        n, u, v, vv, uv = self._of_parts
        with np.errstate(invalid="ignore", divide="ignore"):
            if scale and offset:
                spread = vv - v * v / n
                a = np.where(spread > 0, (uv - u * v / n) / spread, np.nan)
                b = (u - a * v) / n + self.mx - a * self.mr
            elif scale:
                rr = vv + 2 * self.mr * v + n * self.mr**2
                xr = uv + self.mr * u + self.mx * v + n * self.mx * self.mr
                a, b = np.where(rr > 0, xr / rr, np.nan), np.zeros(n.size)
            else:
                a, b = np.ones(n.size), (u - v) / n + self.mx - self.mr
        usable = (n >= 2) & np.isfinite(a) & np.isfinite(b) & (np.abs(a) > SMALLEST_FACTOR)
        return a[usable], b[usable]

    @cached_property
    def _of_parts(self) -> tuple[Doubles, ...]:
        """The sums over sets of blocks: all, and the beginning and the end of several lengths."""
        count = self.n.size
        parts = [slice(None)]
        for share in (2, 4, 8, 16):
            if count >= 2 * share:
                parts += [slice(0, count // share), slice(count - count // share, count)]
        sums = (self.n, self.u, self.v, self.vv, self.uv)
        return tuple(np.array([of[part].sum() for part in parts]) for of in sums)


def block_starts(size: int) -> NDArray[np.int64]:
    """Return the first value of each block of a file of `size` values."""
    return np.unique(np.linspace(0, size, BLOCKS, endpoint=False).astype(np.int64))


def fits(sums: BlockSums) -> list[ScaleFit]:
    """Return the fits of the four models: no cause, a scale, an offset, and both."""
    models = ((False, False), (True, False), (False, True), (True, True))
    candidates = (sums.fit(scale=scale, offset=offset) for scale, offset in models)
    return [fit for fit in candidates if fit]


def line_findings(
    fit: ScaleFit, reading: Reading, spread: float
) -> tuple[list[Finding], list[str]]:
    """Return the causes that a line stands for, and the lines of numpy that undo it.

    Args:
        fit: the fitted line.
        reading: how the file was read.
        spread: root mean square of the reference.
    """
    a, b = fit.line.a, fit.line.b
    if reading.are_stored:
        return [], _dequantization(a, b)
    if not fit.causes:
        return [], []
    if _are_integers(reading) and (finding := _not_dequantized(a, b, reading)):
        return [finding], _dequantization(a, b)
    findings = []
    if abs(a - 1) > NEGLIGIBLE:
        findings.append(
            Finding(
                cause=CauseCode.WRONG_SCALE,
                sentence=f"All values are {a:.6g} times the expected ones: the scale must be multiplied by "
                f"{1 / a:.6g}.{_integer_sentence(reading)}",
                advice="Read the scale from the compiled model's output, not from another tensor.",
            )
        )
    if abs(b / a) > NEGLIGIBLE * spread:
        steps = f", {b / reading.step:.2f} steps of the quantization" if reading.step else ""
        findings.append(
            Finding(
                cause=CauseCode.WRONG_ZERO_POINT,
                sentence=f"All values are larger by {b:.6g}{steps}: the zero point is wrong or was not "
                "subtracted.",
                advice="Subtract the zero point of the compiled model's output, then apply the scale.",
            )
        )
    return findings, [f"x = (x - ({b:.9g})) / {a:.9g}"]


def _integer_sentence(reading: Reading) -> str:
    if _are_integers(reading):
        return " The values are integers: the zero point was subtracted, but the scale was not applied."
    return ""


def _dequantization(a: float, b: float) -> list[str]:
    zero_point = round(b) if abs(b - round(b)) < WHOLE else round(b, 3)
    return [f"x = (x - ({zero_point})) * {1 / a:.7g}  # zero point, scale"]


def _are_integers(reading: Reading) -> bool:
    if reading.are_stored:
        return True
    few = reading.values[: 1 << 16]
    few = few[np.isfinite(few)]
    return bool(few.size and np.array_equal(few, np.rint(few)) and np.ptp(few) >= 2)


def _not_dequantized(a: float, b: float, reading: Reading) -> Finding | None:
    """Return the finding if the values can be stored integers of 8 or 16 bits with a usual zero point."""
    finite = reading.values[np.isfinite(reading.values)]
    low, high = float(finite.min()), float(finite.max())
    types = (("int8", -128, 127), ("uint8", 0, 255))
    if high - low > 255:
        types = (("int16", -32768, 32767), ("uint16", 0, 65535))
    for name, first, last in types:
        if first <= low and high <= last:
            return Finding(
                cause=CauseCode.NOT_DEQUANTIZED,
                sentence=f"The values are {name} integers as numbers; scale {1 / a:.6g} and zero point "
                f"{round(b)} fit them.",
                advice="Compute (q - zero_point) * scale with the numbers of the compiled model's output.",
            )
    return None


def _mean(values: Doubles, ok: NDArray[np.bool_], counted: int) -> float:
    return float(np.sum(values, where=ok)) / counted
