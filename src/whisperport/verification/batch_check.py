"""Verify a program `step_B`: every row of a batch gives the logits of its own text at its own position."""

from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np

from whisperport.errors import NumericalError
from whisperport.program.checks import UNCACHED_DECODER, Check
from whisperport.runtime import Batch, Decoder, Engine, Step
from whisperport.runtime.scores import Scores
from whisperport.verification.compare import compare
from whisperport.verification.precision import coarsest
from whisperport.verification.reference import Reference, ReferenceClip
from whisperport.verification.sum_check import sum_checks
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
    others = "encoder", UNCACHED_DECODER
    of_decoder = coarsest(p for program, p in precision.items() if program not in others)
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
        found = batch.step_all([(row.decoder, row.step(run)) for row in active])
        for row, scored in zip(active, found, strict=True):
            if isinstance(scored, NumericalError):
                raise scored
            assert isinstance(scored, Scores)  # the steps are exact
            row.found.append(scored.copy())
    for index, clip in enumerate(clips):
        of_clip = list(islice(rows, index, None, len(clips)))
        scores = [each for row in of_clip for each in row.found]
        actual = np.stack([each.logits for each in scores])
        expected = np.concatenate([clip.logits[1:]] * len(of_clip))
        yield Check.of("arrays", name, clip.name, compare("logits", actual, expected, gate))
        yield from sum_checks(name, clip.name, scores)


class _Row:
    """One row of the batch, which decodes the text of a clip from the run `begins` until the run `ends`."""

    def __init__(self, decoder: Decoder, clip: ReferenceClip, begins: int) -> None:
        self.decoder, self.clip = decoder, clip
        self.begins, self.ends = begins, begins + len(clip.logits) - 1
        self.found: list[Scores] = []

    def step(self, run: int) -> Step:
        """Return the step of a run; the first one begins the window."""
        if run == self.begins:
            self.decoder.start_window(self.clip.features)
            self.decoder.prefill(self.clip.prompt)
        return Step(self.clip.tokens[run - self.begins], self.decoder.cache)
