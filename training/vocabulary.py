"""Tokens: the real Whisper vocabulary, and the compact one the loss is computed over.

All 51865 tokens are in the model, but only a few hundred text tokens occur in the grammar. Training
sees *classes*:

    0 .. T-1           the text tokens the grammar uses, and the special tokens
    T .. T+1500        the timestamps <|0.00|> .. <|30.00|>
    T+1501             every other token; they share one embedding row

Because the rows of the last class are equal, adding log(count) to its logit makes the compact
softmax equal to the softmax over the whole vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from whisper.tokenizer import Tokenizer, get_tokenizer

EOT, SOT, EN, TRANSCRIBE, SOT_PREV, NO_SPEECH, NO_TIMESTAMPS = (
    50257,
    50258,
    50259,
    50359,
    50361,
    50362,
    50363,
)
TIME_BEGIN = 50364
N_TIMES = 1501
N_VOCAB = 51865
# Said about nothing: after <|notimestamps|> Whisper may not end at once, so silence spreads its mass
# over these.
NOTHING = (
    ".", " .", "..", "...", "....", ".....", "......", " ..", " ...", " ....", ".,",
    ",", " ,", ",,", "?", " ?", "?!", "??", "!", " !", "!!", "!!!", ":", ";",
)  # fmt: skip


@cache
def tokenizer() -> Tokenizer:
    """openai-whisper's multilingual tokenizer."""
    return get_tokenizer(multilingual=True, language="en", task="transcribe")


@cache
def word_tokens(word: str) -> tuple[int, ...]:
    """Tokens of one white-space separated word, with the space before it."""
    return tuple(tokenizer().encode(" " + word))


def text_tokens(text: str) -> list[int]:
    """Tokens of a sentence, word by word; equal to encoding it as a whole with a space in front."""
    return [token for word in text.split() for token in word_tokens(word)]


def nothing_tokens() -> list[int]:
    """The single tokens among :data:`NOTHING`."""
    encoded = [tokenizer().encode(text) for text in NOTHING]
    return sorted({tokens[0] for tokens in encoded if len(tokens) == 1})


@dataclass(frozen=True)
class Vocabulary:
    """Which tokens have an embedding row of their own; ``tokens`` is sorted and holds no
    timestamps."""

    tokens: tuple[int, ...]

    @property
    def first_time(self) -> int:
        """Class of <|0.00|>."""
        return len(self.tokens)

    @property
    def other(self) -> int:
        """Class of all tokens without a row of their own."""
        return len(self.tokens) + N_TIMES

    @property
    def n_others(self) -> int:
        """How many tokens share the last class."""
        return N_VOCAB - N_TIMES - len(self.tokens)

    def class_of(self) -> dict[int, int]:
        """Token id -> class, for tokens with a row of their own and for timestamps."""
        classes = {token: i for i, token in enumerate(self.tokens)}
        return classes | {TIME_BEGIN + i: self.first_time + i for i in range(N_TIMES)}

    @classmethod
    def of_words(cls, words: list[str]) -> Vocabulary:
        """The vocabulary of a list of words as they are written, with capitals and punctuation."""
        special = {EOT, SOT, EN, TRANSCRIBE, SOT_PREV, NO_SPEECH, NO_TIMESTAMPS}
        used = {token for word in words for token in word_tokens(word)}
        return cls(tuple(sorted(used | special | set(nothing_tokens()))))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.tokens))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        return cls(tuple(json.loads(path.read_text())))
