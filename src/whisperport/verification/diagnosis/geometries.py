"""Orders of frames and channels in which a file can hold an output: shifted frames, reordered channels.

Arrays are (F, C): F frames of C channels. A frame map says which frame of the reference a frame of the file
holds; -1 for a frame that holds none. A channel map says the same for channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.candidates import FileValues
from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.reference_outputs import ReferenceOutput

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]
Map = NDArray[np.int64]

COMPARED = 64  # channels that a shift is estimated with
SMALLEST_OVERLAP = 0.15  # part of the frames that a shift must leave
FEWEST_SHIFTED = 8  # fewer frames are not compared with each other
ALIKE = 0.5  # correlation of the frames' means or deviations, which a part of another output lowers
FEWEST_FRAMES = 16  # frames that are needed to recognize a channel
FRAMES = 512  # frames that channels are compared with
ROLLED = 0.25  # mean correlation of all channels that is no chance
CERTAIN = 0.8  # correlation from which on a channel is recognized


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Which frame and channel of the reference each value of the file holds, and what that means."""

    frame_map: Map | None = None
    channel_map: Map | None = None
    findings: tuple[Finding, ...] = ()
    code: tuple[str, ...] = ()


def geometries(data: FileValues) -> Iterator[Geometry]:
    """Yield the orders other than the expected one that the file may have."""
    r = data.reference.frames
    written = data.written  # clipped values still show the order
    x = data.in_frames(np.where(written, data.x, np.mean(data.x, where=written)))
    known = data.in_frames(written.astype(np.float64)).mean(axis=1) > 0.5
    for moved in (Geometry(), *_shifts(x, r)):
        held, there = known, r
        if moved.frame_map is not None:
            yield moved
            held, there = known & (moved.frame_map >= 0), r[moved.frame_map]
            if not _are_alike(x[held], there[held]):
                continue  # the comparison of all channels takes long
        order = _channel_order(x[held], there[held])
        if order is not None:
            findings = (*moved.findings, _block_finding(order))
            back = f"x = x[:, np.argsort({_listed(order)})]"
            yield Geometry(moved.frame_map, order, findings, (*moved.code, back))


def rolled_channels(x: Doubles, r: Doubles) -> Geometry | None:
    """Return the order in which all channels (F, C) are moved by the same number; None if they are not.

    It is recognized by all channels together, so that none of them must be similar by itself.
    """
    count = x.shape[1]
    similar, index = _similarities(x, r), np.arange(count)
    by_shift = np.array([similar[index, (index - shift) % count].mean() for shift in index])
    shift = int(by_shift.argmax())
    if shift == 0 or by_shift[shift] < max(ROLLED, 2 * np.sort(by_shift)[-2]):
        return None
    order: Map = (index - shift) % count
    code = f"x = x[:, np.argsort({_listed(order)})]"
    return Geometry(None, order, (_block_finding(order),), (code,))


def in_order(
    data: FileValues, geometry: Geometry, output: ReferenceOutput | None = None
) -> tuple[Doubles, Mask]:
    """Return the reference in the order of the file, and where the file holds a value of it.

    Args:
        data: the file.
        geometry: the order of frames and channels.
        output: another output than the file's reference.
    """
    r = (output or data.reference).frames
    held = np.ones(r.shape[0], bool)
    if geometry.frame_map is not None:
        held = geometry.frame_map >= 0
        r = np.where(held[:, None], r[geometry.frame_map], 0.0)
    if geometry.channel_map is not None:
        r = r[:, geometry.channel_map]
    mask = np.broadcast_to(held[:, None], r.shape).astype(np.float64)
    return data.in_file(r), data.in_file(mask) > 0.5


def undone(geometry: Geometry, values: Doubles) -> Doubles:
    """Return values (F, C) of a file in the expected order, NaN in frames that the file does not hold."""
    if geometry.channel_map is not None:
        values = values[:, np.argsort(geometry.channel_map)]
    if geometry.frame_map is None:
        return values
    moved = np.full_like(values, np.nan)
    known = geometry.frame_map >= 0
    moved[geometry.frame_map[known]] = values[known]
    return moved


def _shifts(x: Doubles, r: Doubles) -> Iterator[Geometry]:
    """Yield the likely shifts, with the frames that return at the other end and without."""
    frames = r.shape[0]
    for n in _likely_shifts(x, r):
        source = np.arange(frames) - n
        for is_circular in (True, False):
            inside = (source >= 0) & (source < frames)
            frame_map = source % frames if is_circular else np.where(inside, source, -1)
            way = "later" if n > 0 else "earlier"
            rest = "they return at the other end" if is_circular else f"{abs(n)} frames are lost"
            finding = Finding(
                cause=CauseCode.FRAME_SHIFT,
                sentence=f"Every frame is {abs(n)} of {frames} frames {way} than expected; {rest}.",
                advice="Check the offset at which the output is read, and the start of the window on the "
                "device.",
            )
            yield Geometry(frame_map, None, (finding,), (f"x = np.roll(x, {-n}, axis=0)",))


