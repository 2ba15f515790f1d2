"""Record the inputs of one program while the engine transcribes: real features, caches and masks.

The programs run on their targets, or are emulated on the CPU. A recorder wraps the runner of the program
and copies its inputs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whisperport.bundle import Bundle
from whisperport.calibration.audio_files import Floats
from whisperport.checks import UNCACHED_DECODER, VOCAB_PROJECTION, batch_rows
from whisperport.generation import Generation
from whisperport.runner import Array, Runner
from whisperport.runtime import (
    DecodeOptions,
    Decoder,
    decode_together,
    decode_window,
    load_engine,
    start_tokens,
)
from whisperport.runtime.engine import PREFILL
from whisperport.runtime.uncached_decoder import UncachedDecoder
from whisperport.spec import ProgramSpec
from whisperport.targets import RunOptions, get_target
from whisperport.targets.options import with_target

CALLS = (
    4  # largest number of calls of `step` recorded per window: the calls of one window are similar
)


def program_inputs(
    bundle: Bundle, spec: ProgramSpec, mels: Iterable[Floats], run: RunOptions
) -> Iterator[Sequence[Array]]:
    """Yield samples of a program's inputs, each a sequence of arrays in the order of `spec.inputs`.

    A window gives up to `CALLS` samples of `step`, `step_B` and `vocab_projection`, and one of any other
    program.

    Args:
        bundle: the bundle whose programs transcribe.
        spec: the program to record.
        mels: the spectrogram of each window, (n_mels, 2T) float32.
        run: threads and target options; emulation on the CPU is added where a target has it.
    """
    if spec.name == "encoder":
        for mel in mels:
            yield [mel.reshape(spec.inputs[0].shape)]
        return
    recorders: list[_Recorder] = []

    def wrap_runner(runner: Runner) -> Runner:
        if runner.spec.name != spec.name:
            return runner
        recorders.append(_Recorder(runner))
        return recorders[-1]

    engine = load_engine(bundle, with_emulation(bundle, run), wrap_runner)
    (recorder,) = recorders
    source = _Source(engine.decoder(), spec)
    for index, mel in enumerate(mels):
        recorder.start_window(index)
        source.transcribe(mel)
        yield from recorder.samples()


def samples_per_window(spec: ProgramSpec) -> int:
    """Return the largest number of calls of a program that are recorded per window."""
    many = spec.name in ("step", VOCAB_PROJECTION) or batch_rows(spec.name)
    return CALLS if many else 1


class _Recorder(Runner):
    """A runner that wraps another one and records inputs of its calls.

    Every call of a window is recorded with the same probability.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self._runner = runner
        self._max_samples = samples_per_window(runner.spec)
        self.start_window(0)

    def start_window(self, seed: int) -> None:
        """Delete the recorded inputs, and start to record a new window."""
        self._random = np.random.default_rng(seed)
        self._calls = 0
        self._recorded: dict[int, list[Array]] = {}  # number of the call -> its inputs

    def samples(self) -> list[list[Array]]:
        """Return the recorded inputs, in the order of the calls."""
        return [self._recorded[call] for call in sorted(self._recorded)]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self._record(inputs)
        self._calls += 1
        names = [tensor.name for tensor in self.spec.inputs]
        return list(self._runner.run(dict(zip(names, inputs, strict=True))).values())

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


@dataclass(slots=True)
class _Source:
    """Runs windows through the engine such that one of its programs is called."""

    decoder: Decoder
    program: ProgramSpec
    windows: int = 0  # number of windows decoded
    previous: tuple[int, ...] = ()  # text tokens of the previous window

    def transcribe(self, mel: Floats) -> None:
        """Run one window: mel (n_mels, 2T)."""
        features = self.decoder.engine.encode(mel)
        if self.program.name == "cross_kv":
            self.decoder.start_window(features)
        elif self.program.name == UNCACHED_DECODER:
            self._without_cache(features)
        elif batch_rows(self.program.name):
            self._together(features)
        else:
            self._decode(features)

    def _decode(self, features: Floats) -> None:
        decoded = decode_window(self.decoder, features, DecodeOptions(prompt=self._prompt()))
        text = tuple(t for t in decoded.tokens if t < self._generation.end_of_text)
        self.windows += 1
        self.previous = text or self.previous
        if self.program.name == "align":
            start = start_tokens(self._generation, decoded.language, "transcribe")
            self.decoder.align([*start, *text, self._generation.end_of_text])

    def _together(self, features: Floats) -> None:
        """Decode the window in every row of a batch, each with another part of the previous text."""
        rows = range(self.decoder.engine.batch_size)
        options = [DecodeOptions(prompt=self.previous[:row]) for row in rows]
        decoded, *_ = decode_together(self.decoder.engine, [features] * len(rows), options)
        end = self._generation.end_of_text
        self.previous = tuple(t for t in decoded.tokens if t < end) or self.previous

    def _prompt(self) -> tuple[int, ...]:
        """Return the previous text for every second window, so that both cases are recorded.

        A prefill program has a prompt in every window, or in none, according to its sequence length.
        """
        if self.program.name.startswith(PREFILL):
            length = self.program.inputs[0].shape[-2]
            start = start_tokens(self._generation, self._generation.any_language, "transcribe")
            return self.previous if length > len(start) else ()
        return self.previous if self.windows % 2 else ()

    @property
    def _generation(self) -> Generation:
        return self.decoder.engine.generation

    def _without_cache(self, features: Floats) -> None:
        """Decode greedily to the end of the text or sequence: the last call then has all tokens."""
        decoder = self.decoder.engine.uncached_decoder()
        assert decoder is not None  # its runner is the recorded one
        decoder.start_window(features)
        language = self._generation.any_language
        logits, _ = decoder.prefill(start_tokens(self._generation, language, "transcribe"))
        while _has_room(decoder):
            token = int(logits.argmax())
            if token == self._generation.end_of_text:
                return
            logits = decoder.step(token)


def _has_room(decoder: UncachedDecoder) -> bool:
    return len(decoder.tokens) < decoder.sequence_length


def with_emulation(bundle: Bundle, run: RunOptions) -> RunOptions:
    """Return the options with emulation on the CPU for every target that has it."""
    emulation: dict[str, str] = {}
    for entry in bundle.manifest.programs:
        emulation |= with_target(get_target(entry.target).spec.emulation, entry.target)
    return replace(run, options={**emulation, **run.options})
