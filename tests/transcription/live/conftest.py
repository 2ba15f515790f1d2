"""The embedded model, and audio files with the known end of each word."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.speech.text import Word
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.transcription.live.live_options import LiveOptions
from whisperport.transcription.live.transcriber import LiveTranscriber, LiveUpdate
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle


@dataclass(frozen=True)
class Spoken:
    """Audio, and its words with their times."""

    samples: np.ndarray
    words: tuple[Word, ...]


@dataclass
class Listened:
    """The results of a stream, and when they came, in seconds of audio."""

    live: LiveTranscriber
    updates: list[LiveUpdate] = field(default_factory=list)

    @property
    def committed(self) -> list[tuple[Word, float]]:
        return [(word, u.audio_s) for u in self.updates for word in u.committed]


@pytest.fixture(scope="session")
def embedded() -> Transcriber:
    return Transcriber(default_bundle(), run=RunOptions(threads=1))


@pytest.fixture(scope="session")
def spoken() -> dict[str, Spoken]:
    """By the number in the file's name."""
    return {r.path.name[:2]: Spoken(load_audio(r.path), r.words) for r in shipped_audio()}


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(SAMPLE_RATE * seconds), np.float32)


def in_a_row(*parts: Spoken, gap_s: float) -> Spoken:
    samples, words, at = [], [], 0.0
    for part in parts:
        words += [Word(w.word, at + w.start, at + w.end, 1.0) for w in part.words]
        samples += [part.samples, silence(gap_s)]
        at += part.samples.size / SAMPLE_RATE + gap_s
    return Spoken(np.concatenate(samples), tuple(words))


def listen(
    transcriber: Transcriber,
    samples: np.ndarray,
    piece_s: float = 0.1,
    options: LiveOptions | None = None,
) -> Listened:
    """Feed audio in pieces, in simulated time: each result is as late as the audio that it needs."""
    done = Listened(LiveTranscriber(transcriber, options))
    size = round(piece_s * SAMPLE_RATE)
    for start in range(0, samples.size, size):
        done.updates.append(done.live.feed(samples[start : start + size]))
    done.updates.append(done.live.finish())
    return done
