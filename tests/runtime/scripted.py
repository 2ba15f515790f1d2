"""A decoder for tests of decoding, whose every token is known beforehand."""

from contextlib import nullcontext
from typing import Any

import numpy as np

from whisperport.program.generation import Generation
from whisperport.runtime import Cache
from whisperport.runtime.engine.scores import Scores

from ..micro import DIMS, GENERATION

FEATURES = np.zeros((DIMS.n_audio_ctx, DIMS.n_audio_state), np.float32)


class Scripted:
    """A decoder that emits a script: row i of the script after i tokens, or else `second`.

    It is its own engine.
    """

    joined_prompt = 0

    def __init__(
        self, script: list[int], generation: Generation = GENERATION, second: int | None = None
    ) -> None:
        self.dims, self.generation, self.cache = DIMS, generation, Cache(DIMS)
        self.window, self.latest_timestamp = None, None
        self.engine = self
        self.script, self.second, self.prompts = script, second, []

    def start_window(self, features: Any) -> None:
        self.n_decoded = 0

    def prefill(self, tokens: Any, *, second_index: int = 0) -> Any:
        self.prompts.append(list(tokens))
        return self._row(), np.zeros(DIMS.n_vocab, np.float32)

    def step(self, token: int, cache: Any = None) -> Any:
        self.n_decoded += 1
        return self._row()

    def step_all(self, steps: Any) -> Any:
        return [Scores(self.step(step.token, step.cache)) for step in steps]

    def caches(self, count: int) -> Any:
        return nullcontext([self.cache, *(self.cache.copy() for _ in range(count - 1))])

    def _row(self) -> Any:
        row = np.zeros(DIMS.n_vocab, np.float32)
        if self.second is not None:
            row[self.second] = 15.0
        row[self.script[min(self.n_decoded, len(self.script) - 1)]] = 20.0
        return row
