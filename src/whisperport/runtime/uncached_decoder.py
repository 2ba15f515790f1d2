"""Decode without a cache, as accelerators do that can hold none: every token runs all rows again."""

from collections.abc import Sequence

import numpy as np

from whisperport.runner import Array, Binding, Runner
from whisperport.runtime.cache import Floats

# The token in the rows that have none yet: published graphs are calibrated and run with zeros as ids.
PADDING = 0


class UncachedDecoder:
    """`uncached_decoder` behind the calls of a `Decoder`: `start_window`, then `prefill`, then `step`.

    For measuring what a cache saves, and for verifying the program. It decodes one sequence of tokens, at
    most as many as the program has rows, from the features as they are, without a short window's padding.
    """

    def __init__(self, runner: Runner, embedding: Array, positions: Array) -> None:
        """
        Args:
            runner: of `uncached_decoder`; whether it adds positions shows in the shape of its second input:
                (1, d, S, 1) takes rows that have theirs, (1, d, 1, S) rows that have not.
            embedding: (V, d) float32 or float16.
            positions: of the decoder, (N, d) float32 or float16.
        """
        self._runner = runner
        self._features, self._embeddings = runner.spec.inputs
        self._positions_here = self._embeddings.shape[3] == 1
        self.sequence_length = max(self._embeddings.shape[2:])  # S
        self._embedding, self._positions = embedding, positions
        self._binding: Binding | None = None  # to a window's features
        self.tokens: list[int] = []

    def start_window(self, features: Floats) -> None:
        """Decode features (T, d) from now on, and forget every token. The caller does not change them."""
        self._binding = self._runner.binding()
        self._binding.bind(self._features.name, features[None])
        self.tokens = []

    def prefill(self, tokens: Sequence[int], *, second_index: int = 0) -> tuple[Floats, Floats]:
        """Logits (V,) after the last of these tokens, and after token `second_index`.

        Raises:
            ValueError: no tokens, more than there are rows for, or `start_window` was not called.
        """
        if not 0 <= second_index < len(tokens):
            raise ValueError(
                f"`second_index` is {second_index}; the prompt has {len(tokens)} tokens"
            )
        before = len(self.tokens)
        pieces = self._run([*self.tokens, *tokens])
        self.tokens += tokens
        return _row(pieces, before + len(tokens) - 1), _row(pieces, before + second_index)

    def step(self, token: int) -> Floats:
        """Logits (V,) after one more token.

        Raises:
            ValueError: there is no row left for it.
        """
        return self.prefill([token])[0]

    def _run(self, tokens: Sequence[int]) -> list[Floats]:
        """Logits (1, S, V / pieces) of each piece of the vocabulary."""
        if len(tokens) > self.sequence_length:
            raise ValueError(f"{len(tokens)} tokens do not fit {self.sequence_length} rows")
        if self._binding is None:
            raise ValueError("there are no features yet: call `start_window` first")
        return list(self._binding.run({self._embeddings.name: self._image(tokens)}).values())

    def _image(self, tokens: Sequence[int]) -> Floats:
        """The embeddings of all rows, (S, d), in the shape of the program's input.

        Rows after the tokens hold token 0, with its position where the host adds positions, as in published
        graphs. The causal mask hides them from the rows before. They are not zeros: the layer norm of a row
        of zeros divides by √ε, and the factor of 316 could widen the ranges that calibration measures.
        """
        padded = [*tokens, *[PADDING] * (self.sequence_length - len(tokens))]
        rows = self._embedding[padded].astype(np.float32)
        if self._positions_here:
            rows += self._positions[: self.sequence_length]
        return np.ascontiguousarray(rows.T).reshape(self._embeddings.shape)


def _row(pieces: Sequence[Floats], row: int) -> Floats:
    """One row's logits, of all pieces in their order: (V,)."""
    return np.concatenate([piece[0, row] for piece in pieces])
