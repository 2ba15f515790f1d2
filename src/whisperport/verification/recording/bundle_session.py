"""A bundle that is open for calibration and compilation. Its programs are loaded once, at their first use.

The programs run on their targets, or are emulated on the CPU where a target has an emulation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import ENCODER
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.runtime import Engine, load_engine
from whisperport.targets import RunOptions, get_target
from whisperport.verification.recording.audio_files import Floats
from whisperport.verification.recording.inputs import DecoderInputs, Recorder, with_zero_adapter
from whisperport.verification.reference import Reference


class BundleSession:
    """The programs and the reference of a bundle, each loaded at its first use. For one thread.

    Attributes:
        bundle: the bundle.
        run: threads, trust and target options; emulation on the CPU is added where a target has it.
    """

    def __init__(self, bundle: Bundle, run: RunOptions) -> None:
        self.bundle, self.run = bundle, run
        self._recorders: dict[str, Recorder] = {}
        self._encoded: tuple[Floats, Floats] | None = None  # the last spectrogram, and its features

    @cached_property
    def reference(self) -> Reference:
        """The bundle's reference."""
        return Reference.from_arrays(self.bundle.reference())

    @cached_property
    def engine(self) -> Engine:
        """All programs; a recorder wraps each."""
        targets = [get_target(entry.target) for entry in self.bundle.manifest.programs]
        run = self.run.with_emulation(targets)
        if self.bundle.manifest.lengths:
            run = replace(run, short_windows=True)
        return load_engine(self.bundle, run, self._wrapped)

    @property
    def runners(self) -> Mapping[str, Runner]:
        """Program name -> its runner, without the recorder."""
        assert self.engine  # loads the runners
        return {name: recorder.wrapped for name, recorder in self._recorders.items()}

    def inputs(self, spec: ProgramSpec, mels: Iterable[Floats]) -> Iterator[Sequence[Array]]:
        """Yield samples of a program's inputs, each a sequence of arrays in the order of `spec.inputs`.

        A window gives up to `CALLS` samples of `step`, `step_B` and `vocab_projection`, and one of any
        other program.

        Args:
            spec: the program to record.
            mels: the spectrogram of each window, (n_mels, 2T) float32.
        """
        inputs = ProgramInputs(self, spec)
        for mel in mels:
            yield from inputs.record(mel)

    def encode(self, mel: Floats) -> Floats:
        """Return the features (T, d) of a spectrogram (n_mels, 2T); those of the last one are kept."""
        if self._encoded is None or self._encoded[0] is not mel:
            self._encoded = mel, self.engine.encode(mel)
        return self._encoded[1]

    def recorder(self, program: str) -> Recorder:
        """Return the recorder of a program."""
        assert self.engine  # loads the runners
        return self._recorders[program]

    def release(self) -> None:
        """Release the memory of the programs. They are loaded again if they are needed again."""
        self.__dict__.pop("engine", None)
        self._recorders.clear()
        self._encoded = None

    def _wrapped(self, runner: Runner) -> Runner:
        return self._recorders.setdefault(runner.spec.name, Recorder(runner))


class ProgramInputs:
    """The inputs of one program, window by window; several of one session may take turns."""

    def __init__(self, session: BundleSession, spec: ProgramSpec) -> None:
        self._session, self._spec = session, spec
        self._decoding: DecoderInputs | None = None

    def record(self, mel: Floats) -> Sequence[Sequence[Array]]:
        """Return the samples of one window: mel (n_mels, 2T) float32."""
        kind = self._spec.kind
        if kind.positions:
            mel = mel[:, : 2 * kind.positions]
        if kind.name == ENCODER:
            return [with_zero_adapter(self._spec, mel.reshape(self._spec.inputs[0].shape))]
        if self._decoding is None:
            recorder = self._session.recorder(self._spec.name)
            self._decoding = DecoderInputs(self._session.engine, recorder)
        return self._decoding.record(self._session.encode(mel))
