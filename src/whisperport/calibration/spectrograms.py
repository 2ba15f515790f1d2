"""The spectrograms of a calibration set: of recordings, or an array of them that was made elsewhere."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.audio import log_mel
from whisperport.calibration.recordings import Floats, Recordings
from whisperport.errors import AudioError
from whisperport.runner import Array
from whisperport.spec import ProgramSpec
from whisperport.targets.compiler import Layout

SLACK = 1e-3  # float32 and another library's logarithm

# log10 of at least 1e-10, at most 8 below the maximum, then (x + 4) / 4: see `log_mel`.
LOWEST, WIDEST = -1.5, 2.0


def spectrograms_of(recordings: Recordings, encoder: ProgramSpec) -> Iterator[Floats]:
    """(n_mels, 2T) of every window."""
    shape = encoder.inputs[0].shape
    for samples in recordings.windows():
        yield log_mel(samples, shape[1], n_frames=shape[-1])


def stored_spectrograms(path: Path, encoder: ProgramSpec, layout: Layout) -> Iterator[Floats]:
    """(n_mels, 2T) of every sample of an array that has the layout of an encoder's calibration set."""
    shape = encoder.inputs[0].shape
    # A layout moves values and changes none, so it also tells where each value has come from. float32
    # counts exactly up to 16 million, 40 times the values of the largest spectrogram.
    source = layout(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    for one in _opened(path):
        mel = np.empty(int(np.prod(shape)), np.float32)
        mel[source.ravel().astype(np.int64)] = one.ravel()
        yield mel.reshape(shape[1], shape[-1])


def check_stored(
    path: Path, encoder: ProgramSpec, layout: Layout, needed: int, *, force: bool = False
) -> int:
    """How many samples an array holds that was made elsewhere, of spectrograms in the encoder's layout.

    Raises:
        AudioError: it has another shape or dtype, or holds no spectrograms on Whisper's scale; or,
            unless forced, too few of them, empty ones or copies.
    """
    array = _opened(path)
    wanted = layout(np.zeros(encoder.inputs[0].shape, np.float32)).shape
    if array.dtype != np.float32 or array.shape[1:] != wanted or not len(array):
        raise AudioError(
            f"{path.name} does not fit the encoder",
            why=f"expected (N, {', '.join(map(str, wanted))}) float32, got {array.shape} {array.dtype}",
            hint="give spectrograms of this bundle's window in this layout, or a folder of recordings",
        )
    faults = _faults(array)
    if faults["off the scale"]:
        raise AudioError(
            f"{path.name} holds no log-mel spectrograms as Whisper uses them",
            why=f"{faults['off the scale']} of {len(array)} hold values that are not numbers, or are "
            f"below {LOWEST:g}, or {WIDEST:g} apart and more",
            hint="audio of another rate or another scale gives such values; give the recordings themselves",
        )
    if not force and (faults or len(array) < needed):
        raise AudioError(
            f"{path.name} is no set to calibrate with",
            why=f"it has {len(array)} samples, and {needed} are needed"
            + "".join(f"; {n} {fault}" for fault, n in sorted(faults.items())),
            hint="`--force` uses it anyway",
        )
    return min(len(array), needed)


def _opened(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise AudioError(f"cannot read the calibration array {path}", why=str(error)) from error


def _faults(array: Array) -> Counter[str]:
    faults: Counter[str] = Counter()
    seen: set[bytes] = set()
    for one in array:
        low, high = float(one.min()), float(one.max())
        digest = hashlib.sha256(one.tobytes()).digest()
        if not (low >= LOWEST - SLACK and high - low <= WIDEST + SLACK):  # false for NaN too
            faults["off the scale"] += 1
        elif high - low < SLACK:
            faults["constant"] += 1
        elif digest in seen:
            faults["identical to another"] += 1
        seen.add(digest)
    return faults
