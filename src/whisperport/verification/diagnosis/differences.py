"""Say in words how an array differs from the right one: a weight of a file, or a value of a graph.

Both may be infinite or 0, late by one, reversed, or wrong in some rows only. The values of a weight may
differ by what its form rounds, and only a value that is computed has heads in another order.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.matching import error_of

Array = NDArray[Any]
LEAST_NEAR = 0.98  # of the values of a weight: a converter may have clipped the largest
HALF_BITS = 2.0**-10  # relative error of float16
TINY = 2.0**-23  # absolute error of float16; a converter writes 1e-7 for what is nearer to 0
EXPLAINED = 1e-3  # of a factor or a relative error: less is rounding
ROUNDED = 0.05  # of factors of rows of 8 bits: less is rounding
MOST_MOVED = 8  # places by which scales are looked for
LOW_RANK = "a matrix of rank"  # in the reason of a weight to which one of low rank was added
MOST_RANK, SPARE = 64, 8  # of adapters; columns by which their space is found beside
MULTIPLIED = "multiplied by"  # in that of a weight whose scales are wrong in no known way
OTHER_VALUES = "values differ"  # in the reason of a weight that is changed in no known way
MOST_STEPS = 127.5  # of 8 bits: 127 on one side of 0, and 128 on the other
CUT = 1.1  # of these: a weight beyond it is clipped
TWICE = 1.25  # of a step: what a value may differ by that was rounded to 8 bits twice
COARSE = 4  # steps by which a clipped weight may be rounded
FEW_LEVELS = 64  # of an array: 8 bits have 255
SIGN = 128  # by which a byte with a sign differs from one without
COMPARED, ALIKE = 2048, 0.99  # rows of which each is compared with all; cosine of equal ones
MOST_ALIKE = 0.9  # of the rows: the others are behind the weight's last, or before its first
AT_PLACE = 0.25  # of the rows: where more are right, they are not all moved
PROBES = 64  # wrong rows that are looked for among the right ones
WINDOW = 8  # values in a row by which a part of the data is looked for
MOST_NAMED = 3  # wrong values that are all named
# Bits of a mantissa -> the type that has so many.
BITS = {7: "bfloat16", 3: "float8, e4m3", 2: "float8, e5m2"}
WIDTH = 23  # bits of float32's mantissa
ON_CIRCLE = 1e-2  # what sine² + cosine² may differ from 1, rounded
LINE = 4  # values of a row, of which a factor of its own would say nothing


def weight_difference(
    values: Array, weight: Array, allowed: Array, head_width: int = 0, step: Array | None = None
) -> str:
    """Return in words how an array differs from a weight of the same shape (n, …).

    Args:
        values: of the array.
        weight: of the checkpoint.
        allowed: how far a value may be from the weight's.
        head_width: of the decoder's heads; those of the encoder are as wide. 0: it has none.
        step: of 8 bits, of each value; None: the array is not quantized.
    """
    if reason := _broken(values) or _moved(
        values, weight, allowed, is_quantized=step is not None and step.ndim == 2
    ):
        return reason
    differs = np.abs(values - weight) > allowed
    if reason := _wrong_lines(values, weight, differs, head_width) or _copied(
        values, weight, allowed, differs
    ):
        return reason
    if step is not None and (reason := _wrong_steps(values, weight, allowed, step)):
        return reason
    if reason := _zeros(values, differs) or _moved_part(values, weight, allowed, differs):
        return reason
    if step is None and (
        reason := _limited(values, weight, differs)
        or _scaled_lines(values, weight, allowed)
        or _rounded(values, weight)
        or _waves(values, weight)
    ):
        return reason
    if reason := _low_rank(values, weight, allowed, differs):
        return reason
    count = int(np.count_nonzero(values != weight if step is None else differs))
    largest = float(np.abs(values - weight).max())
    rows = _lines(differs, 0)
    where = (
        f" in {len(rows):,} rows, such as {listed(rows[:2])}" if 0 < len(rows) < len(values) else ""
    )
    return (
        f"{count:,} of {values.size:,} {OTHER_VALUES}{where}, by up to "
        f"{largest / (float(weight.std()) or 1.0):.2g} standard deviations"
        + _named_values(values, weight, differs if differs.any() else values != weight)
    )


def doubt(reason: str) -> int:
    """Return how little what `weight_difference` says tells; 0: it names the cause.

    Of a square weight, one of both orders of its axes gives the better reason.
    """
    doubtful = (OTHER_VALUES, "not a number", "columns are wrong", "are swapped")
    return max((len(doubtful) - i for i, text in enumerate(doubtful) if text in reason), default=0)


def value_difference(right: Array, array: Array, head_width: int) -> str:
    """Return in words how a computed value (…, n, d) differs from the right one; empty: it is not known."""
    if reason := _broken(array):
        return reason
    if error_of(right, array) < EXPLAINED:
        return ""
    if reason := moved_values(right, array):
        return reason
    if right.shape[-1] % head_width == 0 and (reason := _wrong_heads(right, array, head_width)):
        return reason
    differs = np.abs(array - right) > EXPLAINED * np.abs(right).max()
    for axis, word in ((-2, "rows"), (-1, "columns")):
        if right.ndim >= -axis:
            lines = _lines(differs, axis)
            if 0 < len(lines) < right.shape[axis]:
                return f"{len(lines)} of {right.shape[axis]} {word} differ: {listed(lines)}"
    return ""


def moved_values(right: Array, array: Array) -> str:
    """Return in words along which axis a computed value is reversed or one place late; empty: neither."""
    if error_of(right, array) < EXPLAINED:
        return ""
    for axis in range(array.ndim):
        for step in (1, -1):
            inner = np.take(right, range(1, right.shape[axis] - 1), axis)
            rolled = np.take(np.roll(array, -step, axis), range(1, right.shape[axis] - 1), axis)
            if inner.size and error_of(inner, rolled) < EXPLAINED:
                return f"its values are one place too {'late' if step > 0 else 'early'} along axis {axis}"
        if error_of(right, np.flip(array, axis)) < EXPLAINED:
            return f"axis {axis} is reversed"
    return ""


def listed(numbers: Sequence[int] | Array) -> str:
    """Return the first four numbers, and whether there are more; of a long row of numbers, its ends."""
    if len(numbers) > 4 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:4])) + (", …" if len(numbers) > 4 else "")


def _broken(array: Array) -> str:
    """Return in words that values are no numbers, or that all are 0; empty: neither."""
    if bad := int(np.count_nonzero(~np.isfinite(array))):
        return f"{bad:,} of {array.size:,} values are infinite or not a number"
    return "" if array.any() else "all values are 0"


def half_error(weight: Array) -> Array:
    """Return how far a value in float16 may be from each of a weight's."""
    errors: Array = np.abs(weight) * HALF_BITS + TINY
    return errors


