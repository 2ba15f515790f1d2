"""What Hailo's compiler measures a program's ranges on: windows of real sound, loud and quiet.

    recordings ─ windows, each once: as recorded, quiet, loud in turn ─ spectrograms ─┐
               └ again with the next loudness, as long as more are needed             ├─ (N, H, W, C) .npy
    arrays made elsewhere ─ checked ──────────────────────────────────────────────────┘

Silence, copies, and the recordings that a bundle is verified with are left out: ranges measured on them
are wrong, or prove nothing. Arrays are written as they are made: thousands of windows take gigabytes.
"""

import hashlib
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import SAMPLE_RATE, audio_windows, log_mel
from whisperport.audio.decode import Decoder
from whisperport.errors import AudioError
from whisperport.runner import Array
from whisperport.spec import ProgramSpec
from whisperport.targets.hailo.layout import as_stream, stream_shape

Floats = NDArray[np.float32]
Say = Callable[[str], None]

SHORTEST_S = 1.0  # of sound in a window: less is mostly silence
SILENT = 1e-3  # of 1, how far samples move at most: -60 dB of full scale
QUIET = 0.1  # -20 dB: a speaker at three metres instead of at thirty centimetres
SLACK = 1e-3  # float32 and another library's logarithm

# log10 of at least 1e-10, at most 8 below the maximum, then (x + 4) / 4: see `log_mel`.
LOWEST, WIDEST = -1.5, 2.0


def fingerprint(samples: Array) -> str:
    """Tells a recording by its first second of sound, whatever it is called or cut to.

    samples  (n,) int16, or float32 within [-1, 1]; 16 kHz
    """
    if samples.dtype != np.int16:
        samples = np.clip(np.round(samples * 32768), -32768, 32767).astype(np.int16)
    heard = np.flatnonzero(samples)
    start = int(heard[0]) if heard.size else 0
    return hashlib.sha256(samples[start : start + SAMPLE_RATE].tobytes()).hexdigest()


@dataclass(slots=True, kw_only=True)
class Sounds:
    """Recordings to calibrate with; `left_out` counts what was not used, and why."""

    files: Sequence[Path]
    seconds: float  # of sound in a window
    apart_from: frozenset[str] = frozenset()  # fingerprints of recordings that must not be used
    force: bool = False  # take silence, copies and narrow-band sound all the same
    left_out: Counter[str] = field(default_factory=Counter)

    def windows(self) -> Iterator[Floats]:
        """(n,) float32: every window once, then once more each as loud as it was not before."""
        for turn in range(len(LOUDNESS)):
            for index, window in enumerate(self._windows()):
                yield LOUDNESS[(index + turn) % len(LOUDNESS)](window)

    def _windows(self) -> Iterator[Floats]:
        self.left_out.clear()
        seen: set[bytes] = set()
        for file in self.files:
            try:
                yield from self._of_file(file, seen)
            except AudioError:
                self.left_out["unreadable"] += 1

    def _of_file(self, file: Path, seen: set[bytes]) -> Iterator[Floats]:
        with Decoder(file) as decoder:
            narrow = 0 < decoder.sample_rate < SAMPLE_RATE
        if narrow and not self.force:
            self.left_out["recorded below 16 kHz"] += 1
            return
        for window in audio_windows(file, self.seconds):
            if window.start_s == 0 and fingerprint(window.samples) in self.apart_from:
                self.left_out["used to verify the bundle"] += 1
                return
            fault = "" if self.force else _fault(window.samples, seen)
            if fault:
                self.left_out[fault] += 1
            else:
                yield window.samples


def sound_files(source: Path) -> list[Path]:
    """A recording, or all files below a folder, in an order that mixes its parts and never changes.

    Raises:
        AudioError: there is nothing.
    """
    if source.is_file():
        return [source]
    found = [path for path in source.rglob("*") if path.is_file() and path.name[0] != "."]
    if not found:
        raise AudioError(
            f"there are no recordings in {source}",
            why="the folder is empty" if source.is_dir() else "there is no such folder",
            hint="give a folder of recordings as the device will hear them",
        )
    return sorted(found, key=lambda p: hashlib.sha256(os.fsencode(p.relative_to(source))).digest())


def encoder_samples(sounds: Sounds, spec: ProgramSpec) -> Iterator[tuple[Floats]]:
    """The encoder's input for each window: one (1, n_mels, 1, 2T) spectrogram."""
    _, n_mels, _, n_frames = spec.inputs[0].shape
    for samples in sounds.windows():
        yield (log_mel(samples, n_mels, n_frames=n_frames)[None, :, None, :],)


