"""Channels: blocks of channels in another order, and one factor per channel. Arrays are (F, C)."""

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.result import Finding

Doubles = NDArray[np.float64]
ChannelMap = NDArray[np.int64]

FEWEST_FRAMES = 16  # frames that are needed to recognize a channel
FRAMES = 512  # frames that channels are compared with
BLOCK_COUNTS = (2, 3, 4, 6, 8, 12, 16)  # blocks of channels that are looked for in few frames
SMALLEST_BLOCK = 8  # values of one block
IN_A_LINE = 8  # factors in one line of code
CERTAIN = 0.8  # correlation from which on a channel is recognized


def likely_map(x: Doubles, r: Doubles) -> ChannelMap | None:
    """Return which channel of r each channel of x holds; None if the order is the expected or unclear.

    Channels are recognized by the correlation of their values over the frames. The few that are not
    recognized are filled in from their neighbours. If the frames together show no order, each third of them
    is tried: the others may hold another output.
    """
    frames, channels = x.shape
    if frames < FEWEST_FRAMES:
        return _blocks(x, r)
    if not 4 <= channels <= 4096:
        return None
    third = frames // 3
    parts = [slice(None)]
    if third >= FEWEST_FRAMES:
        parts += [slice(0, third), slice(frames - third, frames)]
    found = (_similar(x[part], r[part]) for part in parts)
    return next((order for order in found if order is not None), None)


def _similar(x: Doubles, r: Doubles) -> ChannelMap | None:
    """Return which channel of r each channel of x is similar to; None if the order is unclear or right."""
    frames, channels = x.shape
    step = max(1, frames // FRAMES)
    u, v = _unit(x[::step]), _unit(r[::step])
    similar = _of_one_sign(u.T @ v)
    best = similar.argmax(axis=1)
    certain = similar[np.arange(channels), best] >= CERTAIN
    if np.count_nonzero(certain) < 0.6 * channels:
        return None
    found = _filled(best, certain)
    order = np.arange(channels)
    if np.array_equal(found, order) or not np.array_equal(np.sort(found), order):
        return None
    return found


def _blocks(x: Doubles, r: Doubles) -> ChannelMap | None:
    """Return the order of equal blocks of channels of few frames; None if no order is much better."""
    channels = x.shape[1]
    for count in BLOCK_COUNTS:
        if channels % count or channels * x.shape[0] // count < SMALLEST_BLOCK:
            continue
        u, v = (
            a.reshape(a.shape[0], count, -1).transpose(1, 0, 2).reshape(count, -1) for a in (x, r)
        )
        similar = _of_one_sign(_unit(u.T).T @ _unit(v.T))
        best = similar.argmax(axis=1)
        is_certain = similar[np.arange(count), best].min() >= CERTAIN
        if is_certain and np.unique(best).size == count and np.any(best != np.arange(count)):
            width = channels // count
            order: ChannelMap = (best[:, None] * width + np.arange(width)).reshape(-1)
            return order
    return None


def _of_one_sign(correlations: Doubles) -> Doubles:
    """Return correlations with the sign that makes the largest ones positive: a scale may be negative."""
    largest, smallest = correlations.max(axis=1), correlations.min(axis=1)
    return correlations if largest.sum() >= -smallest.sum() else -correlations


def _unit(a: Doubles) -> Doubles:
    centred = a - a.mean(axis=0)
    unit: Doubles = centred / np.maximum(np.linalg.norm(centred, axis=0), 1e-30)
    return unit


def _filled(best: ChannelMap, certain: NDArray[np.bool_]) -> ChannelMap:
    """Continue the order of recognized channels over those that are not."""
    index = np.arange(best.size)
    known = index[certain]
    nearest = known[np.abs(index[:, None] - known[None, :]).argmin(axis=1)]
    filled: ChannelMap = best[nearest] + (index - nearest)
    return filled


def block_finding(order: ChannelMap) -> Finding:
    """Return the cause of an order of channels."""
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    starts = [int(order[0]), *(int(order[i]) for i in breaks[:5])]
    shown = ", ".join(map(str, starts)) + (", …" if breaks.size > 5 else "")
    return Finding(
        cause=CauseCode.CHANNEL_BLOCKS_REORDERED,
        sentence=f"The channels are stored in {breaks.size + 1} blocks in another order; the blocks begin "
        f"with the channels {shown}.",
        advice="Reorder the channels, or let the compiler join the parts of several cores itself.",
    )


def factors(x: Doubles, r: Doubles, ok: NDArray[np.bool_]) -> Doubles | None:
    """Return the factor a of each channel with x = a·r; None if there are too few frames."""
    if x.shape[1] < 2 or ok.sum(axis=0).min() < FEWEST_FRAMES:
        return None
    energy = np.sum(r * r, axis=0, where=ok)
    product = np.sum(x * r, axis=0, where=ok)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Doubles = np.where(energy > 0, product / energy, 1.0)
    return np.where(np.abs(found) > 1e-12, found, 1.0)


def rest_of_factors(x: Doubles, r: Doubles) -> float:
    """Return the part of the square of x that x = a·r leaves with the best a for each channel.

    Args:
        x, r: (F, C); 0 where a value does not count.
    """
    total = float(np.sum(x * x))
    if x.shape[0] < FEWEST_FRAMES or not total > 0:
        return 1.0
    product, energy = np.einsum("fc,fc->c", x, r), np.einsum("fc,fc->c", r, r)
    explained = np.square(product) / np.maximum(energy, 1e-300)
    return max(0.0, 1.0 - float(explained.sum()) / total)


def factor_finding(found: Doubles) -> Finding:
    """Return the cause of one factor per channel."""
    return Finding(
        cause=CauseCode.WRONG_CHANNEL_SCALES,
        sentence=f"Each channel has its own factor, from {found.min():.4g} to {found.max():.4g}.",
        advice="Apply the scale of each channel, or compile the output with one scale.",
    )


def factor_code(found: Doubles) -> tuple[str, ...]:
    """Return lines of numpy that undo one factor per channel on (F, C)."""
    shown = [f"{factor:.7g}," for factor in found]
    rows = (" ".join(shown[i : i + IN_A_LINE]) for i in range(0, len(shown), IN_A_LINE))
    return ("factors = np.array([", *(f"    {row}" for row in rows), "])", "x = x / factors")


def change_over_time(r: Doubles, ok: NDArray[np.bool_]) -> float:
    """Return the mean square deviation of the channels' values from the channels' means."""
    means = np.mean(r, axis=0, where=ok, keepdims=True)
    return float(np.mean(np.square(r - means), where=ok))
