"""Decode a token of each of several texts in one run of `step_B`, which reads the weights once for all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import numpy as np

from whisperport.errors import NumericalError
from whisperport.program.runner import Array, Part
from whisperport.program.signatures import LOGSUMEXP
from whisperport.program.spec import TensorSpec
from whisperport.runtime.engine.engine import Engine
from whisperport.runtime.engine.finite import check_logits
from whisperport.runtime.kv_cache.cache import Cache, room_for
from whisperport.runtime.kv_cache.decoder import Decoder
from whisperport.runtime.kv_cache.stepping import Scored, Step, score_from

# Tokens of a prompt: in a full batch of 8 of the embedded model, its share of so many runs of `step_8` is
# 2.3 ms, and a run of `prefill_4` takes 4.1 ms.
LONGEST_JOINED = 4


class Batch:
    """B rows, each with the cache and the audio of one text, in arrays that the program `step_B` reads.

    A row is taken, used for any number of windows, and released. Each row is at its own position. Use a
    batch in one thread at a time.

    Attributes:
        size: B.
        expected: number of decodings that use its rows, or will as soon as rows are free.
        arrays: `self_k_i`, `self_v_i`, `cross_k_i`, `cross_v_i` with the B·H heads of all rows in their
            first axis, and `mask` (B, 1, N + 1). `reserve` replaces those of tokens.
        binding: of the program to the keys and values. It is notified of every change.
    """

    def __init__(self, engine: Engine, fewest: int | None = None) -> None:
        """
        Args:
            engine: with a program `step_B`.
            fewest: number of rows from which on `step_B` decodes them, not `step`. None: about the number
                of rows from which on that is faster.

        Raises:
            ValueError: the engine has no such program.
        """
        runner = engine.batch_step
        if runner is None:
            raise ValueError(
                "the bundle has no program `step_B`, which decodes several texts together"
            )
        self.engine, self._name = engine, runner.spec.name
        self.size = runner.spec.kind.batch
        self.expected = 0
        self._limit = engine.dims.n_text_ctx
        self._room = room_for(0, self._limit) if engine.short_caches else self._limit
        self.binding = runner.binding()
        self.arrays = self._new_arrays(runner.spec.inputs)
        self._x = np.zeros((self.size, 1, engine.dims.n_text_state), np.float32)
        self._bind(self.arrays)
        self._free = [Row(self, index) for index in range(self.size)]
        # Weak: rows refer to their batch, and a cycle would keep its arrays until a garbage collection.
        self._rows = WeakSet(self._free)
        # Measured on a CPU: `step_8` takes as long as 2.4 to 3.4 runs of `step`; 4.6 runs with 8-bit
        # logits, which only `step` uses.
        self._fewest = fewest or max(2, self.size // (2 if engine.coarse else 3) + 1)

    @property
    def is_crowded(self) -> bool:
        """Whether enough decodings are expected for `step_B` to decode them."""
        return self.expected >= self._fewest

    def take(self) -> "Row | None":
        """Return a row that nobody uses; None if there is none."""
        return self._free.pop() if self._free else None

    def release(self, row: "Row") -> None:
        """Give back a row that was taken."""
        row.bindings.clear()
        row.clear()
        self._free.append(row)

    def decoder(self) -> "BatchDecoder | None":
        """Return a decoder with a row of this batch; None if no row is free."""
        row = self.take()
        return None if row is None else BatchDecoder(self, row)

    def step_all(self, steps: Sequence[tuple[Decoder, Step]]) -> list[Scored | NumericalError]:
        """Decode one token after those in each cache, in one run of the program where that is faster.

        Args:
            steps: each with the decoder whose audio it reads. Caches that are no rows of this batch are
                decoded singly, and so are rows if they are few, and those with another adapter.

        Returns:
            For each step, the logits after it; or the error, if they contain a NaN or an infinity. The
            next call may overwrite them.

        Raises:
            ValueError: a cache is full.
        """
        rows = {
            i: (step.cache, step)
            for i, (decoder, step) in enumerate(steps)
            if isinstance(step.cache, Row) and decoder.engine is self.engine
        }
        if len(rows) < self._fewest:
            rows = {}
        scores: dict[int, Scored | NumericalError] = {}
        for index, (decoder, step) in enumerate(steps):
            if index not in rows:
                scores[index] = single_step(decoder, step)
            else:
                step.cache.reserve(step.cache.length + 1)
                decoder.embed(step.token, step.cache, self._x[rows[index][0].index, 0])
        if rows:
            scores |= zip(rows, self._run(list(rows.values())), strict=True)
        return [scores[index] for index in range(len(steps))]

    def reserve(self, count: int) -> None:
        """Make room for `count` tokens in each row, or for the longest row; what is stored stays."""
        longest = max(count, *(row.length for row in self._rows))
        room = room_for(longest, self._limit) if self.engine.short_caches else self._limit
        if room != self._room:
            self._resize(room)

    def _resize(self, room: int) -> None:
        """Replace the caches of all rows by longer or shorter ones with the same tokens."""
        before, self._room = self.arrays, room
        runner = self.binding.runner
        new = self._new_arrays([t for t in runner.spec.inputs if t.name in runner.free_axes])
        for name in new.keys() - {"mask"}:
            axis = runner.free_axes[name]
            count = min(new[name].shape[axis], before[name].shape[axis])
            kept = (slice(None),) * axis + (slice(count),)
            new[name][kept] = before[name][kept]
        self.arrays = before | new
        self._bind(new)
        for row in self._rows:
            row.use(row.part_of(new))

    def _new_arrays(self, tensors: Sequence[TensorSpec]) -> dict[str, Array]:
        """Return zero-filled arrays for some inputs of the program, with room for the current number."""

        def shape(tensor: TensorSpec) -> tuple[int, ...]:
            axis = self.binding.runner.free_axes.get(tensor.name)
            spare = self._limit - self._room
            return tuple(size - spare * (i == axis) for i, size in enumerate(tensor.shape))

        return {t.name: np.zeros(shape(t), t.dtype) for t in tensors if t.name != "x"}

    def _bind(self, arrays: Mapping[str, Array]) -> None:
        for name, array in arrays.items():
            if name != "mask":
                self.binding.bind(name, array)

    def _run(self, rows: Sequence[tuple["Row", Step]]) -> Iterator[Scored | NumericalError]:
        """Run the program, append the new token of each row, and yield the logits after it."""
        outputs = self.binding.run({"x": self._x, "mask": self.arrays["mask"]})
        sums = outputs.get(LOGSUMEXP)
        for row, step in rows:
            try:
                own = score_from(self.engine, outputs, row.index, step)
                if step.scored:
                    check_logits(self._name, own.logits, None if sums is None else sums[row.index])
            except NumericalError as error:
                yield error
                continue
            row.store(row.part_of(outputs), 1)
            yield own


class Row(Cache):
    """The cache of one row of a batch: views of the batch's arrays.

    Attributes:
        index: 0 to B - 1.
        audio: `cross_k_i` and `cross_v_i` of the row's window.
    """

    def __init__(self, batch: Batch, index: int) -> None:
        engine = batch.engine
        self.batch, self.index = batch, index
        views = self.part_of(batch.arrays)
        self.audio = {name: view for name, view in views.items() if name.startswith("cross")}
        own = {name: view for name, view in views.items() if name not in self.audio}
        super().__init__(engine.dims, engine.cache_form, engine.step_mask, own)

    def part_of(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the row's part of arrays of the whole batch."""
        return {name: array[self._slice(array)] for name, array in arrays.items()}

    def start_window(self, cross_kv: Mapping[str, Array]) -> None:
        """Copy the cross-attention K/V of a window, and remove all tokens.

        Args:
            cross_kv: `cross_k_i` and `cross_v_i` for each decoder layer i, of one window.
        """
        for name, view in self.audio.items():
            view[...] = cross_kv[name]
        self.audio_written()

    def audio_written(self) -> None:
        """Report that `audio` has the cross-attention K/V of another window, and remove all tokens."""
        self.bindings.clear()  # of programs that were told that the audio does not change
        for name in self.audio:
            self.batch.binding.changed(name, (self._slice(self.batch.arrays[name]),))
        self.clear()
        self.batch.reserve(0)

    def reserve(self, count: int) -> None:
        if self.rows < count <= self.limit:
            self.batch.reserve(count)
        super().reserve(count)

    @property
    def is_copied(self) -> bool:
        return self.batch.binding.copies or super().is_copied

    def notify(self, name: str, part: Part) -> None:
        super().notify(name, part)
        self.batch.binding.changed(name, (self._slice(self.batch.arrays[name]), *part[1:]))

    def _slice(self, array: Array) -> slice:
        """Return the row's part of the first axis of an array of the whole batch."""
        count = len(array) // self.batch.size
        return slice(self.index * count, (self.index + 1) * count)