def write_set(
    samples: Iterable[Sequence[Array]], spec: ProgramSpec, folder: Path, needed: int, say: Say
) -> tuple[str | dict[str, str], int]:
    """Write at most `needed` samples of a program's inputs, each as the chip takes it.

    Returns:
        The file's name, or, of several inputs, the compiler's name of each input's layer -> its file;
        and how many samples there are.
    """
    names = [f"input_layer{i}.npy" for i in range(1, len(spec.inputs) + 1)]
    shapes = [stream_shape(tensor.shape) for tensor in spec.inputs]
    paths = [folder / name for name in names]
    _check_room(folder, 4 * needed * sum(map(math.prod, shapes)))
    arrays = [_mapped(path, (needed, *shape)) for path, shape in zip(paths, shapes, strict=True)]
    count = 0
    for sample in samples:
        for array, one in zip(arrays, sample, strict=True):
            array[count] = as_stream(one)
        count += 1
        if count % max(1, needed // 10) == 0:
            say(f"{spec.name}: {count} of {needed} calibration samples")
        if count == needed:
            break
    for path, array in zip(paths, arrays, strict=True):
        array.flush()
        if 0 < count < needed:
            _cut(path, count)
    layer = spec.name.replace(".", "_")  # as the compiler names a network
    layers = {f"{layer}/{name.removesuffix('.npy')}": name for name in names}
    return (names[0] if len(names) == 1 else layers), count


def check_enough(spec: ProgramSpec, count: int, needed: int, sounds: Sounds) -> None:
    """Raises AudioError if there are fewer samples than the compiler reads, unless that is forced."""
    if count >= needed or (sounds.force and count):
        return
    left_out = ", ".join(f"{n} {reason}" for reason, n in sorted(sounds.left_out.items()))
    hours = needed * sounds.seconds / len(LOUDNESS) / 3600
    raise AudioError(
        f"too few recordings to calibrate `{spec.name}` with",
        why=f"they make {count} samples of {sounds.seconds:g} s, and {needed} are needed: "
        f"{hours:.1f} h of sound, each window being used as recorded, quiet and loud"
        + (f"; left out: {left_out}" if left_out else ""),
        hint="give more recordings; `--no-finetune` needs fewer; `--force` takes these, also what was "
        "left out",
    )


def check_ready(path: Path, spec: ProgramSpec, needed: int, *, force: bool = False) -> int:
    """How many samples an array holds that was made elsewhere, of spectrograms (N, 1, 2T, n_mels).

    Raises:
        AudioError: it has another shape or dtype, or holds no spectrograms on Whisper's scale; or,
            unless forced, too few of them, empty ones or copies.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise AudioError(f"cannot read the calibration array {path}", why=str(error)) from error
    wanted = stream_shape(spec.inputs[0].shape)
    if array.dtype != np.float32 or array.shape[1:] != wanted or not len(array):
        raise AudioError(
            f"{path.name} does not fit the encoder",
            why=f"expected (N, {', '.join(map(str, wanted))}) float32, got {array.shape} {array.dtype}",
            hint="spectrograms of this bundle's window, channels last; or give a folder of recordings",
        )
    faults = _faults(array)
    if faults["off the scale"]:
        raise AudioError(
            f"{path.name} holds no log-mel spectrograms as Whisper takes them",
            why=f"{faults['off the scale']} of {len(array)} hold values that are no numbers, or are "
            f"below {LOWEST:g}, or {WIDEST:g} apart and more",
            hint="sound of another rate or another scale gives such; give the recordings themselves",
        )
    if not force and (faults or len(array) < needed):
        raise AudioError(
            f"{path.name} is no set to calibrate with",
            why=f"it has {len(array)} samples, and {needed} are needed"
            + "".join(f"; {n} {fault}" for fault, n in sorted(faults.items())),
            hint="`--force` takes it",
        )
    return min(len(array), needed)


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


def _fault(samples: Floats, seen: set[bytes]) -> str:
    """Why a window cannot be used; empty if it can."""
    if samples.size < SHORTEST_S * SAMPLE_RATE:
        return f"shorter than {SHORTEST_S:g} s"
    if np.ptp(samples) < 2 * SILENT:
        return "constant" if abs(float(samples.mean())) >= SILENT else "silent"
    digest = hashlib.sha256(samples.tobytes()).digest()
    if digest in seen:
        return "identical to another"
    seen.add(digest)
    return ""


def _quiet(samples: Floats) -> Floats:
    return samples * np.float32(QUIET)


def _loud(samples: Floats) -> Floats:
    peak = np.abs(samples).max(initial=0)
    return samples / peak if peak else samples


LOUDNESS: tuple[Callable[[Floats], Floats], ...] = (lambda samples: samples, _quiet, _loud)


def _check_room(folder: Path, needed_bytes: int) -> None:
    """A mapped file on a full disk ends the process without a word."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise AudioError(
            f"the disk is too full for a calibration set in {folder}",
            why=f"{needed_bytes / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free",
            hint="free some space, or choose another folder: `--work`",
        )


def _mapped(path: Path, shape: tuple[int, ...]) -> Any:
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)


def _cut(path: Path, count: int) -> None:
    """Keep the first samples of an array on disk."""
    whole = np.load(path, mmap_mode="r")
    partial = path.with_name(f"partial.{path.name}")
    kept = _mapped(partial, (count, *whole.shape[1:]))
    for index in range(count):
        kept[index] = whole[index]
    kept.flush()
    del whole, kept
    os.replace(partial, path)
