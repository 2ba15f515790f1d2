"""The value of attention masks: what is added to the attention scores of hidden tokens.

`exp` of a hidden token's score must add nothing to the sum of the softmax. In float32 any large negative
number does that. A program that is quantized or computes in float16 needs a number that is no larger than
necessary: an 8-bit tensor that holds -30000 has steps of 118, in which all other scores are 0.
"""

import math

MASKED = -30_000.0  # the value in float32; float16 can represent it, up to 65504
BOUNDED_MASK = -64.0  # the value in other precisions; hides tokens if `spread` is at most 40
WEAKEST_MASK = -16.0  # exp(-16) is the relative precision of float32; a weaker mask hides nothing
STEP = 8  # masks that follow from a measured spread are multiples of it


def default_mask(precision: str) -> float:
    """Return the value for a precision that the target's spec does not name."""
    return MASKED if precision == "fp32" else BOUNDED_MASK


def hiding_mask(spread: float, rows: int) -> float:
    """Return the largest value, a multiple of `STEP`, that hides tokens as completely as -inf in float32.

    The hidden scores together then add less than half of the last bit of the sum of the softmax:
    rows · exp(spread + mask) < 2^-25.

    Args:
        spread: largest difference between the score of a hidden token and the largest score of a visible
            token, for the same query. See `score_spread`, which measures it.
        rows: number of hidden tokens, at most.

    Returns:
        The value, from `MASKED` to `WEAKEST_MASK`; `MASKED` if `spread` is not finite.
    """
    if not math.isfinite(spread):
        return MASKED
    needed = max(spread, 0.0) + math.log(rows) + 25 * math.log(2)
    return min(WEAKEST_MASK, max(MASKED, -STEP * math.ceil(needed / STEP)))


def check_mask(mask: float) -> None:
    """Check the value of a placement.

    Raises:
        ValueError: it is not a number from `MASKED` to `WEAKEST_MASK`.
    """
    if not MASKED <= mask <= WEAKEST_MASK:  # false for NaN
        raise ValueError(f"is {mask}; expected {MASKED:g} to {WEAKEST_MASK:g}")
