"""Record what the engine gives to one program while it transcribes: real features, real caches, real masks.

The programs run on their own targets, or emulated on the CPU where a target is not here. A runner that
records stands before the program in question; the others work as always.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from whisperport.bundle import Bundle
from whisperport.calibration.recordings import Floats
from whisperport.checks import UNCACHED_DECODER
from whisperport.generation import Generation
from whisperport.runner import Array, Runner
from whisperport.runtime import (
    DecodeOptions,
    Decoder,
    decode_window,
    load_engine,
    start_tokens,
)
from whisperport.runtime.engine import PREFILL
from whisperport.runtime.uncached_decoder import UncachedDecoder
from whisperport.spec import ProgramSpec
from whisperport.targets import RunOptions, get_target
from whisperport.targets.options import with_target

CALLS = 4  # kept of a window at most: the calls of one window resemble each other


def program_inputs(
    bundle: Bundle, spec: ProgramSpec, mels: Iterable[Floats], run: RunOptions
) -> Iterator[Sequence[Array]]:
    """Inputs of a program, each in the order of `spec.inputs`; several of each window where it has them.

    Args:
        mels: (n_mels, 2T) of each window.
        run: threads, and options of the targets beside those that choose emulation.
    """
    if spec.name == "encoder":
        for mel in mels:
            yield [mel.reshape(spec.inputs[0].shape)]
        return
    recorders: list[_Recorder] = []

    def recording(runner: Runner) -> Runner:
        if runner.spec.name != spec.name:
            return runner
        recorders.append(_Recorder(runner))
        return recorders[-1]

    engine = load_engine(bundle, emulated(bundle, run), recording)
    (recorder,) = recorders
    source = _Source(engine.decoder(), spec)
    for index, mel in enumerate(mels):
        recorder.forget(index)
        source.transcribe(mel)
        yield from recorder.kept()


def samples_per_window(spec: ProgramSpec) -> int:
    """How many calls of a program are kept of a window at most."""
    return CALLS if spec.name == "step" else 1


class _Recorder(Runner):
    """Keeps inputs of the runner that it stands before: each call of a window with the same chance."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self._runner = runner
        self._room = samples_per_window(runner.spec)
        self.forget(0)

    def forget(self, seed: int) -> None:
        """A new window begins."""
        self._random = np.random.default_rng(seed)
        self._calls = 0
        self._kept: dict[int, list[Array]] = {}  # by the number of the call

    def kept(self) -> list[list[Array]]:
        """In the order of the calls."""
        return [self._kept[call] for call in sorted(self._kept)]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self._consider(inputs)
        self._calls += 1
        names = [tensor.name for tensor in self.spec.inputs]
        return list(self._runner.run(dict(zip(names, inputs, strict=True))).values())

    def _consider(self, inputs: Sequence[Array]) -> None:
        """Reservoir sampling; of a program of which one call is kept, the last."""
        if self._room > 1 and self._calls >= self._room:
            if self._random.integers(self._calls + 1) >= self._room:
                return
            del self._kept[self._random.choice(sorted(self._kept))]
        elif self._room == 1:
            self._kept.clear()
        self._kept[self._calls] = [array.copy() for array in inputs]  # the engine reuses its own


@dataclass(slots=True)
class _Source:
    """Transcribes windows so that one program of the engine is called."""

    decoder: Decoder
    program: ProgramSpec
    windows: int = 0
    previous: tuple[int, ...] = ()  # text of the window before

    def transcribe(self, mel: Floats) -> None:
        features = self.decoder.engine.encode(mel)
        if self.program.name == "cross_kv":
            self.decoder.start_window(features)
        elif self.program.name == UNCACHED_DECODER:
            self._without_cache(features)
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

    def _prompt(self) -> tuple[int, ...]:
        """The text before, as in a long recording: for every second window, so that both cases are seen.

        A prefill is called with a prompt or without one, by the number of its rows.
        """
        if self.program.name.startswith(PREFILL):
            rows = self.program.inputs[0].shape[1]
            start = start_tokens(self._generation, self._generation.any_language, "transcribe")
            return self.previous if rows > len(start) else ()
        return self.previous if self.windows % 2 else ()

    @property
    def _generation(self) -> Generation:
        return self.decoder.engine.generation

    def _without_cache(self, features: Floats) -> None:
        """Greedily, until the text ends or no row is left: the last call sees the complete transcript."""
        full = self.decoder.engine.uncached_decoder()
        assert full is not None  # its runner is the one that is recorded
        full.start_window(features)
        language = self._generation.any_language
        logits, _ = full.prefill(start_tokens(self._generation, language, "transcribe"))
        while _has_room(full):
            token = int(logits.argmax())
            if token == self._generation.end_of_text:
                return
            logits = full.step(token)


def _has_room(full: UncachedDecoder) -> bool:
    return len(full.tokens) < full.sequence_length


def emulated(bundle: Bundle, run: RunOptions) -> RunOptions:
    """The same options, with emulation of every target that can be emulated on the CPU."""
    emulation: dict[str, str] = {}
    for entry in bundle.manifest.programs:
        emulation |= with_target(get_target(entry.target).spec.emulation, entry.target)
    return replace(run, options={**emulation, **run.options})
