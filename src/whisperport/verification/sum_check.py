"""Verify the output `logsumexp` of a program, from which probabilities are computed."""

from collections.abc import Iterator, Sequence

import numpy as np

from whisperport.program.checks import Check
from whisperport.runtime.scores import Scores

# Of the natural logarithm of the sum: what decoding with 8-bit logits allows too. The sum of 51,865
# exponentials in float32 is right within 1e-5. In the logarithm of a probability, the error may be up to
# 20 times as large if the rules forbid most of the sum: see `LEAST_PART` in `runtime/scores.py`.
TOLERANCE = 1e-4
RULE = f"|logsumexp - log Σ exp(logit)| ≤ {TOLERANCE:g}"


def sum_checks(program: str, what: str, found: Sequence[Scores]) -> Iterator[Check]:
    """Compare each `logsumexp` with that of the logits of the same run, computed in float64.

    Args:
        program: name of the program that returned them.
        what: what was decoded.
        found: the scores before any rule.

    Yields:
        One check; none if the program has no such output.
    """
    errors = [
        abs(each.total - np.logaddexp.reduce(each.logits.astype(np.float64)))
        for each in found
        if each.total is not None
    ]
    if not errors:
        return
    worst = float(np.max(errors))  # of a NaN and numbers, the NaN
    yield Check(
        level="arrays",
        program=program,
        what=f"{what}, sum of exponentials",
        value={"sum_error": worst},
        rule=RULE,
        passed=worst <= TOLERANCE,
        reason="" if worst <= TOLERANCE else f"the largest difference is {worst:g}",
    )
