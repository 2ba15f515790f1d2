"""Spectrograms of a calibration set: computed from audio files, or read from an .npy array."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from whisperport.errors import AudioError
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.speech.audio import log_mel
from whisperport.system.array_files import open_array
from whisperport.targets.compiler import Layout, undone
from whisperport.verification.recording.audio_files import CalibrationAudio, Floats

SLACK = 1e-3  # tolerance for float32 and for the logarithm of another library

# Smallest change of a frame's mean over time, as a standard deviation. Noise and tones have at most 0.04,
# made 25 times; 300 utterances of synthetic voices and the clips of the package, with noise, at least 0.10.
STEADY = 0.06
# Lowest value and largest range of a log-mel spectrogram: log10 of at least 1e-10, at most 8 below the
# maximum, then (x + 4) / 4. See `log_mel`.
LOWEST, LARGEST_RANGE = -1.5, 2.0


def spectrograms_of(audio: CalibrationAudio, encoder: ProgramSpec) -> Iterator[Floats]:
    """Yield the spectrogram of every window: (n_mels, 2T) float32."""
    shape = encoder.inputs[0].shape
    for samples in audio.windows():
        yield log_mel(samples, shape[1], n_frames=shape[-1])


def stored_spectrograms(path: Path, encoder: ProgramSpec, layout: Layout) -> Iterator[Floats]:
    """Yield every spectrogram of an .npy array: (n_mels, 2T) float32.

    Args:
        path: the array, in the layout of the encoder's calibration set.
        encoder: the encoder's inputs.
        layout: that layout.
    """
    shape = encoder.inputs[0].shape
    for sample in _opened(path):
        yield undone(layout, sample, shape).reshape(shape[1], shape[-1])


def check_spectrograms(
    path: Path, encoder: ProgramSpec, layout: Layout, needed: int, *, force: bool = False
) -> int:
    """Check an .npy array of spectrograms in the encoder's layout.

    Args:
        path: the array.
        encoder: the encoder's inputs.
        layout: layout of the encoder's calibration set.
        needed: number of samples that the compiler reads.
        force: accept too few spectrograms, constant and steady ones and copies.

    Returns:
        The number of samples to use, at most `needed`.

    Raises:
        AudioError: the array cannot be read, its shape or dtype is wrong, or its values are not on
            Whisper's scale; without `force`, also if spectrograms are too few, constant, steady or copies.
    """
    array = _opened(path)
    shape = layout(np.zeros(encoder.inputs[0].shape, np.float32)).shape
    if array.dtype != np.float32 or array.shape[1:] != shape or not len(array):
        raise AudioError(
            f"the shape or dtype of {path.name} does not fit the encoder",
            why=f"expected (N, {', '.join(map(str, shape))}) float32, got {array.shape} {array.dtype}",
            hint="give spectrograms of this bundle's window in this layout, or a folder of audio files",
        )
    faults = _faults(array, encoder.inputs[0].shape, layout)
    if faults["off the scale"]:
        raise AudioError(
            f"the values in {path.name} are not Whisper's log-mel spectrograms",
            why=f"{faults['off the scale']} of {len(array)} samples hold NaN, values below {LOWEST:g}, or "
            f"a range of values larger than {LARGEST_RANGE:g}",
            hint="audio of another sample rate or scale gives such values; give the audio files instead",
        )
    if not force and (faults or len(array) < needed):
        raise AudioError(
            f"{path.name} is not a usable calibration set",
            why=f"it has {len(array)} samples, and {needed} are needed"
            + "".join(f"; {n} {fault}" for fault, n in sorted(faults.items())),
            hint="give more and different spectrograms; `--force` uses these anyway",
        )
    return min(len(array), needed)


def _opened(path: Path) -> Array:
    try:
        return open_array(path)
    except ValueError as error:
        raise AudioError(
            f"cannot read the calibration array {path}",
            why=str(error),
            hint="write it again with `numpy.save`, or give a folder of audio files",
        ) from error


def _faults(array: Array, shape: Sequence[int], layout: Layout) -> Counter[str]:
    faults: Counter[str] = Counter()
    seen: set[bytes] = set()
    for sample in array:
        low, high = float(sample.min()), float(sample.max())
        digest = hashlib.sha256(sample.tobytes()).digest()
        if not (low >= LOWEST - SLACK and high - low <= LARGEST_RANGE + SLACK):  # False for NaN
            faults["off the scale"] += 1
        elif high - low < SLACK:
            faults["constant"] += 1
        elif digest in seen:
            faults["identical to another"] += 1
        elif float(undone(layout, sample, shape).reshape(shape[1], -1).mean(0).std()) < STEADY:
            faults["steady, as noise is and speech is not"] += 1
        seen.add(digest)
    return faults
