"""Frames: shifts by some frames, and repeated frames.

Both arrays are (F, C): F frames of C channels. A frame map says which frame of the reference a frame of the
file holds; -1 for a frame that holds none.
"""

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.result import Finding

Doubles = NDArray[np.float64]
FrameMap = NDArray[np.int64]

CHANNELS = 64  # channels that a shift is estimated with
SMALLEST_OVERLAP = 0.15  # part of the frames that a shift must leave
FEWEST_FRAMES = 8  # fewer frames are not compared with each other
ALIKE = 0.5  # correlation of the frames' means or deviations, which a part of another output lowers
MOST_REPLACED = 0.4  # part of the frames that may hold a copy of another one
REPEATS = (2, 3, 4, 5, 8)  # how often a frame can be repeated
OVERWRITTEN = (3, 4, 5, 6, 7, 8, 16)  # of so many frames, the first can replace the second


def likely_shifts(x: Doubles, r: Doubles, count: int = 2) -> list[int]:
    """Return shifts n for which frame t of x is most like frame t - n of r, the most likely first."""
    frames = x.shape[0]
    if frames < FEWEST_FRAMES:
        return []
    found = [*_peaks(*_standard(x, r), count), *_peaks(*_profiles(x, r), 1)]
    return [n for n in dict.fromkeys(found) if n]


def _standard(x: Doubles, r: Doubles) -> tuple[Doubles, Doubles]:
    """Return some channels, each with mean 0 and the reference's deviation 1."""
    step = max(1, x.shape[1] // CHANNELS)
    x, r = x[:, ::step], r[:, ::step]
    deviation = r.std(axis=0)
    used = deviation > 1e-6 * max(float(deviation.max()), 1e-30)
    return (x - x.mean(axis=0))[:, used] / deviation[used], (r - r.mean(axis=0))[
        :, used
    ] / deviation[used]


def _profiles(x: Doubles, r: Doubles) -> tuple[Doubles, Doubles]:
    """Return mean and deviation of each frame: the order of the channels does not affect them."""

    def profile(a: Doubles) -> Doubles:
        both = np.stack([a.mean(axis=1), a.std(axis=1)], axis=1)
        deviation = np.maximum(both.std(axis=0), 1e-30)
        centred: Doubles = (both - both.mean(axis=0)) / deviation
        return centred

    return profile(x), profile(r)


def are_alike(x: Doubles, r: Doubles) -> bool:
    """Return whether the frames can be the same ones, with the channels in any order."""
    if x.shape[0] < FEWEST_FRAMES:
        return True
    u, v = _profiles(x, r)
    return bool(np.abs(np.mean(u * v, axis=0)).max() >= ALIKE)


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


def shifted(frames: int, n: int, *, circular: bool) -> FrameMap:
    """Return the frame map of a shift by n frames."""
    source = np.arange(frames) - n
    return source % frames if circular else np.where((source >= 0) & (source < frames), source, -1)


def shift_finding(n: int, frames: int, *, circular: bool) -> tuple[Finding, list[str]]:
    """Return the cause of a shift, and the lines that undo it on (F, C)."""
    way = "later" if n > 0 else "earlier"
    rest = "they return at the other end" if circular else f"{abs(n)} frames are lost"
    finding = Finding(
        cause=CauseCode.FRAME_SHIFT,
        sentence=f"Every frame is {abs(n)} of {frames} frames {way} than expected; {rest}.",
        advice="Check the offset at which the output is read, and the start of the window on the device.",
    )
    return finding, [f"x = np.roll(x, {-n}, axis=0)"]


def repeated_maps(frames: int) -> list[tuple[str, FrameMap]]:
    """Return the frame maps of regular repetitions, each with a description."""
    t = np.arange(frames)
    found = []
    for n in REPEATS:
        if frames >= 2 * n:
            found.append((f"Every frame is repeated {n} times; the last frames are lost.", t // n))
            found.append((f"Of every {n} frames, the first replaces the others.", t // n * n))
    for n in OVERWRITTEN:
        if frames >= 2 * n:
            found.append((f"Of every {n} frames, the first replaces the second.", t - (t % n == 1)))
    return found


def replaced_frames(x: Doubles, r: Doubles) -> tuple[FrameMap, str] | None:
    """Return the frame map of single frames that hold another frame; None if there are none or too many.

    Most frames must hold themselves, so that scale and offset are known from them.
    """
    count = x.shape[0]
    if count < FEWEST_FRAMES or x.shape[1] < FEWEST_FRAMES:
        return None
    step = max(1, x.shape[1] // 256)
    x, r = _aligned_to(x[:, ::step], r[:, ::step])
    own = np.square(x - r).sum(axis=1)
    usual = float(np.median(own))
    suspects = np.flatnonzero(own > 10 * max(usual, 1e-12 * float(np.square(r).sum()) / count))
    if not 1 <= suspects.size <= MOST_REPLACED * count:
        return None
    distance = (r * r).sum(axis=1)[None, :] - 2 * (x[suspects] @ r.T)
    nearest = distance.argmin(axis=1)
    better = np.square(x[suspects] - r[nearest]).sum(axis=1) < own[suspects] / 4
    map_ = np.arange(count)
    map_[suspects[better]] = nearest[better]
    changed = int(np.count_nonzero(map_ != np.arange(count)))
    if changed < 0.5 * suspects.size:
        return None
    return map_, f"{changed} of {count} frames hold a copy of another frame."


def _aligned_to(x: Doubles, r: Doubles) -> tuple[Doubles, Doubles]:
    """Return x on the scale of r, by the line through the frames that agree best."""
    chosen = np.arange(x.shape[0])
    a, b = 1.0, 0.0
    for _ in range(3):
        u, v = x[chosen].reshape(-1), r[chosen].reshape(-1)
        spread = float(np.var(v))
        if not spread > 0:
            return x, r
        a = float(np.mean((u - u.mean()) * (v - v.mean()))) / spread
        b = float(u.mean() - a * v.mean())
        if abs(a) < 1e-30:
            return x, r
        error = np.square((x - b) / a - r).sum(axis=1)
        chosen = np.argsort(error)[: max(4, x.shape[0] * 6 // 10)]
    return (x - b) / a, r


def repeat_finding(sentence: str) -> Finding:
    """Return the cause of repeated frames."""
    return Finding(
        cause=CauseCode.DUPLICATED_FRAMES,
        sentence=sentence,
        advice="Check the stride at which frames are copied from the device's buffer.",
    )
