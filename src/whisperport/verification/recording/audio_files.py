"""Cut audio files into the windows of a calibration set, at three levels: unchanged, quiet and loud.

Silence, noise, music and copies are skipped, because value ranges measured on them are others. The clips
that the bundle is verified with are skipped too, because a verification on calibration data is not
independent. The number of skipped windows is counted by reason.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.program.runner import Array
from whisperport.speech.audio import SAMPLE_RATE, audio_windows
from whisperport.speech.audio.decode import AudioDecoder
from whisperport.speech.audio.pcm import to_int16
from whisperport.speech.audio.vad import speech_seconds

Floats = NDArray[np.float32]

SHORTEST_S = 1.0  # seconds of audio in a window; a shorter one is mostly padding
SILENT = 1e-3  # largest amplitude of a silent window, where 1 is full scale: -60 dB
# Shortest speech in a window. Of 80 signals of 10 s, noise, tones, drums and melodies, the detector takes
# at most 0.16 s for speech; of 300 utterances of synthetic voices, of 0.9 to 4 s, at least 0.51 s.
SPEECH_S = 0.3
QUIET = 0.1  # factor of the quiet level, -20 dB: a speaker at 3 m instead of at 30 cm
NO_SPEECH, NOT_FINITE = "without speech", "with a NaN or an infinity"


def fingerprint(samples: Array) -> str:
    """Return a hash of the first second of audio after leading zeros.

    Files with the same audio have the same fingerprint, whatever their names and lengths are.

    Args:
        samples: (n,) int16, or float32 within [-1, 1]; 16 kHz.
    """
    if samples.dtype != np.int16:
        samples = to_int16(samples)
    not_zero = np.flatnonzero(samples)
    start = int(not_zero[0]) if not_zero.size else 0
    return hashlib.sha256(samples[start : start + SAMPLE_RATE].tobytes()).hexdigest()


@dataclass(slots=True, kw_only=True)
class CalibrationAudio:
    """The audio files of a calibration set."""

    files: Sequence[Path]
    seconds: float  # length of a window
    excluded: frozenset[str] = frozenset()  # fingerprints of audio that must not be used
    force: bool = False  # also use silence, noise, copies and narrow-band audio
    # Reason -> number of windows or files that were skipped for it.
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def faults(self) -> str:
        """What was skipped: "3 silent, 1 without speech"."""
        return ", ".join(f"{n} {reason}" for reason, n in sorted(self.skipped.items()))

    def windows(self) -> Iterator[Floats]:
        """Yield every window once per level: (n,) float32, 16 kHz.

        The level changes from window to window, so that the first samples already have all three.
        """
        for turn in range(len(LEVELS)):
            for index, window in enumerate(self._windows()):
                yield LEVELS[(index + turn) % len(LEVELS)](window)

    def _windows(self) -> Iterator[Floats]:
        self.skipped.clear()
        seen: set[bytes] = set()
        for file in self.files:
            try:
                yield from self._of_file(file, seen)
            except AudioError as error:
                not_finite = "contains a NaN" in error.what
                self.skipped[NOT_FINITE if not_finite else "not readable as audio"] += 1

    def _of_file(self, file: Path, seen: set[bytes]) -> Iterator[Floats]:
        with AudioDecoder(file) as decoder:
            narrow = 0 < decoder.sample_rate < SAMPLE_RATE
        if narrow and not self.force:
            self.skipped["sampled below 16 kHz"] += 1
            return
        for window in audio_windows(file, self.seconds):
            if window.start_s == 0 and fingerprint(window.samples) in self.excluded:
                self.skipped["used to verify the bundle"] += 1
                return
            fault = "" if self.force else _fault(window.samples, seen)
            if fault:
                self.skipped[fault] += 1
            else:
                yield window.samples


def audio_files(source: Path) -> list[Path]:
    """Return an audio file, or all files below a folder.

    The order depends only on the paths and mixes the subfolders, so that the first files are varied.

    Raises:
        AudioError: the folder is empty or does not exist.
    """
    if source.is_file():
        return [source]
    paths = [path for path in source.rglob("*") if path.is_file() and path.name[0] != "."]
    if not paths:
        raise AudioError(
            f"there are no audio files in {source}",
            why="the folder is empty" if source.is_dir() else "the folder does not exist",
            hint="give a folder of audio files like those the device will transcribe",
        )
    return sorted(paths, key=lambda p: hashlib.sha256(os.fsencode(p.relative_to(source))).digest())


def _fault(samples: Floats, seen: set[bytes]) -> str:
    """Return the reason to skip a window; empty if it can be used."""
    if samples.size < SHORTEST_S * SAMPLE_RATE:
        return f"shorter than {SHORTEST_S:g} s"
    if np.ptp(samples) < 2 * SILENT:
        return "constant" if abs(float(samples.mean())) >= SILENT else "silent"
    digest = hashlib.sha256(samples.tobytes()).digest()
    if digest in seen:
        return "identical to another"
    seen.add(digest)
    return NO_SPEECH if speech_seconds(samples) < SPEECH_S else ""


def _quiet(samples: Floats) -> Floats:
    return samples * np.float32(QUIET)


def _loud(samples: Floats) -> Floats:
    peak = np.abs(samples).max(initial=0)
    return samples / peak if peak else samples


LEVELS: tuple[Callable[[Floats], Floats], ...] = (lambda samples: samples, _quiet, _loud)