def _lines(differs: Array, axis: int) -> Array:
    """Return the places along an axis at which something differs."""
    (rows,) = _as_rows(axis, differs)
    return np.flatnonzero(rows.any(1))


def _as_rows(axis: int, *arrays: Array) -> list[Array]:
    """Return the lines along an axis of each array as rows (n, k)."""
    return [np.moveaxis(a, axis, 0).reshape(a.shape[axis], -1) for a in arrays]


def _some(lines: Array) -> Array:
    """Return at most `PROBES` lines, evenly spread."""
    return lines[np.linspace(0, len(lines) - 1, min(len(lines), PROBES)).astype(np.intp)]


def nearest_rows(rows: Array, right: Array) -> Array:
    """Return for each of the rows (m, k) the place of that of `right` (n, k) which is nearest to it."""
    squares = np.einsum("ij,ij->i", right, right)
    places: Array = (squares - 2 * (rows @ right.T)).argmin(axis=1)
    return places


def heads_of(value: Array, head_width: int) -> Array:
    """Return a value (…, n, d) as heads (H, n, D); none if its last axis is not that of whole heads."""
    if value.shape[-1] % head_width:
        return np.empty((0, 0, head_width), np.float32)
    return np.moveaxis(value.reshape(-1, value.shape[-1] // head_width, head_width), 1, 0)


def _factors(values: Array, weight: Array, axis: int) -> Array:
    """Return the number by which each line of a weight (n, k) is multiplied, along an axis."""
    power = (weight * weight).sum(axis, keepdims=True)
    factors: Array = (values * weight).sum(axis, keepdims=True) / np.where(power == 0, 1, power)
    return factors


def _moved(values: Array, weight: Array, allowed: Array, *, is_quantized: bool) -> str:
    """Return in words how all values of a weight are scaled, or at other places; empty: they are not."""

    def same(changed: Array, right: Array, room: Array) -> bool:
        return bool(np.mean(np.abs(changed - right) <= room) >= LEAST_NEAR)

    factor = float((values * weight).sum() / ((weight * weight).sum() or 1))
    is_scaled = abs(factor - 1) > HALF_BITS * 4 and not is_quantized
    if is_scaled and same(values, factor * weight, max(abs(factor), 1 / 2) * allowed):
        return f"it is multiplied by {factor:.3g}"
    offset = 0.0 if is_quantized else float(np.median(values - weight))
    if offset and same(values - offset, weight, allowed + abs(offset) * HALF_BITS):
        return f"each value is {abs(offset):.3g} too {'large' if offset > 0 else 'small'}"
    is_right = same(values, weight, allowed)  # nearly all: no order explains the others
    for axis in range(values.ndim):
        if not is_right and same(np.flip(values, axis), weight, np.flip(allowed, axis)):
            return f"axis {axis} is reversed"
    for axis in range(values.ndim):
        lines, right, room = (np.moveaxis(a, axis, 0) for a in (values, weight, allowed))
        if reason := _shifted(lines, right, room, axis):
            return reason
    for order in tuple(permutations(range(values.ndim)))[1:]:
        # Of axes of other lengths, too: their values were read in the order of the right shape.
        sizes, back = [values.shape[axis] for axis in order], np.argsort(order)
        stored, room = (a.reshape(sizes).transpose(back) for a in (values, allowed))
        # Steps of 8 bits are at the places of the values, which may have been rounded twice.
        if same(stored, weight, 2 * np.maximum(room, allowed)):
            moved = [axis for axis, place in enumerate(order) if axis != place]
            if values.ndim > 2:
                return f"its axes {listed(moved)} are swapped"
            return "it is transposed: its axes are swapped"
    return ""


def _shifted(values: Array, weight: Array, allowed: Array, axis: int) -> str:
    """Return in words by how many places at least half of the lines (n, …) are moved; empty: they are not.

    Args:
        values, weight, allowed: as those of `weight_difference`, the axis first.
        axis: of the lines.
    """
    n, shifts = len(values), list[int]()
    is_right = (np.abs(values - weight) <= allowed).reshape(n, -1).all(axis=1)
    if is_right.mean() > AT_PLACE:
        return ""
    for line in sorted({n // 4, n // 2, n - 1 - n // 4}):
        # A line that is right at its own place says nothing of the others.
        if np.mean(np.abs(values[line] - weight[line]) <= allowed[line]) < LEAST_NEAR:
            distance = np.abs(values[line] - weight).reshape(n, -1).sum(axis=1)
            shifts.append(line - int(distance.argmin()))
    for shift in dict.fromkeys(shifts):
        now, before = (slice(max(s, 0), n + min(s, 0)) for s in (shift, -shift))
        near = np.abs(values[now] - weight[before]) <= allowed[now]
        if shift and 2 * abs(shift) <= n and near.mean() >= LEAST_NEAR:
            kind = ("row", "column")[axis] if axis < 2 else f"place of axis {axis}"
            if abs(shift) == 1:
                return f"its {kind}s are one too {'late' if shift > 0 else 'early'}"
            where = f"{kind} {max(shift, 0)} holds {kind} {max(-shift, 0)}"
            return f"its {kind}s are moved by {abs(shift)} places: {where}"
    return ""


def _copied(values: Array, weight: Array, allowed: Array, differs: Array) -> str:
    """Return in words which other lines of a weight the wrong ones hold; empty: they hold none."""
    for axis, kind in enumerate(("row", "column")[: values.ndim]):
        lines = _lines(differs, axis)
        if values.ndim < 2 or not 0 < len(lines) < values.shape[axis]:
            continue
        mine, right, room = _as_rows(axis, values, weight, allowed)
        probes = _some(lines)
        held = nearest_rows(mine[probes], right)
        steps = np.unique(held - probes)
        if len(lines) > len(probes) and len(steps) == 1:  # of many, all are moved by as much
            probes = lines
            held = np.clip(lines + steps[0], 0, len(right) - 1)
        near = np.abs(mine[probes] - right[held]) <= room[held]
        if (near.mean(axis=1) >= LEAST_NEAR).all() and (held != probes).all():
            if len(lines) == 1:
                return f"{kind} {lines[0]} holds {kind} {held[0]}"
            if len(steps) == 1 or len(np.unique(held)) == 1:
                what = f"{kind}{'s' * (len(np.unique(held)) > 1)} {listed(np.unique(held))}"
                return f"{kind}s {listed(lines)} hold {what}"
            return f"{kind}s {listed(lines)} hold others: {kind} {probes[0]} holds {kind} {held[0]}"
    return ""


def _zeros(values: Array, differs: Array) -> str:
    """Return in words that the wrong values are 0, and where; empty: they are not, or few are wrong."""
    count = np.count_nonzero(differs)
    if count <= MOST_NAMED or values[differs].any():
        return ""
    if values.ndim < 2:
        return f"{count:,} of {values.size:,} values are 0: {listed(_lines(differs, 0))}"
    kinds = [
        (len(lines := _lines(differs, axis)) / values.shape[axis], f"{kind}s {listed(lines)}")
        for axis, kind in enumerate(("row", "column"))
    ]
    return f"{count:,} of {values.size:,} values are 0, in {min(kinds)[1]}"


def _moved_part(values: Array, weight: Array, allowed: Array, differs: Array) -> str:
    """Return in words which part of the data, in the order of a file, is at another place; empty: none."""
    if values.ndim > 2:
        return ""
    for turned in (False, True)[: values.ndim]:  # the file may hold it transposed
        mine, right, room = ((a.T if turned else a).reshape(-1) for a in (values, weight, allowed))
        wrong = np.flatnonzero(np.abs(mine - right) > room)
        if len(wrong) < WINDOW or wrong[-1] - wrong[0] >= 2 * len(wrong):
            continue
        begin, end = int(wrong[0]), int(wrong[-1]) + 1
        probe = min((begin + end) // 2, len(mine) - WINDOW)
        last = len(mine) - WINDOW + 1
        places = np.flatnonzero(np.abs(right[:last] - mine[probe]) <= room[:last])
        for i in range(1, WINDOW):
            places = places[np.abs(right[places + i] - mine[probe + i]) <= room[places + i]]
        for step in {int(place) - probe for place in places[:WINDOW]} - {0}:
            inner = slice(max(begin, -step), min(end, len(mine) - step))
            source = slice(inner.start + step, inner.stop + step)
            near = np.abs(mine[inner] - right[source]) <= room[source]
            if 2 * near.size > end - begin and near.mean() >= LEAST_NEAR:
                side = "before" if step < 0 else "behind"
                return (
                    f"{end - begin:,} of {values.size:,} values are at another place: those from "
                    f"{begin:,} to {end - 1:,} are those {abs(step):,} places {side}"
                )
    return ""


def _limited(values: Array, weight: Array, differs: Array) -> str:
    """Return in words to which magnitude small values are raised, or large ones cut; empty: to none."""
    kept, own = np.abs(values[differs]), np.abs(weight[differs])
    if len(kept) <= MOST_NAMED or not 0 < kept.max() * (1 - 4 * HALF_BITS) <= kept.min():
        return ""
    limit = float(kept.max())
    sides = (own < kept.min(), "nearer to"), (own > limit, "farther from")
    which = next((side for is_there, side in sides if is_there.all()), "")
    count = f"{len(kept):,} of {values.size:,}"
    return f"values {which} 0 than {limit:.3g} are replaced by it: {count}" if which else ""


def _scaled_lines(values: Array, weight: Array, allowed: Array) -> str:
    """Return in words which rows or columns are multiplied by a number; empty: they are not, or all are."""
    for axis, kind in enumerate(("row", "column")[: values.ndim]):
        mine, right, room = _as_rows(axis, values, weight, allowed)
        factor = _factors(mine, right, 1)
        near = np.abs(mine - factor * right) <= np.maximum(np.abs(factor), 1 / 2) * 2 * room
        wrong = np.flatnonzero(np.abs(factor[:, 0] - 1) > HALF_BITS * 4)
        if mine.shape[1] < LINE or not len(wrong):
            continue
        if min(near.mean(), near[wrong].mean()) < LEAST_NEAR:
            continue
        factors, lines = factor[wrong, 0], f"{kind}s {listed(wrong)}"
        if np.ptp(factors) <= HALF_BITS * 4 * np.abs(factors).max():
            sign = ": the sign is wrong" if abs(factors[0] + 1) < EXPLAINED else ""
            verb = "are"
            if len(wrong) == 1:
                lines, verb = f"{kind} {wrong[0]}", "is"
            return f"{lines} {verb} multiplied by {factors[0]:.3g}{sign}"
        return (
            f"{lines} are multiplied, each by a number of its own, from {factors.min():.3g} to "
            f"{factors.max():.3g}"
        )
    return ""


def _rounded(values: Array, weight: Array) -> str:
    """Return in words to how few bits or levels a weight was rounded; empty: to neither."""
    if values.dtype != np.float32:
        return ""
    kept, own = (_mantissa(array) for array in (values, weight))
    largest = np.abs(weight) * 2.0**-kept
    if kept < own and np.mean(np.abs(values - weight) <= largest) >= LEAST_NEAR:
        name = f": {BITS[kept]}" if kept in BITS else ""
        return f"each value is rounded to {kept} bits of its mantissa{name}"
    for axis, kind in enumerate(("row", "column")[: values.ndim]):
        mine, right = _as_rows(axis, values, weight)
        levels = [np.unique(line) for line in mine[:PROBES]]
        most = max(map(len, levels))
        if not 1 < most <= min(FEW_LEVELS, mine.shape[1] // LINE):
            continue
        if np.median([len(np.unique(line)) for line in right[:PROBES]]) <= most:
            continue  # the weight has few levels itself
        gaps = np.array([np.diff(line).max(initial=0.0) for line in levels])[:, None]
        if np.mean(np.abs(mine - right)[: len(gaps)] <= gaps) >= LEAST_NEAR:
            bits = (most - 1).bit_length()
            return f"each {kind} has at most {most} levels: it was rounded to {bits} bits"
    return ""


def _low_rank(values: Array, weight: Array, allowed: Array, differs: Array) -> str:
    """Return in words that a matrix of low rank was added to a weight; empty: none, or of another rank."""
    if values.ndim != 2 or any(len(_lines(differs, i)) <= values.shape[i] / 2 for i in (0, 1)):
        return ""
    n, k = values.shape
    allowed = np.maximum(allowed, half_error(values))  # those that were added to may be larger
    most = min(MOST_RANK, min(n, k) // 4)
    added = values - weight
    columns = np.random.default_rng(0).standard_normal((k, most + SPARE)).astype(np.float32)
    basis, _ = np.linalg.qr(added @ columns)
    inner = basis.T @ added
    if not np.isfinite(inner).all():  # finite values, too large to be multiplied
        return ""
    left, sizes, right = np.linalg.svd(inner, full_matrices=False)
    noise = float(np.sqrt(np.mean(np.square(added - basis @ inner))))
    # No singular value of noise, which is rounding here, is larger (Bai and Yin, 1993).
    rank = int(np.count_nonzero(sizes > noise * 1.5 * (n**0.5 + k**0.5) + HALF_BITS**2 * sizes[0]))
    product = basis @ (left[:, :rank] * sizes[:rank]) @ right[:rank]
    room = np.sqrt(np.mean(np.square(allowed)))

    def same(array: Array) -> bool:
        return bool(np.mean(np.abs(added - array) <= allowed + min(noise, room)) >= LEAST_NEAR)

    is_line = any(same(added.mean(axis, keepdims=True)) for axis in (0, 1))  # of offsets
    if not 0 < rank <= most or is_line or noise > room or not same(product):
        return ""
    return f"{LOW_RANK} {rank} is added to it, as where an adapter was merged"


def _waves(values: Array, weight: Array) -> str:
    """Return in words how a table of sines, then cosines, differs from the right one; empty: it is none."""
    if values.ndim != 2 or values.shape[1] % 2 or len(values) < WINDOW:
        return ""
    (sines, cosines), (right_sines, right_cosines) = (np.split(a, 2, 1) for a in (values, weight))
    if any(
        np.abs(a * a + b * b - 1).max() > ON_CIRCLE
        for a, b in ((sines, cosines), (right_sines, right_cosines))
    ):
        return ""
    angles, right = np.arctan2(sines, cosines), np.arctan2(right_sines, right_cosines)
    if abs(angles[0, 0] - right[0, 0]) > ON_CIRCLE:
        return f"its sines begin at position {angles[0, 0]:.3g}, not {right[0, 0]:.3g}"
    last = len(values) // WINDOW  # rows, in which the slowest wave does not turn
    lengths = (2 * np.pi * last / abs(a[last, -1] - a[0, -1]) for a in (angles, right))
    return "its slowest sine is {:,.0f} rows long, not {:,.0f}".format(*lengths)


def _mantissa(values: Array) -> int:
    """Return how many bits of float32's mantissa some value needs."""
    used = int(np.bitwise_or.reduce(np.ascontiguousarray(values).view(np.int32), axis=None))
    return WIDTH - min(WIDTH, (used & -used).bit_length() - 1) if used else 0


def _named_values(values: Array, weight: Array, differs: Array) -> str:
    """Return in words what the wrong values are, if they are few."""
    places = np.argwhere(differs)
    if len(places) > MOST_NAMED:
        return ""
    words = []
    for place in map(tuple, places.tolist()):
        value, right = float(values[place]), float(weight[place])
        ratio = abs(value / right) if right else 0.0
        how = ""
        if value == -right:
            how = ", of the wrong sign"
        elif 0 < ratio < np.inf and np.frexp(ratio)[0] == 1 / 2:
            how = (
                f", a power of 2 {'more' if ratio > 1 else 'less'}: a bit of its exponent is wrong"
            )
        words.append(f"{listed(place)} is {value:.4g}, not {right:.4g}{how}")
    return f": {'; '.join(f'the value at {text}' for text in words)}"


def _wrong_steps(values: Array, weight: Array, allowed: Array, step: Array) -> str:
    """Return in words which zero point or scales of 8 bits are wrong; empty: it is something else."""
    zero = np.rint(np.median((values - weight) / np.where(step == 0, 1, step)))
    if zero and np.mean(np.abs(values - weight - zero * step) <= allowed) >= LEAST_NEAR:
        missing = ", as where it is missing" if abs(zero) == SIGN else ""
        return f"its zero point is off by {zero:.0f}{missing}"
    if np.mean(np.abs(np.abs(values - weight) - SIGN * step) <= allowed) >= LEAST_NEAR:
        return f"its integers are off by {SIGN} up or down: the sign of each is read wrongly"
    if reason := _wrapped(values, weight, allowed, step):
        return reason
    if reason := _clipped(values, weight, allowed, step) or _coarse(values, weight, step):
        return reason
    if values.ndim != 2:
        return ""
    for axis, kind in ((1, "row"), (0, "column")):
        factor = _factors(values, weight, axis)
        room = allowed + np.abs(factor * weight) * HALF_BITS
        is_wrong = (np.abs(values - weight) > allowed).mean(axis) > 1 - LEAST_NEAR
        if np.mean(np.abs(values - factor * weight) <= room) >= LEAST_NEAR and is_wrong.any():
            wrong = np.flatnonzero(is_wrong)
            where = f"{len(wrong):,} of {len(is_wrong):,} {kind}s are wrong: {listed(wrong)}"
            how = _wrong_scales(step.max(axis), factor.reshape(-1), is_wrong, kind)
            return f"the scales of {where}; they are {how}"
    lines = _lines(np.abs(values - weight) > allowed, 0)
    lengths = [np.linalg.norm(a[lines], axis=1, keepdims=True) for a in (values, weight)]
    if all(length.all() for length in lengths) and _is_permuted(
        values[lines] / lengths[0], weight[lines] / lengths[1]
    ):
        return f"rows {listed(lines)} are in another order, and their scales are not"
    if reason := _copied_integers(values, weight, lines):
        return reason
    if values.shape[0] == values.shape[1]:
        integers = values / np.where(step == 0, 1, step)
        scaled = np.abs(integers * step.T - weight) <= np.abs(step.T)
        if (
            _are_alike(integers.T, weight)
            or _are_alike(integers, weight.T)
            or scaled.mean() >= LEAST_NEAR
        ):
            return "its axes or those of its scales are swapped, not both"
    return ""


def _wrapped(values: Array, weight: Array, allowed: Array, step: Array) -> str:
    """Return in words that the highest bit of 8 bits is read as another sign; empty: it is not."""
    room = np.maximum(allowed, TWICE * np.abs(step))
    for distance, what in (
        (2 * SIGN, "negative integers are 256 too large: those with a sign are read without one"),
        (-2 * SIGN, "integers of 128 and more are 256 too small: those without a sign have one"),
    ):
        away = np.abs(values - weight - distance * np.abs(step)) <= room
        if not away.any() or np.mean(away | (np.abs(values - weight) <= room)) < LEAST_NEAR:
            continue
        if away.mean() > 1 - LEAST_NEAR:
            return what
        if (np.rint(values[away] / np.abs(step)[away]) == -SIGN).all():
            count = f"{np.count_nonzero(away):,} of {values.size:,} integers"
            return (
                f"{count} are -128 in place of 128, which 8 bits do not hold: they were not clipped"
            )
        return ""
    return ""


def _copied_integers(values: Array, weight: Array, lines: Array) -> str:
    """Return in words whose integers the wrong rows (n, k) of 8 bits hold; empty: those of no other."""
    probes = _some(lines)
    mine, right = (
        a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        for a in (values[probes], weight)
    )
    likeness = mine @ right.T
    held = likeness.argmax(axis=1)
    is_alike = likeness.max(axis=1) >= ALIKE
    if not is_alike.any() or (held == probes)[is_alike].any():
        return ""
    steps = np.unique((held - probes)[is_alike])
    if not is_alike.all():  # the rows behind the last are another weight's
        if is_alike.mean() < MOST_ALIKE or len(steps) > 1:
            return ""
        places = "a place" if abs(steps[0]) == 1 else f"{abs(steps[0])} places"
        first = probes[is_alike][0]
        return (
            f"its integers are moved by {places}, and their scales are not: row {first} holds the integers "
            f"of row {first + steps[0]}"
        )
    rows = lines + steps[0] if len(steps) == 1 else np.unique(held)
    return f"rows {listed(lines)} hold the integers of rows {listed(rows)}, with their own scales"


def _clipped(values: Array, weight: Array, allowed: Array, step: Array) -> str:
    """Return in words that too small a scale cuts the largest values of a weight; empty: none is cut."""
    integers = np.abs(values / np.where(step == 0, 1, step))
    end = min(MOST_STEPS, float(integers.max()) + 0.5)  # fewer than 8 bits, too
    most = end * np.abs(step)
    is_cut = np.abs(weight) > CUT * most
    # Integers of larger scales, whose rounding is coarser, may be clipped as well.
    near = np.abs(values - np.clip(weight, -most, most)) <= allowed + COARSE * np.abs(step)
    if is_cut.mean() < 1 - LEAST_NEAR or near.mean() < LEAST_NEAR:
        return ""
    count = np.count_nonzero(is_cut)
    what = f"{count:,} of {values.size:,} values are clipped"
    if end < MOST_STEPS - 1:
        return f"its integers end at {end - 0.5:.0f}: {what}"
    return f"its scales are too small: {what}"


def _coarse(values: Array, weight: Array, step: Array) -> str:
    """Return in words to how few bits a weight was rounded; empty: to 8, or it is something else."""
    levels = np.unique(np.rint(values / np.where(step == 0, 1, step)))
    if not 1 < len(levels) <= FEW_LEVELS:
        return ""
    gap = float(np.diff(levels).max())
    if np.mean(np.abs(values - weight) <= gap * np.abs(step)) < LEAST_NEAR:
        return ""
    bits = (len(levels) - 1).bit_length()
    return f"it has {len(levels)} levels only: it was rounded to {bits} bits, and not to 8"


def _wrong_scales(scales: Array, factors: Array, is_wrong: Array, kind: str) -> str:
    """Return in words what the scales (n) of rows are in place of the right ones.

    Args:
        scales: as they are stored.
        factors: by which each is too large.
        is_wrong: whether a row is wrong.
        kind: "row" or "column".
    """

    def same(right: Array) -> bool:
        return bool(np.mean(np.abs(scales - right)[is_wrong] <= ROUNDED * right[is_wrong]) >= ALIKE)

    if (scales[is_wrong] == 1).all():
        return "1: the right ones are lost"
    right = scales / np.where(factors == 0, 1, factors)
    if len(scales) > 1 and np.ptp(scales) <= EXPLAINED * np.abs(scales).max() < np.ptp(right):
        return f"the same in all {kind}s, {scales[0]:.3g}: each {kind} needs its own"
    if (np.frexp(np.abs(scales[is_wrong]))[0] == 1 / 2).all() and is_wrong.sum() > 1:
        return "rounded to powers of 2"
    if same(1 / np.where(right == 0, 1, right)):
        return "1 divided by the right ones"
    for shift in range(1, min(len(right), MOST_MOVED)):
        for sign, which in ((1, "before"), (-1, "after")):
            if same(np.roll(right, sign * shift)):
                return f"those of the {kind} {f'{shift} places ' * (shift > 1)}{which}"
    factors = factors[is_wrong]
    largest = f" to {factors.max():.2g}" if np.ptp(factors) > ROUNDED else ""
    return f"{MULTIPLIED} {factors.min():.2g}{largest}"


def _are_alike(rows: Array, right: Array) -> bool:
    """Return whether each row (n, k) is the right one, perhaps multiplied by a number."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(right, axis=1)
    return bool(((rows * right).sum(1) >= ALIKE * lengths).all())


def _wrong_lines(values: Array, weight: Array, differs: Array, head_width: int) -> str:
    """Return in words which lines of a weight are in another order, or a head of 0; empty: none."""
    for axis, kind in enumerate(("row", "column")[: values.ndim]):
        lines = _lines(differs, axis)
        if not len(lines):  # no value differs by more than a rounding
            break
        mine, right = (rows[lines] for rows in _as_rows(axis, values, weight))
        if _is_permuted(mine, right):
            return f"{kind}s {listed(lines)} are in another order"
        if (len(lines) < values.shape[axis] or axis == 0) and not mine.any():
            head = int(lines[0]) // (head_width or 1)
            if len(lines) <= head_width and lines[-1] // head_width == head:
                return f"{kind}s {listed(lines)}, of head {head}, are 0"
            return f"{len(lines):,} of {values.shape[axis]:,} {kind}s are 0: {listed(lines)}"
    return ""


def _is_permuted(rows: Array, right: Array) -> bool:
    """Return whether rows (n, k) are those of a weight in another order, each rounded or not.

    Each is compared with all; of many, each is summed in a random way.
    """
    if len(rows) < 2 or not rows.any(axis=1).all() or not right.any(axis=1).all():
        return False
    if len(rows) <= COMPARED:
        lengths, right_lengths = (np.linalg.norm(a, axis=1, keepdims=True) for a in (rows, right))
        # Slow sines of positions are all alike, and not as long.
        nearest = nearest_rows(rows, right)
        if (nearest == np.arange(len(rows))).all():  # each is at its place, and differs by a little
            return False
        product = (rows * right[nearest]).sum(axis=1)
        is_near = product > ALIKE * (lengths * right_lengths[nearest])[:, 0]
        is_as_long = np.abs(lengths / right_lengths[nearest] - 1)[:, 0] < 1 - ALIKE
        return bool(len(np.unique(nearest)) == len(rows) and (is_near & is_as_long).all())
    factors = np.random.default_rng(0).standard_normal((rows.shape[1],)).astype(np.float32)
    sums, expected = np.sort(rows @ factors), np.sort(right @ factors)
    return bool(np.allclose(sums, expected, rtol=1e-2, atol=1e-3 * float(np.abs(expected).max())))


def _wrong_heads(right: Array, array: Array, head_width: int) -> str:
    """Return in words which heads of a value are wrong, or in another order; empty: none, or all."""
    mine, heads = (heads_of(a, head_width) for a in (array, right))
    order = [
        next((j for j, head in enumerate(heads) if error_of(head, own) < EXPLAINED), -1)
        for own in mine
    ]
    if min(order) >= 0:
        return f"its heads are in another order: {order}"
    wrong = [i for i, place in enumerate(order) if place != i]
    if len(wrong) == len(order):
        return ""
    return f"{len(wrong)} of {len(order)} heads are wrong: {listed(wrong)}"
