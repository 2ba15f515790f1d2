"""Decoding as a generator that asks for steps: whoever runs it may join the steps of several decodings."""

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from whisperport.program.runner import Array
from whisperport.program.signatures import LOGSUMEXP
from whisperport.runtime.engine.coarse import CoarseLogits
from whisperport.runtime.engine.engine import Engine
from whisperport.runtime.engine.scores import Floats, Scores
from whisperport.runtime.kv_cache.cache import Cache

T = TypeVar("T")


class Step(NamedTuple):
    """One token to decode after those in a cache, and to append to them."""

    token: int  # id
    cache: Cache
    exact: bool = True  # whether all logits are needed in float32
    scored: bool = True  # whether the logits are needed at all


Scored = Scores | CoarseLogits
"""Logits (V,). The next step in the same cache may overwrite them.

Those of a step that is not `exact` may be coarse; a step that is not `scored` has none: (0,).
"""

Steps = Generator[Sequence[Step], Sequence[Scored], T]
"""A decoding. It yields the steps that it needs next, and is sent the logits after each of them."""


def score_from(engine: Engine, outputs: Mapping[str, Array], row: int, step: Step) -> Scored:
    """Return the logits of one row of the outputs of `step` or `step_B`.

    Args:
        engine: that ran the program.
        outputs: of the program.
        row: its index.
        step: which logits are needed.

    Raises:
        NumericalError: the hidden states or their logits contain a NaN or an infinity.
    """
    if not step.scored:
        return Scores(np.empty(0, np.float32))
    logits, sums = outputs.get("logits"), outputs.get(LOGSUMEXP)
    if logits is not None:
        return Scores(logits[row], None if sums is None else sums.item(row))
    hidden: Floats = outputs["hidden"][0, row]
    if step.exact or not engine.coarse:
        return Scores(engine.project(hidden[None])[0])
    return engine.coarse(hidden)


class Stepper(Protocol):
    """Runs steps: a decoder."""

    def step_all(self, steps: Sequence[Step]) -> Sequence[Scored]:
        """Decode one token after those in each cache, and return the logits after each.

        The next call may overwrite them.
        """
        ...


def complete(decoder: Stepper, steps: Steps[T]) -> T:
    """Run one decoding to its end, and return its result.

    An exception of a step is raised inside the decoding, which may add what was decoded so far.

    Args:
        decoder: the decoder that the decoding was started with.
        steps: the decoding.
    """
    try:
        requested = next(steps)
        while True:
            try:
                logits = decoder.step_all(requested)
            except BaseException as error:
                requested = steps.throw(error)
            else:
                requested = steps.send(logits)
    except StopIteration as end:
        result: T = end.value
        return result