def _likely_shifts(x: Doubles, r: Doubles) -> list[int]:
    """Return shifts n for which frame t of x is most like frame t - n of r, the most likely first.

    Compared are the channels, and mean and deviation of each frame, which the channels' order does not
    change.
    """
    if x.shape[0] < FEWEST_SHIFTED:
        return []
    step = max(1, x.shape[1] // COMPARED)
    in_channels = _peaks(_standard(x[:, ::step]), _standard(r[:, ::step]), 2)
    in_profiles = _peaks(_profile(x), _profile(r), 1)
    return [n for n in dict.fromkeys((*in_channels, *in_profiles)) if n]


def _profile(a: Doubles) -> Doubles:
    """Return mean and deviation of each frame (F, 2)."""
    return _standard(np.stack([a.mean(axis=1), a.std(axis=1)], axis=1))


def _are_alike(x: Doubles, r: Doubles) -> bool:
    """Return whether the frames can be the same ones, with the channels in any order."""
    if x.shape[0] < FEWEST_SHIFTED:
        return True
    return bool(np.abs(np.mean(_profile(x) * _profile(r), axis=0)).max() >= ALIKE)


def _standard(a: Doubles) -> Doubles:
    """Return columns with mean 0 and deviation 1; a constant one with zeros."""
    centred = a - a.mean(axis=0)
    deviation = a.std(axis=0)
    standard: Doubles = np.where(
        deviation > 1e-6 * deviation.max(), centred / np.maximum(deviation, 1e-30), 0.0
    )
    return standard


def _peaks(x: Doubles, r: Doubles, count: int) -> list[int]:
    """Return the shifts with the highest normalized correlation over the overlap."""
    frames = x.shape[0]
    size = 1 << (2 * frames - 1).bit_length()
    product = np.fft.rfft(x, size, axis=0) * np.conj(np.fft.rfft(r, size, axis=0))
    correlation = np.fft.irfft(product.sum(axis=1), size)
    longest = int(frames * (1 - SMALLEST_OVERLAP))
    shifts = np.arange(-longest, longest + 1)
    ex = np.concatenate([[0.0], np.cumsum((x * x).sum(axis=1))])
    er = np.concatenate([[0.0], np.cumsum((r * r).sum(axis=1))])
    low, high = np.maximum(shifts, 0), np.minimum(frames, frames + shifts)
    energy = (ex[high] - ex[low]) * (er[high - shifts] - er[low - shifts])
    with np.errstate(invalid="ignore", divide="ignore"):
        normalized = np.abs(correlation[shifts % size]) / np.sqrt(energy)
    normalized = np.where(energy > 1e-12 * ex[-1] * er[-1], normalized, 0.0)
    best: list[int] = []
    for index in np.argsort(-normalized, kind="stable"):
        if all(abs(int(shifts[index]) - n) > 3 for n in best):
            best.append(int(shifts[index]))
        if len(best) == count:
            break
    return best


def _channel_order(x: Doubles, r: Doubles) -> Map | None:
    """Return which channel of r each channel of x holds; None if the order is the expected or unclear.

    Channels are recognized by the correlation of their values over the frames. The few that are not
    recognized are filled in from their neighbours. If the frames together show no order, each third of them
    is tried: the others may hold another output.
    """
    frames, channels = x.shape
    if frames < FEWEST_FRAMES or not 4 <= channels <= 4096:
        return None
    third = frames // 3
    parts = [slice(None)]
    if third >= FEWEST_FRAMES:
        parts += [slice(0, third), slice(frames - third, frames)]
    orders = (_similar_order(x[part], r[part]) for part in parts)
    return next((order for order in orders if order is not None), None)


def _similar_order(x: Doubles, r: Doubles) -> Map | None:
    """Return which channel of r each channel of x is similar to; None if the order is unclear or right."""
    step = max(1, x.shape[0] // FRAMES)
    similar = _similarities(x[::step], r[::step])
    index, best = np.arange(x.shape[1]), similar.argmax(axis=1)
    certain = similar[index, best] >= CERTAIN
    if np.count_nonzero(certain) < 0.6 * index.size:
        return None
    known = index[certain]
    nearest = known[np.abs(index[:, None] - known[None, :]).argmin(axis=1)]
    order: Map = best[nearest] + (index - nearest)
    if np.array_equal(order, index) or not np.array_equal(np.sort(order), index):
        return None
    return order


def _similarities(x: Doubles, r: Doubles) -> Doubles:
    """Return the correlations of the columns of x and r, with the sign that makes most of them positive."""
    u, v = (a - a.mean(axis=0) for a in (x, r))
    norms = np.linalg.norm(u, axis=0)[:, None] * np.linalg.norm(v, axis=0)
    correlations: Doubles = u.T @ v / np.maximum(norms, 1e-30)
    is_negative = (
        -correlations.min(axis=1).sum() > correlations.max(axis=1).sum()
    )  # a scale may be negative
    return -correlations if is_negative else correlations


def _block_finding(order: Map) -> Finding:
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    starts = [int(order[0]), *(int(order[i]) for i in breaks[:5])]
    shown = ", ".join(map(str, starts)) + (", …" if breaks.size > 5 else "")
    return Finding(
        cause=CauseCode.CHANNEL_BLOCKS_REORDERED,
        sentence=f"The channels are stored in {breaks.size + 1} blocks in another order; the blocks begin "
        f"with the channels {shown}.",
        advice="Reorder the channels, or let the compiler join the parts of several cores itself.",
    )


def _listed(order: Map) -> str:
    """Return numpy code for an order of channels, by its runs."""
    breaks = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), order.size]
    runs = [f"np.arange({order[a]}, {order[b - 1] + 1})" for a, b in pairwise(breaks)]
    return f"np.concatenate([{', '.join(runs)}])"
