"""Checks of single programs beside the comparison of their arrays.

`batch_checks`: every row of `step_B` gives the logits of its own text at its own position.
`sum_checks`: the output `logsumexp`, from which probabilities are computed. `bound_check`: no logit of
`coarse_projection` is further from the reference's than its bound.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from whisperport.errors import NumericalError
from whisperport.program.checks import COARSE_PROJECTION, UNCACHED_DECODER, Check
from whisperport.runtime import Batch, Decoder, Engine, Floats, Step
from whisperport.runtime.engine.coarse import CoarseProjection
from whisperport.runtime.engine.scores import Scores
from whisperport.verification.array_comparison import compare
from whisperport.verification.precision import coarsest
from whisperport.verification.reference import Reference, ReferenceClip
from whisperport.verification.tolerances import limit_of


def batch_checks(
    engine: Engine, reference: Reference, precision: Mapping[str, str]
) -> Iterator[Check]:
    """Decode the texts of the reference together, and compare their logits.

    Each row has a clip and begins one run later than the row before it. Neighbouring rows therefore have
    different positions and, if there are several clips, different audio.

    Args:
        engine: the bundle's programs; nothing is checked if there is no `step_B`.
        reference: of the bundle. Clips without logits are not used.
        precision: program -> its precision.

    Yields:
        One check for each clip, and one of its `logsumexp` if the program returns it.

    Raises:
        NumericalError: a program returned a NaN or an infinity.
    """
    clips = [clip for clip in reference.clips if clip.features.size and len(clip.logits) > 1]
    if engine.batch_step is None or not clips:
        return
    name = engine.batch_step.spec.name
    other_programs = "encoder", UNCACHED_DECODER
    of_decoder = coarsest(p for program, p in precision.items() if program not in other_programs)
    gate = limit_of(of_decoder, reference.loss(of_decoder, "logits"))
    batch = Batch(engine, fewest=1)
    clips = clips[: batch.size]
    rows = [
        _Row(decoder, clips[index % len(clips)], begins=index)
        for index in range(batch.size)
        if (decoder := batch.decoder())
    ]
    for run in range(max(row.ends for row in rows)):
        active = [row for row in rows if row.begins <= run < row.ends]
        results = batch.step_all([(row.decoder, row.step(run)) for row in active])
        for row, scored in zip(active, results, strict=True):
            if isinstance(scored, NumericalError):
                raise scored
            assert isinstance(scored, Scores)  # the steps are exact
            row.scores.append(scored.copy())
    for index, clip in enumerate(clips):
        of_clip = list(islice(rows, index, None, len(clips)))
        scores = [each for row in of_clip for each in row.scores]
        actual = np.stack([each.logits for each in scores])
        expected = np.concatenate([clip.logits[1:]] * len(of_clip))
        yield Check.of("arrays", name, clip.name, compare("logits", actual, expected, gate))
        yield from sum_checks(name, clip.name, scores)


class _Row:
    """One row of the batch, which decodes the text of a clip from the run `begins` until the run `ends`."""

    def __init__(self, decoder: Decoder, clip: ReferenceClip, begins: int) -> None:
        self.decoder, self.clip = decoder, clip
        self.begins, self.ends = begins, begins + len(clip.logits) - 1
        self.scores: list[Scores] = []

    def step(self, run: int) -> Step:
        """Return the step of a run; the first one begins the window."""
        if run == self.begins:
            self.decoder.start_window(self.clip.features)
            self.decoder.prefill(self.clip.prompt)
        return Step(self.clip.tokens[run - self.begins], self.decoder.cache)


# Of the natural logarithm of the sum: what decoding with 8-bit logits allows too. The sum of 51,865
# exponentials in float32 is right within 1e-5. In the logarithm of a probability, the error may be up to
# 20 times as large if the rules forbid most of the sum: see `LEAST_PART` in `runtime/scores.py`.
TOLERANCE = 1e-4
SUM_RULE = f"|logsumexp - log Σ exp(logit)| ≤ {TOLERANCE:g}"


def sum_checks(program: str, what: str, scores: Sequence[Scores]) -> Iterator[Check]:
    """Compare each `logsumexp` with that of the logits of the same run, computed in float64.

    Args:
        program: name of the program that returned them.
        what: what was decoded.
        scores: the scores before any rule.

    Yields:
        One check; none if the program has no such output.
    """
    errors = [
        abs(each.total - np.logaddexp.reduce(each.logits.astype(np.float64)))
        for each in scores
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
        rule=SUM_RULE,
        passed=worst <= TOLERANCE,
        reason="" if worst <= TOLERANCE else f"the largest difference is {worst:g}",
    )


# The reference's own hidden states and logits are rounded to float32, and come from another runtime.
ROUNDING = 1e-4  # of the largest logit
BOUND_RULE = f"max(|Δ| / (bound + {ROUNDING:g} · max|expected|)) ≤ 1"


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
        rule=BOUND_RULE,
        passed=worst <= 1,
        reason="" if worst <= 1 else f"an error is {worst:.2f} times its bound",
    )