class BatchDecoder(Decoder):
    """A decoder whose cache is a row of a batch. Further beams and samples use further rows, if free."""

    def __init__(self, batch: Batch, row: Row) -> None:
        super().__init__(batch.engine, row)
        self.batch, self._row = batch, row

    @property
    def joined_prompt(self) -> int:
        joins = self.batch.is_crowded and self.engine is self.batch.engine
        return LONGEST_JOINED if joins else 0

    def step_all(self, steps: Sequence[Step]) -> Sequence[Scored]:
        scores: list[Scored] = []
        for scored in self.batch.step_all([(self, step) for step in steps]):
            if isinstance(scored, NumericalError):
                raise scored
            scores.append(scored)
        return scores

    @contextmanager
    def copies(self) -> Iterator[Callable[[], Cache]]:
        rows: list[Row] = []

        def copy() -> Cache:
            row = self.batch.take()
            if row is None:
                return self._row.copy()
            rows.append(row)
            row.start_window(self._row.audio)
            row.copy_of(self._row)
            return row

        try:
            yield copy
        finally:
            for row in rows:
                self.batch.release(row)

    def _audio_arrays(self) -> dict[str, Array]:
        return self._row.audio

    def _audio_written(self) -> None:
        self._row.audio_written()

    def _kept(self, cross_kv: dict[str, Array]) -> dict[str, Array]:
        self._row.start_window(cross_kv)
        return self._row.audio


def single_step(decoder: Decoder, step: Step) -> Scored | NumericalError:
    """Decode one token with `step`: the logits after it, or the error if they are not finite."""
    try:
        return decoder.score(step)
    except NumericalError as error:
        return error
