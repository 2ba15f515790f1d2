"""The synthesized speech in memory: frames, tokens with their timestamps, phones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vocabulary import Vocabulary, tokenizer, word_tokens

SILENCE = 0  # label of frames without speech


@dataclass
class Utterance:
    """One spoken sentence.

    ``frames``: float16 log10 mel power [n, 80], 100 frames per second. ``spans``: [tokens, 2], start and
    end of each token in seconds from the first frame. ``phones``: [(label, end in seconds)].
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
        """Return (start, end) of each whitespace-separated word; ``begin``: time of the first frame."""
        lasts = np.flatnonzero(self.word_end)
        firsts = np.concatenate([[0], lasts[:-1] + 1])
        return [
            (begin + float(self.spans[first, 0]), begin + float(self.spans[last, 1]))
            for first, last in zip(firsts, lasts, strict=True)
        ]


def token_spans(
    text: str, words: list[tuple[float, float]]
) -> tuple[list[int], NDArray[np.float32], NDArray[np.bool_]]:
    """Return the tokens of a text, their [start, end] in seconds, and which tokens end a word.

    The time of a word is divided among its tokens by their number of letters. Punctuation has the last
    0.04 s of the word.
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
    """All utterances in folders that synthesize.py wrote.

    If ``phone_labels`` are given, phones that are not among them count as silence.
    """

    def __init__(self, *folders: Path, phone_labels: dict[str, int] | None = None) -> None:
        self.phone_labels = {"": SILENCE} if phone_labels is None else phone_labels
        grow = phone_labels is None
        self.utterances: list[Utterance] = []
        for index in sorted(
            (file for folder in folders for file in folder.glob("*.json")), key=lambda f: f.name
        ):
            records = json.loads(index.read_text())
            frames = np.load(index.with_suffix(".npy"))
            audio_file = index.with_suffix(".wav.npy")
            audio = np.load(audio_file) if audio_file.exists() else None
            for record in records:
                self.utterances.append(self._utterance(record, frames, audio, grow))

    def _utterance(
        self, record: dict[str, Any], frames: np.ndarray, audio: np.ndarray | None, grow: bool
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
        samples = None if audio is None else audio[first * 160 : (first + count) * 160]
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
