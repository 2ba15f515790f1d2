"""The audio that is transcribed, with its text; made from the shipped audio files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whisperport.apps.bench.transcribing import default_audio
from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.verification.clips import shipped_audio

from ..speed.chunks import GAPS, made
from .contenders import AUDIO, FILES, FORCED, LONG

WINDOW_S = 30
LONGEST_FILE_S = 12.0
PAUSES = GAPS["pauses of 0.3 to 2 s"]


@dataclass(frozen=True, slots=True)
class Case:
    """Audio to transcribe."""

    name: str
    kind: str  # see `contenders`
    audio: Path  # a file of one or several arrays
    audio_s: float
    texts: tuple[str, ...] = ()  # the correct text of each array; empty: not compared
    tokens: int | None = None  # tokens that are decoded whatever the model finds


def forced(folder: Path, tokens: int) -> Case:
    """One window whose number of tokens is fixed, for random weights."""
    audio, _ = made(WINDOW_S, PAUSES)
    return _case(
        f"one window, {tokens} tokens",
        FORCED,
        folder,
        [audio[: WINDOW_S * SAMPLE_RATE]],
        (),
        tokens,
    )


def transcribed(folder: Path, minutes: float, n_files: int) -> list[Case]:
    """The cases of the embedded model, from short to long: a process keeps memory of earlier ones."""
    window, text = made(WINDOW_S - 5, PAUSES)  # the last sentence ends before 30 s
    assert window.size < WINDOW_S * SAMPLE_RATE
    long = next(file for file in shipped_audio() if file.path == default_audio())
    clips = [f for f in shipped_audio() if f.text and f.seconds <= LONGEST_FILE_S]
    chosen = [clips[number % len(clips)] for number in range(n_files)]
    files = [load_audio(file.path) for file in chosen]
    texts = tuple(file.text for file in chosen)
    talk, spoken = made(60 * minutes, PAUSES)
    return [
        _case("one window", AUDIO, folder, [window], (text,)),
        _case(f"{long.seconds:.0f} s", LONG, folder, [load_audio(long.path)], (long.text,)),
        _case(f"{n_files} short files", FILES, folder, files, texts),
        _case(f"{minutes:g} minutes", LONG, folder, [talk], (spoken,)),
    ]


def _case(
    name: str,
    kind: str,
    folder: Path,
    audios: list[np.ndarray],
    texts: tuple[str, ...],
    tokens: int | None = None,
) -> Case:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '-').replace(',', '')}.npz"
    np.savez(path, *audios)
    seconds = sum(audio.size for audio in audios) / SAMPLE_RATE
    return Case(name, kind, path, seconds, texts, tokens)
