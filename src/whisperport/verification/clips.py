"""Clips of speech with transcripts, and the audio files shipped with the package."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.speech.audio import load_audio
from whisperport.speech.text import Word
from whisperport.system.regular_file import read_short_text

N_CLIPS = 6  # several voices, and still fast with a large model on a laptop
LONGEST_S = 12.0  # seconds, length of the longest shipped clip that is used


@dataclass(frozen=True, slots=True)
class Clip:
    """Audio and its transcript, for the reference of a bundle."""

    name: str
    text: str  # correct transcript; empty: not known
    samples: NDArray[np.float32]  # (n_samples,) mono, 16 kHz; only the first window is used
    language: str = "en"  # code or name of the spoken language


@dataclass(frozen=True, slots=True)
class ShippedAudio:
    """An audio file shipped with the package, and its transcript."""

    path: Path
    text: str  # correct transcript
    voice: str  # name of the synthetic voice
    held_out: bool  # the embedded model was not trained with this voice
    seconds: float  # length
    words: tuple[Word, ...]  # words with their true timestamps, and a probability of 1


def shipped_audio() -> tuple[ShippedAudio, ...]:
    """Return all shipped audio files.

    Raises:
        AudioError: this installation has none.
    """
    folder = Path(str(files("whisperport.speech.data"))) / "speech"
    try:
        entries = json.loads((folder / "transcripts.json").read_text(encoding="utf-8"))["clips"]
    except OSError as error:
        raise AudioError(
            "this installation of whisperport has no audio files",
            why=str(error),
            hint="give your own audio files, or install whisperport again",
        ) from error
    return tuple(_from_json(folder, entry) for entry in entries)


def _from_json(folder: Path, entry: dict[str, Any]) -> ShippedAudio:
    return ShippedAudio(
        path=folder / entry["file"],
        text=entry["text"],
        voice=entry["voice"],
        held_out=bool(entry["held_out"]),
        seconds=float(entry["seconds"]),
        words=tuple(Word(f" {w['word']}", w["start"], w["end"], 1.0) for w in entry["words"]),
    )


def shipped_clips(count: int | None = N_CLIPS) -> tuple[Clip, ...]:
    """Load the first `count` short shipped audio files that contain speech; None: all."""
    speech = [file for file in shipped_audio() if file.text and file.seconds <= LONGEST_S]
    return clips_of(speech[:count])


def clips_of(audio_files: Iterable[ShippedAudio]) -> tuple[Clip, ...]:
    """Load shipped audio files as clips.

    Raises:
        AudioError: a file is missing or damaged.
    """
    return tuple(Clip(file.path.name, file.text, load_audio(file.path)) for file in audio_files)


def clips_in(folder: Path, language: str) -> tuple[Clip, ...]:
    """Load the audio files in a folder as clips, in the order of their names.

    A file NAME.txt beside NAME.wav is its transcript; other files that are no audio are an error.

    Args:
        folder: the folder; folders in it are not read.
        language: code or name of the language that is spoken in all of them.

    Raises:
        AudioError: there is no such folder or no file in it, a file is no audio, or a transcript is empty
            or not UTF-8.
    """
    try:
        paths = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    except OSError as error:
        raise AudioError(
            f"cannot read the audio files in {folder}",
            why=str(error),
            hint="give a folder of audio files",
        ) from error
    audio_paths = [path for path in paths if path.suffix.lower() != ".txt"]
    if not audio_paths:
        raise AudioError(
            f"there are no audio files in {folder}",
            why=f"it has {len(paths)} files that are no audio",
            hint="give a folder of audio files, such as NAME.wav with its transcript NAME.txt",
        )
    return tuple(
        Clip(path.name, _transcript(path.with_suffix(".txt")), load_audio(path), language)
        for path in audio_paths
    )


def _transcript(path: Path) -> str:
    """Return the transcript in a file; empty if there is no such file."""
    if not path.is_file():
        return ""
    try:
        text = read_short_text(path, "utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AudioError(
            f"cannot read the transcript {path}", why=str(error), hint="save it as UTF-8"
        ) from error
    if not text:
        raise AudioError(
            f"the transcript {path} is empty", hint="fill in the transcript, or delete the file"
        )
    return text
