"""Readings of a file's bytes: every dtype and byte order that its size allows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.expected import Quantization
from whisperport.verification.diagnosis.raw_files import Bytes, RawOutput

Floats = NDArray[np.float32]

LEVELS = 256  # number of values that 8 bits can hold
FEWEST_LEVELS_OF_16_BITS = 1024  # that an output spans, of a range that is calibrated on several


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The bytes of a file, read as numbers.

    Attributes:
        dtype: name of the dtype, such as "float32" or "int8".
        values: (n,) float32.
        findings: the causes that this reading implies; empty if the dtype is the expected one.
        code: lines of numpy that make the values `x` from the bytes `data`.
        rounding: mean square of the rounding error of the values that the dtype or a grid causes.
        step: distance between neighbouring values, if all values lie on a grid of few levels; or 0.
        are_stored: whether the values are stored integers, neither scaled nor shifted.
    """

    dtype: str
    values: Floats
    findings: tuple[Finding, ...]
    code: tuple[str, ...]
    rounding: float
    step: float = 0.0
    are_stored: bool = False


@dataclass(frozen=True, slots=True)
class _Format:
    """A dtype with a byte order, as numpy writes it; "bf2" stands for bfloat16."""

    code: str
    name: str
    causes: tuple[CauseCode, ...] = ()

    @property
    def itemsize(self) -> int:
        return int(self.code[-1])

    @property
    def is_integer(self) -> bool:
        return "int" in self.name


_C = CauseCode
_INTEGERS = (_C.INTEGERS_READ_AS_FLOATS,)
FORMATS = (
    _Format("<f4", "float32"),
    _Format("<f2", "float16", (_C.HALF_PRECISION,)),
    _Format("<i1", "int8", _INTEGERS),
    _Format("<u1", "uint8", _INTEGERS),
    _Format("<i2", "int16", _INTEGERS),
    _Format("<u2", "uint16", _INTEGERS),
    _Format("<bf2", "bfloat16", (_C.BFLOAT16,)),
    _Format(">f4", "float32", (_C.BYTE_ORDER,)),
    _Format("<f8", "float64", (_C.DOUBLE_PRECISION,)),
    _Format(">f2", "float16", (_C.HALF_PRECISION, _C.BYTE_ORDER)),
    _Format(">bf2", "bfloat16", (_C.BFLOAT16, _C.BYTE_ORDER)),
    _Format(">i2", "int16", (*_INTEGERS, _C.BYTE_ORDER)),
    _Format(">u2", "uint16", (*_INTEGERS, _C.BYTE_ORDER)),
    _Format(">f8", "float64", (_C.DOUBLE_PRECISION, _C.BYTE_ORDER)),
)

RELATIVE_STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # distance of neighbours / value

_SENTENCES = {
    _C.INTEGERS_READ_AS_FLOATS: "The file holds {name}, one value in {itemsize} byte(s), not float32.",
    _C.HALF_PRECISION: "The file holds float16, not float32.",
    _C.BFLOAT16: "The file holds bfloat16, not float32.",
    _C.DOUBLE_PRECISION: "The file holds float64, not float32.",
    _C.BYTE_ORDER: "The bytes of each value are in the opposite order (big-endian).",
}
_ADVICE = {
    _C.INTEGERS_READ_AS_FLOATS: "Read the file with the dtype that the compiled model's output has, then "
    "apply its scale and zero point.",
    _C.HALF_PRECISION: "Read the file as float16, or compile the model with a float32 output.",
    _C.BFLOAT16: "Read the file as bfloat16, or compile the model with a float32 output.",
    _C.DOUBLE_PRECISION: "Convert the array to float32 before it is written.",
    _C.BYTE_ORDER: "Write little-endian values: `array.astype('<f4').tofile(path)`.",
}


def readings(
    raw: RawOutput, expected_size: int, declared: Quantization | None
) -> Iterator[Reading]:
    """Yield every reading of a file that could hold an output of `expected_size` values.

    Args:
        raw: the file.
        expected_size: number of values of the expected output.
        declared: how the device is expected to store the output; None: as float32.
    """
    yield from _of_bytes(raw.data, expected_size, declared)
    yield from _stated(raw)
    if joined := _joined_bytes(raw, expected_size):
        data, finding, code = joined
        for reading in _of_bytes(data, expected_size, None):
            if not reading.are_stored:
                findings = (finding, *reading.findings)
                yield replace(reading, findings=findings, code=(*code, *reading.code))


