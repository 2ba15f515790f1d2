"""Candidates: every reading of a file's bytes, in every layout that its size allows; the values so read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.buffers import Limits, Region, constant_run, limits_of
from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.expected import ExpectedTensor
from whisperport.verification.diagnosis.layouts import Layout, common_layouts, layouts_of
from whisperport.verification.diagnosis.raw_files import RawOutput
from whisperport.verification.diagnosis.readings import (
    FORMATS,
    Reading,
    readings,
    with_other_signedness,
)
from whisperport.verification.diagnosis.reference_outputs import ReferenceOutput

Doubles = NDArray[np.float64]

LONGEST_EXTRA = 0.5  # part of the output's size that may precede or follow it
SMALLEST_PART = 0.02  # part of the output that a truncated file must hold


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A reading with a layout.

    Attributes:
        reading: the numbers.
        layout: their order.
        findings: causes of the file's size.
        cut: first byte of the values, and the one behind them, if the file has others; or (0, 0).
        samples: its sampled values, kept by `similarity`.
    """

    reading: Reading
    layout: Layout
    findings: tuple[Finding, ...] = ()
    cut: tuple[int, int] = (0, 0)
    samples: dict[tuple[int | None, tuple[int, ...]], Doubles] = field(default_factory=dict)

    @property
    def causes(self) -> int:
        """Number of causes that it stands for."""
        return len(self.findings) + len(self.reading.findings) + len(self.layout.findings)

    @property
    def is_plain(self) -> bool:
        """Whether the values are complete, and in the expected order."""
        return not (self.findings or self.layout.findings)

    @property
    def code(self) -> tuple[str, ...]:
        """Lines of numpy that make the values `x` from the bytes `data` of the file."""
        start, stop = self.cut
        cut = (f"data = data[{start}:{stop}]",) if stop else ()
        missing = self.layout.size - self.reading.values.size
        pad = (f"x = np.pad(x, (0, {missing}), constant_values=np.nan)",) if missing > 0 else ()
        return (*cut, *self.reading.code, *pad)


def exact_candidates(
    raw: RawOutput, tensor: ExpectedTensor, references: Sequence[ReferenceOutput]
) -> Iterator[Candidate]:
    """Yield the readings and layouts that fill the file exactly."""
    shapes = list(dict.fromkeys(reference.array.shape for reference in references))
    for plain in readings(raw, tensor.array.size, tensor.quantization):
        for reading in with_other_signedness(plain):
            for shape in shapes:
                for layout in layouts_of(shape, reading.values.size):
                    yield Candidate(reading, layout)


def inexact_candidates(
    raw: RawOutput, tensor: ExpectedTensor, references: Sequence[ReferenceOutput]
) -> Iterator[Candidate]:
    """Yield the readings and layouts of a file that is too short, or has bytes that are no values."""
    shapes = dict.fromkeys(reference.array.shape for reference in references)
    layouts = [layout for shape in shapes for layout in common_layouts(shape)]
    for plain in readings(raw, tensor.array.size, tensor.quantization):
        if plain.values.size == tensor.array.size:
            continue  # the file has its full size
        for reading in with_other_signedness(plain):
            for layout in layouts:
                if SMALLEST_PART * layout.size <= reading.values.size < layout.size:
                    yield Candidate(reading, layout, (_truncated(reading, layout),))
    itemsizes = {form.itemsize for form in FORMATS}
    itemsizes |= {4 * k for k in itemsizes}  # each byte of a value became a float32
    for size in sorted({layout.size * k for layout in layouts for k in itemsizes}):
        extra = raw.data.size - size
        if 0 < extra <= max(4096, LONGEST_EXTRA * size):
            yield from _with_extra(raw, tensor, layouts, size, extra)


def _with_extra(
    raw: RawOutput, tensor: ExpectedTensor, layouts: Sequence[Layout], size: int, extra: int
) -> Iterator[Candidate]:
    for start in (0, extra):
        part = RawOutput(raw.source, raw.data[start : start + size])
        for plain in readings(part, tensor.array.size, tensor.quantization):
            for reading in with_other_signedness(plain):
                for layout in layouts:
                    if layout.size == reading.values.size:
                        yield Candidate(
                            reading, layout, (_extra(start, extra),), (start, start + size)
                        )


def _truncated(reading: Reading, layout: Layout) -> Finding:
    return Finding(
        cause=CauseCode.TRUNCATED,
        sentence=f"The file holds {reading.values.size:,} of {layout.size:,} values: it ends early.",
        advice="Copy the complete file; check the free space of the device's disk.",
    )


def _extra(start: int, extra: int) -> Finding:
    side = "before" if start else "after"
    return Finding(
        cause=CauseCode.EXTRA_BYTES,
        sentence=f"The file holds {extra:,} bytes {side} the values that belong to no value.",
        advice="Skip these bytes, or write the output without a header.",
    )


Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class FileValues:
    """The values of a candidate, to be compared with one output."""

    candidate: Candidate
    reference: ReferenceOutput
    x: Doubles  # (n,) values; 0 where there is none
    exists: Mask  # (n,) whether the file is long enough and the value is finite
    not_finite: int
    tail: Region  # constant values at the end
    head: Region  # constant values at the beginning
    limits: Limits

    @property
    def written(self) -> Mask:
        """The values that are finite and no part of a constant end."""
        mask: Mask = self.exists & ~self.tail.mask & ~self.head.mask
        return mask

    @property
    def usable(self) -> Mask:
        """The values that the fit uses: those that were written and not clipped."""
        mask: Mask = self.written & ~self.limits.mask
        return mask

    def in_frames(self, values: Doubles) -> Doubles:
        """Return values in the order of the file as (F, C)."""
        return self.reference.in_frames(self.candidate.layout.restore(values))

    def in_file(self, values: Doubles) -> Doubles:
        """Return values (F, C) in the order of the file."""
        stored: Doubles = self.candidate.layout.arrange(self.reference.from_frames(values))
        return stored


def file_values(candidate: Candidate, reference: ReferenceOutput) -> FileValues:
    """Return the values of a candidate, and which of them were written."""
    values, layout = candidate.reading.values, candidate.layout
    missing = max(0, layout.size - values.size)
    picked = layout.pick(np.pad(values, (0, missing)))
    there = layout.pick(np.arange(layout.size)) < layout.size - missing
    finite = np.isfinite(picked)
    x = np.where(finite, picked, 0).astype(np.float64)
    tail, head = constant_run(x, there, at_end=True), constant_run(x, there, at_end=False)
    return FileValues(
        candidate,
        reference,
        x,
        there & finite,
        int(np.count_nonzero(there & ~finite)),
        tail,
        head,
        limits_of(x, there & finite & ~tail.mask & ~head.mask),
    )
