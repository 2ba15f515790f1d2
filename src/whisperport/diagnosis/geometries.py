"""Orders of frames and channels in which a file can hold an output."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis import channels, frames
from whisperport.diagnosis.file_values import FileValues
from whisperport.diagnosis.reference_outputs import ReferenceOutput
from whisperport.diagnosis.result import Finding

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Which frame and channel of the reference each value of the file holds, and what that means."""

    frame_map: frames.FrameMap | None = None
    channel_map: channels.ChannelMap | None = None
    findings: tuple[Finding, ...] = ()
    code: tuple[str, ...] = ()


def geometries(data: FileValues) -> Iterator[Geometry]:
    reference = data.hypothesis.reference
    r = reference.frames
    written = data.written  # clipped values still show the order
    mean = float(np.mean(data.x, where=written))
    x = data.in_frames(np.where(written, data.x, mean))
    known = data.in_frames(written.astype(np.float64)).mean(axis=1) > 0.5
    for frame_map, moved, code in _frame_maps(x, r):
        if frame_map is not None:
            yield Geometry(frame_map, None, moved, code)
        held = known if frame_map is None else known & (frame_map >= 0)
        there = r if frame_map is None else r[frame_map]
        if frame_map is not None and not frames.are_alike(x[held], there[held]):
            continue  # the comparison of all channels takes long
        order = channels.likely_map(x[held], there[held])
        if order is not None:
            findings = (*moved, channels.block_finding(order))
            back = f"x = x[:, np.argsort({_listed(order)})]"
            yield Geometry(frame_map, order, findings, (*code, back))


def _frame_maps(
    x: Doubles, r: Doubles
) -> Iterator[tuple[frames.FrameMap | None, tuple[Finding, ...], tuple[str, ...]]]:
    """Yield the expected order of frames, shifts and repetitions, each with its causes and code."""
    count = r.shape[0]
    yield None, (), ()
    for n in frames.likely_shifts(x, r):
        for circular in (True, False):
            finding, code = frames.shift_finding(n, count, circular=circular)
            yield frames.shifted(count, n, circular=circular), (finding,), tuple(code)
    for sentence, repeated in frames.repeated_maps(count):
        yield repeated, (frames.repeat_finding(sentence),), ()
    found = frames.replaced_frames(x, r)
    if found is not None:
        replaced, sentence = found
        yield replaced, (frames.repeat_finding(sentence),), ()


def _listed(order: channels.ChannelMap) -> str:
    """Return numpy code for an order of channels, by its runs."""
    breaks = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), order.size]
    runs = [f"np.arange({order[a]}, {order[b - 1] + 1})" for a, b in pairwise(breaks)]
    return f"np.concatenate([{', '.join(runs)}])"


def in_order(
    data: FileValues, geometry: Geometry, output: ReferenceOutput | None = None
) -> tuple[Doubles, Mask]:
    """Return the reference in the order of the file, and where the file holds a value of it.

    Args:
        data: the file.
        geometry: the order of frames and channels.
        output: another output than that of the hypothesis.
    """
    r = (output or data.hypothesis.reference).frames
    held = np.ones(r.shape[0], bool)
    if geometry.frame_map is not None:
        held = geometry.frame_map >= 0
        r = np.where(held[:, None], r[geometry.frame_map], 0.0)
    if geometry.channel_map is not None:
        r = r[:, geometry.channel_map]
    if held.all():
        return data.in_file(r), np.ones(data.x.size, bool)
    mask = np.broadcast_to(held[:, None], r.shape).astype(np.float64)
    return data.in_file(r), data.in_file(mask) > 0.5
