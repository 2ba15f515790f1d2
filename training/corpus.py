"""The synthesized speech in memory: frames, tokens with their times, phones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocabulary import Vocabulary, tokenizer, word_tokens

SILENCE = 0  # frame label where nobody speaks


@dataclass
class Utterance:
    """One spoken sentence.

    ``frames``: float16 log10 mel power [n, 80], 100 frames a second. ``spans``: [tokens, 2],
    seconds from the first frame, one row for each token. ``phones``: [(label, end in seconds)].
    """

    text: str
    voice: str
    frames: NDArray[np.float16]
    tokens: list[int]
    spans: NDArray[np.float32]
    word_end: NDArray[np.bool_]
    phones: list[tuple[int, float]]
    samples: NDArray[np.int16] | None = None

    @property
    def start(self) -> float:
        return float(self.spans[0, 0])

    @property
    def end(self) -> float:
        return float(self.spans[-1, 1])

    @property
    def seconds(self) -> float:
        return len(self.frames) / 100

    def word_times(self, begin: float = 0.0) -> list[tuple[float, float]]:
        """(start, end) of every white-space separated word, if the first frame is at ``begin``."""
        lasts = np.flatnonzero(self.word_end)
        firsts = np.concatenate([[0], lasts[:-1] + 1])
        return [
            (begin + float(self.spans[first, 0]), begin + float(self.spans[last, 1]))
            for first, last in zip(firsts, lasts, strict=True)
        ]


def token_spans(
    text: str, words: list[tuple[float, float]]
) -> tuple[list[int], NDArray[np.float32], NDArray[np.bool_]]:
    """Tokens, their [start, end] in seconds, and which of them end a word.

    Each word's time is shared among its tokens by their letters; punctuation gets the last 0.04 s.
    """
    tokens: list[int] = []
    spans: list[tuple[float, float]] = []
    last: list[bool] = []
    for word, (start, end) in zip(text.split(), words, strict=True):
        parts = word_tokens(word)
        letters = [sum(c.isalpha() for c in tokenizer().decode([part])) for part in parts]
        reached = np.concatenate([[0], np.cumsum(letters)]) / sum(letters)
        for i, part in enumerate(parts):
            span = start + (end - start) * reached[i : i + 2]
            spans.append((span[0], span[1]) if letters[i] else (end - 0.04, end))
            tokens.append(part)
            last.append(i == len(parts) - 1)
    return tokens, np.array(spans, np.float32), np.array(last)


class Corpus:
    """All utterances of folders written by synthesize.py. Phones not among given ``phone_labels``
    count as silence."""

    def __init__(self, *folders: Path, phone_labels: dict[str, int] | None = None) -> None:
        self.phone_labels = {"": SILENCE} if phone_labels is None else phone_labels
        grow = phone_labels is None
        self.utterances: list[Utterance] = []
        for index in sorted(
            (file for folder in folders for file in folder.glob("*.json")), key=lambda f: f.name
        ):
            records = json.loads(index.read_text())
            frames = np.load(index.with_suffix(".npy"))
            sound_file = index.with_suffix(".wav.npy")
            sounds = np.load(sound_file) if sound_file.exists() else None
            for record in records:
                self.utterances.append(self._utterance(record, frames, sounds, grow))

    def _utterance(
        self, record: dict[str, Any], frames: np.ndarray, sounds: np.ndarray | None, grow: bool
    ) -> Utterance:
        engine = "e" if record["voice"].startswith("espeak") else "f"
        phones = []
        for name, end in record["phones"]:
            quiet = name in ("pau", "") or name.startswith("_")
            key = "" if quiet else f"{engine}:{name}"
            if grow:
                self.phone_labels.setdefault(key, len(self.phone_labels))
            phones.append((self.phone_labels.get(key, SILENCE), end))
        first, count = record["first_frame"], record["frames"]
        text = record["text"].replace(":", ",")  # Whisper's decoding suppresses the colon
        tokens, spans, word_end = token_spans(text, record["words"])
        samples = None if sounds is None else sounds[first * 160 : (first + count) * 160]
        return Utterance(
            text,
            record["voice"],
            frames[first : first + count],
            tokens,
            spans,
            word_end,
            phones,
            samples,
        )

    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of_words(
            sorted({word for u in self.utterances for word in u.text.split()})
        )
