"""The state of one call: the audio that is decoded, and the tokens decoded so far."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from whisperport.runner import Array, Binding, Runner
from whisperport.runtime.cache import Cache, Floats
from whisperport.runtime.finite import check_embedded, check_outputs

if TYPE_CHECKING:
    from whisperport.runtime.engine import Engine


class Decoder:
    """Decodes one window after another with an engine's programs, and holds the state between them.

    Use: `start_window` to a window's features, then `prefill` the prompt, then `step` token by token. The next
    `start_window` forgets everything. A decoder belongs to one call and is used by one thread at a time; any
    number of decoders share one engine. Its memory is 8·L·d·(N + T) bytes: keys and values in float32 of
    N tokens and of T positions of audio, in L layers of width d; in float16 half of that.

    Attributes:
        engine: its programs and tables, which it does not change.
        cache: the tokens decoded so far.
    """

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.cache = Cache(engine.dims, engine.cache_form)
        self._audio: dict[str, Array] = {}  # the cross-attention's keys and values of the window

    def start_window(self, features: Floats) -> None:
        """Decode features (T, d) from now on, and forget every token.

        Raises:
            NumericalError: `cross_kv` returned a NaN or an infinity.
        """
        self._audio = {}  # not in memory twice: half a gigabyte of large-v3
        self.cache.bindings.clear()
        self._audio = self.engine.cross_kv.run({"features": np.ascontiguousarray(features[None])})
        check_outputs("cross_kv", self._audio)
        self.cache.clear()

    def prefill(
        self, tokens: Sequence[int], *, second_index: int = 0, cache: Cache | None = None
    ) -> tuple[Floats, Floats]:
        """Decode a prompt of several tokens.

        Args:
            tokens: ids; together with those before they fit the cache.
            second_index: index of a second token whose logits are wanted.
            cache: the tokens before, to which these are added; None: the decoder's own.

        Returns:
            Logits (V,) after the last token, and logits (V,) after token `second_index`.

        Raises:
            ValueError: no tokens, or more than the cache has room for.
            NumericalError: a program returned a NaN or an infinity.
        """
        if not 0 <= second_index < len(tokens):
            raise ValueError(
                f"`second_index` is {second_index}; the prompt has {len(tokens)} tokens"
            )
        cache = cache or self.cache
        done, second = 0, None
        last: Floats
        while done < len(tokens):
            runner, rows = self.engine.prefill_for(len(tokens) - done)
            count = min(rows, len(tokens) - done)
            wanted = second_index - done if 0 <= second_index - done < count else 0
            piece = tokens[done : done + count]
            if len(piece) == 1:  # a step is half of the smallest prefill
                last = self.step(piece[0], cache)
                picked = last.copy()
            else:
                last, picked = self._prefill_piece(runner, rows, piece, wanted, cache)
            if 0 <= second_index - done < count:
                second = picked
            done += count
        assert second is not None
        return last, second

    def step(self, token: int, cache: Cache | None = None) -> Floats:
        """Decode one token after those of `cache` (None: the decoder's own), and add it to them.

        Returns logits (V,), which the caller may change.

        Raises:
            ValueError: the cache is full.
            NumericalError: the program returned a NaN or an infinity.
        """
        cache = cache or self.cache
        inputs: dict[str, Array] = {"x": self._rows([token], cache), "mask": cache.mask(1)}
        outputs = self._run(self.engine.step, inputs, cache, ("logits",))
        cache.store(outputs, 1)
        logits: Floats = outputs["logits"][0]
        return logits

    def align(self, tokens: Sequence[int]) -> tuple[Floats, Floats]:
        """Read tokens from the first on, and see to which audio the alignment heads attend.

        Forgets what was decoded of this window; the audio stays.

        Returns:
            Scores (A, S, T) before the softmax, and rows (S, d) that the embedding turns into logits.

        Raises:
            ValueError: no tokens, or more than the cache has room for.
            NumericalError: the program returned a NaN or an infinity.
        """
        if not tokens:
            raise ValueError("no tokens to align")
        self.cache.clear()
        runner = self.engine.align
        size = runner.spec.inputs[0].shape[1]
        scores, rows = [], []
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            x = self._padded(piece, size, self.cache)
            inputs: dict[str, Array] = {"x": x, "mask": self.cache.mask(size)}
            outputs = self._run(runner, inputs, self.cache, ("scores", "rows"))
            self.cache.store(outputs, len(piece))
            scores.append(outputs["scores"][:, : len(piece)])
            rows.append(outputs["rows"][0, : len(piece)])
        return np.concatenate(scores, axis=1), np.concatenate(rows)

    def _prefill_piece(
        self, runner: Runner, rows: int, tokens: Sequence[int], wanted: int, cache: Cache
    ) -> tuple[Floats, Floats]:
        x = self._padded(tokens, rows, cache)
        pick = np.zeros((1, 2, rows), np.float32)
        pick[0, 0, len(tokens) - 1] = pick[0, 1, wanted] = 1
        inputs: dict[str, Array] = {"x": x, "mask": cache.mask(rows), "pick": pick}
        outputs = self._run(runner, inputs, cache, ("logits",))
        cache.store(outputs, len(tokens))
        return outputs["logits"][0], outputs["logits"][1]

    def _run(
        self, runner: Runner, inputs: dict[str, Array], cache: Cache, checked: tuple[str, ...]
    ) -> dict[str, Array]:
        """Run over the cache and the audio; the outputs named in `checked` must be finite."""
        binding = cache.bindings.get(runner) or self._bound(runner, cache)
        outputs = binding.run(inputs)
        check_outputs(runner.spec.name, {name: outputs[name] for name in checked})
        return outputs

    def _bound(self, runner: Runner, cache: Cache) -> Binding:
        """Bind a program to the window's audio and to a cache: done once per window, at its first run."""
        binding = cache.bindings[runner] = runner.binding()
        for name, array in {**self._audio, **cache.arrays}.items():
            binding.bind(name, array)
        return binding

    def _padded(self, tokens: Sequence[int], rows: int, cache: Cache) -> Floats:
        """As `_rows`, followed by zeros: (1, rows, d)."""
        x = np.zeros((1, rows, self.engine.dims.n_text_state), np.float32)
        x[:, : len(tokens)] = self._rows(tokens, cache)
        return x

    def _rows(self, tokens: Sequence[int], cache: Cache) -> Floats:
        """Embedding plus position of the next tokens: (1, P, d) float32."""
        start = cache.length
        if start + len(tokens) > cache.rows:
            raise ValueError(f"{start + len(tokens)} tokens do not fit {cache.rows} positions")
        rows = self.engine.embed_tokens(tokens, start)
        check_embedded(rows)
        return rows[None]
