"""Verify a program `coarse_projection`: no logit is further from the reference's than its bound."""

import numpy as np

from whisperport.program.checks import COARSE_PROJECTION, Check
from whisperport.runtime import Floats
from whisperport.runtime.coarse import CoarseProjection
from whisperport.verification.reference import ReferenceClip

# The reference's own hidden states and logits are rounded to float32, and come from another runtime.
ROUNDING = 1e-4  # of the largest logit
RULE = f"max(|Δ| / (bound + {ROUNDING:g} · max|expected|)) ≤ 1"


def bound_check(coarse: CoarseProjection, hidden: Floats, clip: ReferenceClip) -> Check:
    """Compare the coarse logits of a clip's tokens with the reference's logits.

    Args:
        coarse: of the bundle.
        hidden: (K, d), the hidden states that the reference's logits (K, V) are made of.
        clip: of the reference, with logits.

    Raises:
        NumericalError: the program returned a NaN or an infinity.
    """
    slack = ROUNDING * float(np.abs(clip.logits).max())
    parts = []
    for row, expected in zip(hidden, clip.logits, strict=True):
        logits, bound = coarse.bounded(row)
        parts.append(float((np.abs(logits - expected) / (bound + slack)).max()))
    worst = max(parts)
    return Check(
        level="arrays",
        program=COARSE_PROJECTION,
        what=clip.name,
        value={"part_of_bound": worst},
        rule=RULE,
        passed=worst <= 1,
        reason="" if worst <= 1 else f"an error is {worst:.2f} times its bound",
    )
