"""Decode without KV cache, for accelerators that cannot hold one: each step computes all tokens again."""

from collections.abc import Sequence

import numpy as np

from whisperport.program.runner import Array, Binding, Runner
from whisperport.runtime.engine.scores import Floats

PADDING = 0  # token id that fills up the sequence; published graphs are calibrated and run with it


class UncachedDecoder:
    """Runs the program `uncached_decoder` with the methods of `Decoder`: `start_window`, `prefill`, `step`.

    It is for measuring what a cache saves, and for verifying the program. It decodes one sequence of at
    most `sequence_length` tokens. The features are not padded for a short window.

    Attributes:
        sequence_length: S, the number of tokens that the program computes in each run.
        tokens: ids decoded so far.
    """

    def __init__(self, runner: Runner, embedding: Array, positions: Array) -> None:
        """
        Args:
            runner: the loaded program. The shape of its second input decides where position
                embeddings are added: (1, d, S, 1) by the host, (1, d, 1, S) by the program.
            embedding: token embedding, (V, d) float32 or float16.
            positions: position embedding of the decoder, (N, d) float32 or float16.
        """
        self._runner = runner
        self._features, self._embeddings = runner.spec.inputs
        self._adds_positions = self._embeddings.shape[3] == 1
        self.sequence_length = max(self._embeddings.shape[2:])  # S
        self._embedding, self._positions = embedding, positions
        self._binding: Binding | None = None  # bound to a window's features
        self.tokens: list[int] = []

    def start_window(self, features: Floats) -> None:
        """Begin a window with features (T, d), which the caller must not change, and remove all tokens."""
        self._binding = self._runner.binding()
        self._binding.bind(self._features.name, features[None])
        self.tokens = []

    def prefill(self, tokens: Sequence[int], *, second_index: int = 0) -> tuple[Floats, Floats]:
        """Decode a prompt of several tokens.

        Args:
            tokens: ids, appended to those before.
            second_index: index in `tokens` of a second token whose logits are returned.

        Returns:
            Logits (V,) after the last token, and logits (V,) after token `second_index`.

        Raises:
            ValueError: `tokens` is empty, there are more than `sequence_length` tokens, `second_index` is
                not an index of them, or `start_window` was not called.
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
        """Decode one more token, and return logits (V,) after it.

        Raises:
            ValueError: there are already `sequence_length` tokens.
        """
        return self.prefill([token])[0]

    def _run(self, tokens: Sequence[int]) -> list[Floats]:
        """Run the program: logits (1, S, V / pieces) of each piece of the vocabulary."""
        if len(tokens) > self.sequence_length:
            raise ValueError(
                f"{len(tokens)} tokens do not fit into a sequence of {self.sequence_length}"
            )
        if self._binding is None:
            raise ValueError("there are no features: call `start_window` first")
        return list(self._binding.run({self._embeddings.name: self._input_of(tokens)}).values())

    def _input_of(self, tokens: Sequence[int]) -> Floats:
        """Return the embeddings of all S positions, (S, d), in the shape of the program's input.

        Positions after the tokens contain token 0, plus its position embedding if the host adds these, as
        in published graphs. The causal mask hides them from the tokens before. They are not zeros: the
        layer norm of zeros divides by √ε, a factor of 316 that could widen the ranges of the calibration.
        """
        padded = [*tokens, *[PADDING] * (self.sequence_length - len(tokens))]
        rows = self._embedding[padded].astype(np.float32)
        if self._adds_positions:
            rows += self._positions[: self.sequence_length]
        return np.ascontiguousarray(rows.T).reshape(self._embeddings.shape)


def _row(pieces: Sequence[Floats], row: int) -> Floats:
    """Return the logits (V,) of one token: the pieces of the vocabulary, joined in their order."""
    return np.concatenate([piece[0, row] for piece in pieces])
