"""Decoding as a generator that asks for steps: whoever runs it may join the steps of several decodings."""

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from whisperport.runtime.engine.cache import Cache
from whisperport.runtime.engine.coarse import CoarseLogits
from whisperport.runtime.engine.scores import Scores

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
