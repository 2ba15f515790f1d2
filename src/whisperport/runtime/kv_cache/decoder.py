"""The state of one call: the cross-attention K/V of the window's audio, and the tokens decoded so far."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import ref

import numpy as np

from whisperport.program.runner import Array, Binding, Runner
from whisperport.program.signatures import LOGSUMEXP
from whisperport.runtime.engine.engine import Engine
from whisperport.runtime.engine.finite import (
    check_embedded,
    check_logits,
    check_output,
    check_outputs,
)
from whisperport.runtime.engine.scores import Floats
from whisperport.runtime.kv_cache.cache import Cache
from whisperport.runtime.kv_cache.stepping import Scored, Step, score_from
from whisperport.system.memory import Memory, room


class Decoder:
    """Decodes window after window with an engine's programs, and holds the state between runs.

    Call `start_window` with a window's features, `prefill` with the prompt, then `step` for each token. The
    next `start_window` resets the state. Use a decoder in one call and one thread at a time. Any number
    of decoders share one engine. A decoder needs up to 8·L·d·(N + T) bytes: float32 keys and values of N
    tokens and of T positions of audio, in L layers of width d. In float16 it needs half of that.

    Attributes:
        engine: the programs and tables, which the decoder does not change.
        cache: the tokens decoded so far.
    """

    def __init__(self, engine: Engine, cache: Cache | None = None) -> None:
        """
        Args:
            engine: the programs and tables.
            cache: the cache to use, empty; None: a new one.
        """
        self.engine = engine
        self.cache = cache or Cache(
            engine.dims, engine.cache_form, engine.mask_of(engine.step), grows=engine.short_caches
        )
        self._cross_kv: dict[str, Array] = {}  # of the window's audio
        self._features: ref[Floats] | None = None  # of which they were computed
        self._rows_used = engine.dims.n_audio_ctx  # rows of them that may be other than silence
        self._x = np.zeros((1, 1, engine.dims.n_text_state), np.float32)  # input of `step`

    def use(self, engine: Engine) -> None:
        """Decode the next windows with another adapter, or with none.

        Args:
            engine: of the same bundle; see `Engine.adapted`.
        """
        if engine is not self.engine:
            self.engine, self._features = engine, None

    def start_window(self, features: Floats) -> None:
        """Begin a window: compute its cross-attention K/V, and remove all tokens.

        Silence follows a window that is shorter than the checkpoint's. Its rows are computed only where
        the windows before have left other ones. For the features of the window before, as at a higher
        temperature or after the detection of the language, only the tokens are removed.

        Args:
            features: (T, d) float32, the encoder's output, which nobody changes.

        Raises:
            NumericalError: `cross_kv` returned a NaN or an infinity.
        """
        if self._features and self._features() is features:
            self.cache.clear()
            return
        self.cache.bindings.clear()
        self._features, unpadded = None, ref(features)
        runner, length = self.engine.cross_kv, len(features)
        rows = max(length, self._rows_used)
        if rows > length:
            features = np.concatenate([features, self.engine.silence[length:rows]])
        inputs = {"features": np.ascontiguousarray(features[None])}
        self._rows_used = rows  # even if an error ends the run
        if rows < self.engine.dims.n_audio_ctx:
            self._replace_rows(runner.run(inputs))
        elif runner.writes_in_place:
            self._cross_kv = self._cross_kv or self._audio_arrays()
            runner.run_into(inputs, self._cross_kv)
            self._audio_written()
        else:
            self._cross_kv = {}  # frees memory first: 0.5 GB for large-v3
            self._cross_kv = self._kept(runner.run(inputs))
        if rows == self.engine.dims.n_audio_ctx:
            check_outputs("cross_kv", self._cross_kv)
        self._rows_used = length
        # Other objects for each window, also on the same memory: a device keeps the audio of an array that
        # it knows, as long as a binding of the window before exists.
        self._cross_kv = {name: array.view() for name, array in self._cross_kv.items()}
        self._features = unpadded
        self.cache.clear()

    def prefill(
        self, tokens: Sequence[int], *, second_index: int = 0, cache: Cache | None = None
    ) -> tuple[Floats, Floats]:
        """Decode a prompt of several tokens.

        Args:
            tokens: ids; the cache must have room for them.
            second_index: index in `tokens` of a second token whose logits are returned.
            cache: the tokens before the prompt, to which the prompt is appended; None: the decoder's cache.

        Returns:
            Logits (V,) after the last token, and logits (V,) after token `second_index`.

        Raises:
            ValueError: `tokens` is empty or longer than the room in the cache, or `second_index` is not an
                index of it.
            NumericalError: a program returned a NaN or an infinity.
        """
        if not 0 <= second_index < len(tokens):
            raise ValueError(
                f"`second_index` is {second_index}; the prompt has {len(tokens)} tokens"
            )
        cache = cache or self.cache
        position, second = 0, None
        last: Floats
        while position < len(tokens):
            runner, rows = self.engine.prefill_for(len(tokens) - position)
            count = min(rows, len(tokens) - position)
            picked_index = second_index - position if 0 <= second_index - position < count else 0
            piece = tokens[position : position + count]
            if len(piece) == 1:  # a step costs half of the smallest prefill
                last = picked = self.step(piece[0], cache)
            else:
                last, picked = self._prefill_piece(runner, rows, piece, picked_index, cache)
            if 0 <= second_index - position < count:
                second = picked.copy()
            position += count
        assert second is not None
        return last.copy(), second

    def step(self, token: int, cache: Cache | None = None) -> Floats:
        """Decode one token after those in a cache, and append it to them.

        Args:
            token: id.
            cache: the tokens before; None: the decoder's cache.

        Returns:
            Logits (V,), which the caller may change.

        Raises:
            ValueError: the cache is full.
            NumericalError: the program returned a NaN or an infinity.
        """
        logits: Floats = self.engine.logits_from(self._step(token, cache or self.cache))[0]
        return logits.copy()

    def score(self, step: Step) -> Scored:
        """Decode one token after those in a cache, append it to them, and return the logits after it.

        The next token in the same cache may overwrite them.

        Raises:
            ValueError, NumericalError: as for `step`.
        """
        outputs = self._step(step.token, step.cache)
        return score_from(self.engine, outputs, 0, step)

    def step_all(self, steps: Sequence[Step]) -> Sequence[Scored]:
        """Decode one token after those in each of several caches, as `score` does."""
        return [self.score(step) for step in steps]

    @property
    def joined_prompt(self) -> int:
        """Prompts of at most so many tokens are decoded by steps, which join those of other texts."""
        return 0

    @contextmanager
    def copies(self) -> Iterator[Callable[[], Cache]]:
        """Lend copies of the decoder's cache: one for each call, until the block ends."""
        yield self.cache.copy

    def align(self, tokens: Sequence[int]) -> tuple[Floats, Floats]:
        """Run the `align` program over all tokens of a window, from the first on.

        The tokens in the decoder's cache are replaced. The audio of the window is kept.

        Args:
            tokens: S ids, the start tokens included.

        Returns:
            Attention scores (A, S, T) of the alignment heads before the softmax, and hidden states (S, d),
            which `Engine.logits_of` turns into logits.

        Raises:
            ValueError: `tokens` is empty or longer than the cache.
            NumericalError: the program returned a NaN or an infinity.
        """
        if not tokens:
            raise ValueError("no tokens to align")
        self.cache.clear()
        runner = self.engine.align
        size, masked = runner.spec.inputs[0].shape[1], self.engine.mask_of(runner)
        scores, rows = [], []
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            self.cache.reserve(start + len(piece))
            x = self._padded(piece, size, self.cache)
            inputs: dict[str, Array] = {"x": x, "mask": self.cache.mask(size, masked)}
            outputs = self._run(runner, inputs, self.cache, ("scores", "rows"))
            self.cache.store(outputs, len(piece))
            scores.append(outputs["scores"][:, : len(piece)].copy())
            rows.append(outputs["rows"][0, : len(piece)].copy())
        return np.concatenate(scores, axis=1), np.concatenate(rows)

    def _step(self, token: int, cache: Cache) -> Mapping[str, Array]:
        """Run `step` on one token, and append it to those in a cache."""
        cache.reserve(cache.length + 1)
        self.embed(token, cache, self._x[0, 0])
        inputs: dict[str, Array] = {"x": self._x, "mask": cache.step_mask}
        outputs = self._run(self.engine.step, inputs, cache)
        cache.store(outputs, 1)
        return outputs

    def _prefill_piece(
        self, runner: Runner, rows: int, tokens: Sequence[int], picked_index: int, cache: Cache
    ) -> tuple[Floats, Floats]:
        """Run one prefill program: logits (V,) after the last of `tokens`, and after `picked_index`."""
        cache.reserve(cache.length + len(tokens))
        x = self._padded(tokens, rows, cache)
        pick = np.zeros((1, 2, rows), np.float32)
        pick[0, 0, len(tokens) - 1] = pick[0, 1, picked_index] = 1
        mask = cache.mask(rows, self.engine.mask_of(runner))
        inputs: dict[str, Array] = {"x": x, "mask": mask, "pick": pick}
        outputs = self._run(runner, inputs, cache)
        cache.store(outputs, len(tokens))
        logits = self.engine.logits_from(outputs)
        return logits[0], logits[1]

    def _run(
        self,
        runner: Runner,
        inputs: dict[str, Array],
        cache: Cache,
        checked: tuple[str, ...] = ("hidden",),
    ) -> Mapping[str, Array]:
        """Run a program on a cache and the window's audio, and check that outputs are finite.

        Args:
            inputs: the inputs beside the cache and the cross-attention K/V, by name.
            checked: names of the outputs to check beside the logits, if the program has them.
        """
        binding = cache.bindings.get(runner) or self._bound(runner, cache)
        outputs, program = binding.run(inputs), runner.spec.name
        for name in checked:
            if name in outputs:
                check_output(program, name, outputs[name])
        if "logits" in outputs:
            check_logits(program, outputs["logits"], outputs.get(LOGSUMEXP))
        return outputs

    def _replace_rows(self, first: Mapping[str, Array]) -> None:
        """Write the first rows of the cross-attention K/V, and keep those after them."""
        check_outputs("cross_kv", first)
        for name, array in first.items():
            written = tuple(map(slice, array.shape))
            self._cross_kv[name][written] = array
        self._audio_written()

    def _audio_arrays(self) -> dict[str, Array]:
        """Return arrays for the cross-attention K/V of a window, which later windows use again."""
        tensors = self.engine.cross_kv.spec.outputs
        memory = Memory(sum(room(t.shape, t.dtype) for t in tensors))
        return {t.name: memory.array(t.shape, t.dtype) for t in tensors}

    def _audio_written(self) -> None:
        """Called when a window's cross-attention K/V were written to the arrays for them."""

    def _kept(self, cross_kv: dict[str, Array]) -> dict[str, Array]:
        """Return the arrays in which a window's cross-attention K/V are kept."""
        return cross_kv

    def _bound(self, runner: Runner, cache: Cache) -> Binding:
        """Bind a program to the cross-attention K/V and to a cache, at its first run in each window."""
        binding = cache.bindings[runner] = runner.binding()
        for name, array in {**self._cross_kv, **cache.arrays}.items():
            binding.bind(name, array)
        return binding

    def _padded(self, tokens: Sequence[int], rows: int, cache: Cache) -> Floats:
        """Return the tokens' inputs as `embedded` does, padded with zeros to (1, rows, d)."""
        x = np.zeros((1, rows, self.engine.dims.n_text_state), np.float32)
        embedded = self.engine.embed_tokens(tokens, cache.length)
        check_embedded(embedded)
        x[0, : len(tokens)] = embedded
        return x

    def embed(self, token: int, cache: Cache, row: Floats) -> None:
        """Write embedding plus position of the token that follows those in a cache to `row`, (d,) float32.

        Raises:
            NumericalError: the bundle's tables contain a NaN or an infinity.
        """
        self.engine.embed_token(token, cache.length, row)
        check_embedded(row)
