"""Windows of real audio to calibrate with, as the transcriber cuts them; as recorded, quiet and loud.

Silence, copies, and the recordings that a bundle is verified with are left out and counted: ranges
measured on the former are wrong, and a verification on what was calibrated with shows nothing.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import SAMPLE_RATE, audio_windows
from whisperport.audio.decode import AudioDecoder
from whisperport.errors import AudioError
from whisperport.runner import Array

Floats = NDArray[np.float32]

SHORTEST_S = 1.0  # of audio in a window: less is mostly silence
SILENT = 1e-3  # of 1, how far samples move at most: -60 dB of full scale
QUIET = 0.1  # -20 dB: a speaker at three metres instead of at thirty centimetres


def fingerprint(samples: Array) -> str:
    """Identifies a recording by its first second of audio, whatever its file's name and length are.

    samples  (n,) int16, or float32 within [-1, 1]; 16 kHz
    """
    if samples.dtype != np.int16:
        samples = np.clip(np.round(samples * 32768), -32768, 32767).astype(np.int16)
    not_zero = np.flatnonzero(samples)
    start = int(not_zero[0]) if not_zero.size else 0
    return hashlib.sha256(samples[start : start + SAMPLE_RATE].tobytes()).hexdigest()


@dataclass(slots=True, kw_only=True)
class Recordings:
    """Audio files to calibrate with; `left_out` counts what was not used, and why."""

    files: Sequence[Path]
    seconds: float  # of audio in a window
    apart_from: frozenset[str] = frozenset()  # fingerprints of recordings that must not be used
    force: bool = False  # use silence, copies and narrow-band audio too
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
        with AudioDecoder(file) as decoder:
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


def recording_files(source: Path) -> list[Path]:
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
