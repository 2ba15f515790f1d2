"""The recordings that come with the package: what bundles are verified with by default."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import load_audio
from whisperport.errors import AudioError
from whisperport.text import Word

N_CLIPS = 6  # enough voices to notice a fault, few enough for a large model on a laptop
LONGEST_S = 12.0


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording to hold a bundle against."""

    name: str
    text: str  # what was said; empty: not known
    samples: NDArray[np.float32]  # (n_samples,) mono, 16 kHz; one window of it is used
    language: str = "en"  # that is spoken, by code or by name


@dataclass(frozen=True, slots=True)
class ShippedAudio:
    """One file of the package's speech, and what is said in it."""

    path: Path
    text: str
    voice: str
    held_out: bool  # a voice that the embedded model never heard in training
    seconds: float
    words: tuple[Word, ...]  # with their true times, and a probability of 1


def shipped_audio() -> tuple[ShippedAudio, ...]:
    """All recordings, in the order of their list.

    Raises:
        AudioError: this copy of the package was built without them.
    """
    folder = Path(str(files("whisperport"))) / "data" / "speech"
    try:
        listed = json.loads((folder / "transcripts.json").read_text(encoding="utf-8"))["clips"]
    except OSError as error:
        raise AudioError(
            "this copy of whisperport has no recordings",
            why=str(error),
            hint="give your own, or install the package again",
        ) from error
    return tuple(_recording(folder, entry) for entry in listed)


def _recording(folder: Path, entry: dict[str, Any]) -> ShippedAudio:
    return ShippedAudio(
        path=folder / entry["file"],
        text=entry["text"],
        voice=entry["voice"],
        held_out=bool(entry["held_out"]),
        seconds=float(entry["seconds"]),
        words=tuple(Word(f" {w['word']}", w["start"], w["end"], 1.0) for w in entry["words"]),
    )


def shipped_clips(count: int = N_CLIPS) -> tuple[Clip, ...]:
    """The first `count` short recordings with words in them, decoded."""
    spoken = [r for r in shipped_audio() if r.text and r.seconds <= LONGEST_S]
    return clips_of(spoken[:count])


def clips_of(recordings: Iterable[ShippedAudio]) -> tuple[Clip, ...]:
    """Decode recordings.

    Raises:
        AudioError: one is missing or damaged.
    """
    return tuple(Clip(r.path.name, r.text, load_audio(r.path)) for r in recordings)