def _of_bytes(data: Bytes, expected_size: int, declared: Quantization | None) -> Iterator[Reading]:
    """Yield the readings of a number of values that a file can hold: padding makes small outputs larger."""
    most = 2 * expected_size if expected_size >= 4096 else 64 * expected_size
    for form in FORMATS:
        if max(1, expected_size // 64) <= data.size // form.itemsize < most + 65:
            reading = _read(data, form, declared)
            if not (reading.are_stored and form.itemsize == 2 and _is_narrow(reading.values)):
                yield reading


def _is_narrow(values: Floats) -> bool:
    """Return whether values span so few levels that they are no output stored in 16 bits.

    They are short floats: the bits of neighbouring ones are neighbouring integers.
    """
    return float(np.ptp(values)) < FEWEST_LEVELS_OF_16_BITS


def _read(data: Bytes, form: _Format, declared: Quantization | None) -> Reading:
    values = _values(data, form)
    findings = tuple(_finding(cause, form) for cause in form.causes)
    if declared and form.name == declared.dtype:
        lines = (*_load(data, form), f"x = (x - {declared.zero_point}) * {declared.scale:.9g}")
        values = (values - np.float32(declared.zero_point)) * np.float32(declared.scale)
        remaining = tuple(f for f in findings if f.cause is not _C.INTEGERS_READ_AS_FLOATS)
        return Reading(form.name, values, remaining, lines, declared.scale**2 / 12, declared.scale)
    if declared and not form.is_integer:
        findings = (_expected_integers(form, declared), *findings)
    rounding, step = _rounding(values, form)
    return Reading(form.name, values, findings, _load(data, form), rounding, step, form.is_integer)


def _values(data: Bytes, form: _Format) -> Floats:
    """Return the values; bytes after the last one are ignored."""
    whole = data[: data.size // form.itemsize * form.itemsize]
    if form.name == "bfloat16":
        halves = np.frombuffer(whole, form.code[0] + "u2").astype("<u4")
        values: Floats = (halves << 16).view("<f4")
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        return np.frombuffer(whole, form.code).astype(np.float32)


def _load(data: Bytes, form: _Format) -> tuple[str, ...]:
    count = f", {data.size // form.itemsize}" if data.size % form.itemsize else ""
    load = f'x = np.frombuffer(data, "{form.code.replace("bf2", "u2")}"{count})'
    if form.name == "bfloat16":
        return load, 'x = (x.astype("<u4") << 16).view("<f4")'
    return (load if form.code == "<f4" else f"{load}.astype(np.float32)",)


def _finding(cause: CauseCode, form: _Format) -> Finding:
    sentence = _SENTENCES[cause].format(name=form.name, itemsize=form.itemsize)
    return Finding(cause=cause, sentence=sentence, advice=_ADVICE[cause])


def _expected_integers(form: _Format, declared: Quantization) -> Finding:
    return Finding(
        cause=_C.FLOATS_READ_AS_INTEGERS,
        sentence=f"The file holds {form.name}, not {declared.dtype} as the output is declared.",
        advice="Read the file as floats, without scale and zero point.",
    )


def _stated(raw: RawOutput) -> Iterator[Reading]:
    """Yield the reading that an `.npy` file or an array states, unless the bytes give the same one."""
    known = {np.dtype(form.code) for form in FORMATS if "b" not in form.code}
    if raw.dtype is None or raw.dtype.kind == "b" or raw.dtype in known:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.frombuffer(raw.data, raw.dtype).astype(np.float32)
    is_integer = raw.dtype.kind in "iu"
    finding = Finding(
        cause=_C.INTEGERS_READ_AS_FLOATS,
        sentence=f"The file holds {raw.dtype}, not float32.",
        advice=_ADVICE[_C.INTEGERS_READ_AS_FLOATS],
    )
    step = _grid_step(values)
    yield Reading(
        str(raw.dtype),
        values,
        (finding,) if is_integer else (),
        (f'x = np.frombuffer(data, "{raw.dtype.str}").astype(np.float32)',),
        1 / 12 if is_integer else step**2 / 12,
        step,
        is_integer,
    )


def _rounding(values: Floats, form: _Format) -> tuple[float, float]:
    """Return the mean square of the rounding error, and the step of the grid or 0."""
    if form.is_integer:
        return 1 / 12, 1.0
    if relative := RELATIVE_STEP.get(form.name):
        finite = values[np.isfinite(values)]
        with np.errstate(over="ignore"):
            square = float(np.mean(np.square(finite, dtype=np.float64))) if finite.size else 0.0
        return square * relative**2 / 12, 0.0
    step = _grid_step(values)
    return step**2 / 12, step


def _grid_step(values: Floats) -> float:
    """Return the distance between neighbouring values if they lie on a grid of at most 256 levels; or 0."""
    levels = _levels(values)
    if levels is None:
        return 0.0
    smallest, span = float(np.diff(levels).min()), float(levels[-1] - levels[0])
    for parts in (1, 2, 3, 4):  # of a few values, no two may be neighbours
        step = smallest / parts
        if not 1 <= span / step < LEVELS:
            return 0.0
        positions = (levels - levels[0]) / step
        if np.abs(positions - np.rint(positions)).max() < 0.02:
            return float(span / np.rint(span / step))
    return 0.0


def _levels(values: Floats) -> NDArray[np.float64] | None:
    """Return the distinct values, sorted, if there are 3 to 256 of them; None otherwise.

    A dequantized value is computed in float32, so that equal levels are equal to the last bit.
    """
    few = values[:: max(1, values.size // 2000)]
    if np.unique(few).size > LEVELS:
        return None
    levels = np.unique(values)
    levels = levels[np.isfinite(levels)]
    return levels.astype(np.float64) if 3 <= levels.size <= LEVELS else None


def _joined_bytes(
    raw: RawOutput, expected_size: int
) -> tuple[Bytes, Finding, tuple[str, ...]] | None:
    """Return the bytes of floats that were read as 8-bit integers and written one number per byte."""
    dtype = raw.dtype or np.dtype("<f4")
    count = raw.data.size // dtype.itemsize
    if dtype.itemsize < 2 or dtype.kind not in "fiu" or count < 1.5 * expected_size:
        return None
    values = np.frombuffer(raw.data[: count * dtype.itemsize], dtype)
    if not (np.all(np.abs(values) <= LEVELS) and np.all(values == np.rint(values))):
        return None
    finding = Finding(
        cause=_C.FLOATS_READ_AS_INTEGERS,
        sentence=f"Each value is one byte of a float: the {dtype} values have only 256 levels, and "
        f"there are {count:,} of them.",
        advice="Read the file as floats; its output is not quantized.",
    )
    line = f'data = np.frombuffer(data, "{dtype.str}", {count}).astype(np.int64).astype(np.uint8)'
    return values.astype(np.int64).astype(np.uint8), finding, (f"{line}.tobytes()",)


def read_as(data: Bytes, dtype: str, *, is_big_endian: bool = False) -> Floats:
    """Return bytes as the values of one dtype, (n,) float32. Bytes after the last value are ignored.

    Args:
        data: the bytes of a file.
        dtype: name of a dtype in `FORMATS`, such as "int8" or "bfloat16".
        is_big_endian: whether the bytes of each value are in the opposite order.
    """
    named = [form for form in FORMATS if form.name == dtype]
    form = next((f for f in named if (f.code[0] == ">") == is_big_endian), named[0])
    return _values(data, form)


BOUNDARIES = 3  # between the halves, that are tried


def with_other_signedness(reading: Reading) -> Iterator[Reading]:
    """Yield a reading; if it has a grid, also those in which one half of the values moves by its range.

    Signed integers of 8 bits that are read as unsigned ones are all right from 0 on, and the negative ones
    are too high by 256 steps:

        as stored            -128 … -1 | 0 … 127
        as read                          0 … 127 | 128 … 255
    """
    yield reading
    if reading.are_stored or not reading.step:
        return
    levels = np.unique(reading.values[np.isfinite(reading.values)]).astype(np.float64)
    width = LEVELS * reading.step
    if levels.size < 2 or np.ptp(levels) > width or not _has_halves(reading, levels):
        return
    for limit in _boundaries(levels, width):
        is_high = reading.values > limit
        for half, side, shift in ((is_high, ">", -width), (~is_high, "<=", width)):
            wrong = "unsigned" if shift < 0 else "signed"
            finding = Finding(
                cause=CauseCode.WRONG_SIGNEDNESS,
                sentence=f"The integers were read as {wrong} ones before they were dequantized.",
                advice="Read the file with the dtype of the compiled model's output.",
            )
            yield replace(
                reading,
                values=np.where(half, reading.values + np.float32(shift), reading.values),
                findings=(*reading.findings, finding),
                code=(*reading.code, f"x = np.where(x {side} {limit:.9g}, x + ({shift:.9g}), x)"),
            )


def _has_halves(reading: Reading, levels: NDArray[np.float64]) -> bool:
    """Return whether the values deviate less after the upper half moved by the whole range."""
    x = reading.values[np.isfinite(reading.values)].astype(np.float64)
    middle = (levels[0] + levels[-1]) / 2
    moved = np.where(x > middle, x - LEVELS * reading.step, x)
    return bool(moved.std() < x.std())


def _boundaries(levels: NDArray[np.float64], width: float) -> list[float]:
    """Return where the two halves can meet: in the widest gaps near the middle of the range.

    The ends of the range may be missing in the file, so that its middle is not known exactly.
    """
    gaps, middle = np.diff(levels), (levels[0] + levels[-1]) / 2
    centres = levels[:-1] + gaps / 2
    missing = (width - np.ptp(levels)) / 2
    distance = np.abs(centres - middle)
    near = np.flatnonzero(distance <= missing + gaps / 2)
    widest = sorted(near, key=lambda i: (-np.round(gaps[i] / width, 3), distance[i]))
    return [float(centres[i]) for i in widest[:BOUNDARIES]]
