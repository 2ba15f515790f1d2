"""Record the inputs of one program while the engine transcribes: real features, caches and masks.

A recorder wraps the runner of each program, and copies its inputs. See `session.py` for the programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whisperport.program.generation import Generation
from whisperport.program.program_kind import ALIGN, CROSS_KV, PREFILL, UNCACHED_DECODER
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.runtime import (
    DecodeOptions,
    Decoder,
    Engine,
    decode_together,
    decode_window,
    start_tokens,
)
from whisperport.verification.recording.audio_files import Floats

CALLS = (
    4  # largest number of calls of `step` recorded per window: the calls of one window are similar
)


def samples_per_window(spec: ProgramSpec) -> int:
    """Return the largest number of calls of a program that are recorded per window."""
    many = spec.kind.runs == "token" and spec.kind.name != UNCACHED_DECODER
    return CALLS if many else 1


class Recorder(Runner):
    """Wraps a runner, and copies inputs of its calls from `start_window` to `end_window`.

    Every call of a window is recorded with the same probability.

    Attributes:
        wrapped: the runner that computes the outputs.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self.wrapped = runner
        self._max_samples = samples_per_window(runner.spec)
        self._records = False

    def start_window(self, seed: int) -> None:
        """Delete the recorded inputs, and start to record a new window."""
        self._random = np.random.default_rng(seed)
        self._calls = 0
        self._recorded: dict[int, list[Array]] = {}  # number of the call -> its inputs
        self._records = True

    def end_window(self) -> list[list[Array]]:
        """Return the recorded inputs, in the order of the calls; later calls are not recorded."""
        self._records = False
        return [self._recorded[call] for call in sorted(self._recorded)]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        if self._records:
            self._record(inputs)
            self._calls += 1
        names = [tensor.name for tensor in self.spec.inputs]
        return list(self.wrapped.run(dict(zip(names, inputs, strict=True))).values())

    def _record(self, inputs: Sequence[Array]) -> None:
        """Record a call by reservoir sampling; if only one call is recorded, record the last one."""
        if self._max_samples > 1 and self._calls >= self._max_samples:
            if self._random.integers(self._calls + 1) >= self._max_samples:
                return
            del self._recorded[self._random.choice(sorted(self._recorded))]
        elif self._max_samples == 1:
            self._recorded.clear()
        self._recorded[self._calls] = [
            array.copy() for array in inputs
        ]  # the engine reuses its arrays


def with_zero_adapter(spec: ProgramSpec, first: Array) -> list[Array]:
    """Return the inputs of a program of audio: the audio, and zeros for the matrices of an adapter."""
    return [first, *(np.zeros(tensor.shape, tensor.dtype) for tensor in spec.inputs[1:])]


@dataclass(slots=True)
class DecoderInputs:
    """Runs windows through the engine such that one of its programs is called and recorded."""

    engine: Engine
    recorder: Recorder
    windows: int = 0  # number of windows recorded
    previous: tuple[int, ...] = ()  # text tokens of the previous window

    @property
    def program(self) -> ProgramSpec:
        """The signature of the recorded program."""
        return self.recorder.spec

    def record(self, features: Floats) -> list[list[Array]]:
        """Run one window, and return the recorded inputs: features (T, d).

        Each window has a new decoder: a cache that is used again has rows of other windows after its end.
        """
        kind = self.program.kind
        if kind.name == CROSS_KV:
            return [with_zero_adapter(self.program, features[None])]
        self.recorder.start_window(self.windows)
        decoder = Decoder(self.engine)
        if kind.name == UNCACHED_DECODER:
            self._without_cache(features)
        elif kind.is_batch:
            self._together(features)
        else:
            self._decode(decoder, features)
        self.windows += 1
        return self.recorder.end_window()

    def _decode(self, decoder: Decoder, features: Floats) -> None:
        decoded = decode_window(decoder, features, DecodeOptions(prompt=self._prompt()))
        text = tuple(t for t in decoded.tokens if t < self._generation.end_of_text)
        self.previous = text or self.previous
        if self.program.kind.name == ALIGN:
            start = start_tokens(self._generation, decoded.language, "transcribe")
            decoder.align([*start, *text, self._generation.end_of_text])

    def _together(self, features: Floats) -> None:
        """Decode the window in every row of a batch, each with another part of the previous text."""
        rows = range(self.engine.batch_size)
        options = [DecodeOptions(prompt=self.previous[:row]) for row in rows]
        decoded, *_ = decode_together(self.engine, [features] * len(rows), options)
        end = self._generation.end_of_text
        self.previous = tuple(t for t in decoded.tokens if t < end) or self.previous

    def _prompt(self) -> tuple[int, ...]:
        """Return the previous text for every second window, so that both cases are recorded.

        A prefill program has a prompt in every window, or in none, according to its sequence length.
        """
        if self.program.kind.name == PREFILL:
            start = start_tokens(self._generation, self._generation.any_language, "transcribe")
            return self.previous if self.program.kind.tokens > len(start) else ()
        return self.previous if self.windows % 2 else ()

    @property
    def _generation(self) -> Generation:
        return self.engine.generation

    def _without_cache(self, features: Floats) -> None:
        """Decode greedily to the end of the text or sequence: the last call then has all tokens."""
        decoder = self.engine.uncached_decoder()
        assert decoder is not None  # its runner is the recorded one
        decoder.start_window(features)
        language = self._generation.any_language
        logits, _ = decoder.prefill(start_tokens(self._generation, language, "transcribe"))
        while len(decoder.tokens) < decoder.sequence_length:
            token = int(logits.argmax())
            if token == self._generation.end_of_text:
                return
            logits = decoder.step(token)
