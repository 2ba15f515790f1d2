"""Samples of a program's inputs that a user gives: arrays by name, or audio if it reads a spectrogram.

FOLDER/
├── 1.npz            one sample: an array per input, as for `lower --inputs`
├── 2/NAME.npy       one sample: a file per input
└── talk.wav         one sample: the first window of its log-mel spectrogram
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whisperport.errors import AudioError, ProgramError, WhisperportError
from whisperport.program.host_part import HostPart
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.speech.audio import FRAMES_PER_SECOND, log_mel
from whisperport.system.array_files import open_array
from whisperport.verification.recording.audio_files import CalibrationAudio
from whisperport.verification.samples import mel_shape

ARRAYS = (".npy", ".npz")
HINT = "give each sample as a subfolder with an array NAME.npy for every input, or as one .npz file of them"


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """The samples of a program's inputs in a file or folder. They are read when they are needed.

    Attributes:
        spec: signature of the program.
        host: steps before the program; arrays may be inputs of the first of these steps.
        files: the files of every sample.
        force: use audio that is silent, constant, short or below 16 kHz.
    """

    spec: ProgramSpec
    host: HostPart
    files: tuple[tuple[Path, ...], ...]
    force: bool = False

    @classmethod
    def find(cls, path: Path, spec: ProgramSpec, host: HostPart, *, force: bool) -> "GivenInputs":
        """Find the samples in a file or folder, in the order of their paths.

        Raises:
            ProgramError: there are none.
        """
        paths = [path] if path.is_file() else sorted(path.rglob("*"))
        samples: dict[Path, list[Path]] = {}
        for file in paths:
            if file.is_file() and not file.name.startswith("."):
                samples.setdefault(file.parent if file.suffix == ".npy" else file, []).append(file)
        if not samples:
            raise ProgramError(
                f"there are no inputs in {path}",
                why="the folder is empty" if path.is_dir() else "it does not exist",
                hint=HINT,
            )
        return cls(spec, host, tuple(map(tuple, samples.values())), force)

    def name(self, index: int) -> str:
        """Return the name of a sample: that of its file or folder."""
        first = self.files[index][0]
        return first.parent.name if first.suffix == ".npy" else first.name

    def read(self, indices: Sequence[int]) -> Iterator[list[Array]]:
        """Read samples, each with its arrays in the order of the program's inputs.

        Raises:
            AudioError: an audio file cannot be read, or cannot be used without `force`.
            ProgramError: the arrays of a sample are damaged or do not fit the program.
        """
        for index in indices:
            try:
                yield self._sample(self.files[index])
            except WhisperportError as error:
                error.what = f"{self.name(index)}: {error.what}"
                raise

    def _sample(self, files: Sequence[Path]) -> list[Array]:
        from whisperport.model.inspection.graph import Value
        from whisperport.model.inspection.inputs import inputs_for, read_inputs

        if files[0].suffix not in ARRAYS:
            return [self._spectrogram(files[0])]
        arrays = (
            read_inputs(files[0]) if files[0].suffix == ".npz" else dict(map(_named_array, files))
        )
        if any(lookup.tokens.name in arrays for lookup in self.host.lookups):
            arrays = self.host.inputs(arrays)
        values = [Value(tensor.name, tensor.shape, tensor.dtype) for tensor in self.spec.inputs]
        try:
            return inputs_for(values, arrays)
        except ProgramError as error:
            error.hint = HINT
            raise

    def _spectrogram(self, file: Path) -> Array:
        """Return the log-mel spectrogram of the first window of an audio file that can be used."""
        shape = mel_shape(self.spec)
        if shape is None:
            raise ProgramError(
                "it is neither an .npz nor an .npy file",
                why="only a program whose single input is a spectrogram of 80 or 128 mel bins reads audio",
                hint=HINT,
            )
        bins, frames = shape
        audio = CalibrationAudio(files=[file], seconds=frames / FRAMES_PER_SECOND, force=self.force)
        samples = next(audio.windows(), None)
        if samples is None:
            raise AudioError(
                "the audio cannot be used",
                why=f"windows or files: {audio.faults}",
                hint="give audio of speech; `--force` uses silence, noise and narrow-band audio too",
            )
        return log_mel(samples, bins, n_frames=frames).reshape(self.spec.inputs[0].shape)


def _named_array(file: Path) -> tuple[str, Array]:
    """Return the name of an input, and its array.

    Raises:
        ProgramError: the file is damaged.
    """
    try:
        return file.stem, open_array(file)
    except ValueError as error:
        raise ProgramError(
            f"cannot read {file.name}", why=str(error), hint="write it again with numpy.save"
        ) from error
