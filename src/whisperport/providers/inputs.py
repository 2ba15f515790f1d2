"""Record real inputs of a bundle's programs: those of one clip that the CPU transcribes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whisperport.bundle import Bundle
from whisperport.program.runner import Array, Runner
from whisperport.runtime import (
    DecodeOptions,
    decode_together,
    decode_window,
    load_engine,
    start_tokens,
)
from whisperport.targets import RunOptions, get_target
from whisperport.verification.bundle_check import reference_mel
from whisperport.verification.reference import Reference, ReferenceClip


@dataclass(frozen=True, slots=True)
class Recorded:
    """The inputs of the last call of a program.

    Attributes:
        inputs: name -> array.
        calls: number of calls that transcribing one window needed, without a prompt and without word
            timestamps.
    """

    inputs: Mapping[str, Array]
    calls: int


class _Recorder(Runner):
    """A runner that wraps another one, counts its calls and keeps the inputs of the last one."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.spec)
        self._runner = runner
        self.calls = 0
        self.inputs: dict[str, Array] = {}

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self.calls += 1
        names = [tensor.name for tensor in self.spec.inputs]
        # The engine reuses its arrays.
        self.inputs = {name: array.copy() for name, array in zip(names, inputs, strict=True)}
        return list(self._runner.run(self.inputs).values())


def record_inputs(bundle: Bundle, run: RunOptions) -> tuple[str, dict[str, Recorded]]:
    """Transcribe the first clip of the bundle's reference, and record the inputs of every program.

    Args:
        bundle: the bundle; a program that cannot run here is emulated where its target has an emulation.
        run: threads and trust.

    Returns:
        Name of the clip; and name of a program -> its inputs.
    """
    recorders: dict[str, _Recorder] = {}

    def wrap(runner: Runner) -> Runner:
        recorders[runner.spec.name] = _Recorder(runner)
        return recorders[runner.spec.name]

    targets = [get_target(entry.target) for entry in bundle.manifest.programs]
    engine = load_engine(bundle, run.with_emulation(targets), wrap)
    clip = _clip(Reference.from_arrays(bundle.reference()))
    decoder, generation = engine.decoder(), engine.generation
    features = engine.encode(reference_mel(engine.dims, clip))
    decoded = decode_window(decoder, features, DecodeOptions())
    calls = {name: recorder.calls for name, recorder in recorders.items()}
    if engine.batch_step is not None:
        rows = engine.batch_size
        decode_together(engine, [features] * rows, [DecodeOptions(max_tokens=2)] * rows)
    text = tuple(token for token in decoded.tokens if token < generation.end_of_text)
    decode_window(decoder, features, DecodeOptions(prompt=text or (0,), max_tokens=1))
    start = start_tokens(generation, decoded.language, "transcribe")
    decoder.align([*start, *text, generation.end_of_text])
    if uncached := engine.uncached_decoder():
        uncached.start_window(features)
        uncached.prefill(start)
    return clip.name, {
        name: Recorded(recorder.inputs, calls[name])
        for name, recorder in recorders.items()
        if recorder.calls
    }


def _clip(reference: Reference) -> ReferenceClip:
    """Return the clip with the most tokens, so that the caches are filled."""
    return max(reference.clips, key=lambda clip: len(clip.tokens))
