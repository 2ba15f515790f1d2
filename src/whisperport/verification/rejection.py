"""Say why a bundle was rejected: every output that failed, worst first, and what its checkpoint keeps."""

import math
from collections.abc import Iterable, Sequence

from whisperport.program.checks import Check
from whisperport.verification.reference import Reference
from whisperport.verification.tolerances import FLOOR_DB


def rejection(checks: Iterable[Check], reference: Reference, missing: Sequence[str] = ()) -> str:
    """Return all failures, one a line: words first, then outputs by their SQNR.

    What the words show follows where they did not fail, and what torch keeps in other precisions.

    Args:
        checks: all checks.
        reference: of the bundle.
        missing: failures that are no check's.
    """
    checks = list(checks)
    failed = sorted((check for check in checks if not check.passed), key=_order)
    words = [f"the words: {c.rule}" for c in checks if c.level == "words" and c.passed]
    lines = [f"{c.program}, {c.what} ({c.level}): {c.reason}" for c in failed]
    return "\n".join([*lines, *missing, *words, *_kept(reference)])


def _order(check: Check) -> tuple[bool, float]:
    sqnr_db = check.value.get("sqnr_db", math.nan)
    return check.level != "words", -math.inf if math.isnan(sqnr_db) else sqnr_db


def _kept(reference: Reference) -> list[str]:
    """Say what torch keeps of this checkpoint in other precisions; nothing if it was not measured."""
    losses = reference.losses("features")
    kept = [f"{p} {loss.sqnr_db:.0f} dB" for p, loss in losses.items() if loss.sqnr_db >= FLOOR_DB]
    if not kept:
        return []
    return [
        f"torch's own encoder of this checkpoint keeps {', '.join(kept)} (w8: 8-bit weights, as in w8 and "
        "w8a16): these precisions can be verified where the target's compiler loses little more"
    ]
