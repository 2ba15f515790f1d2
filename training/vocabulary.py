"""Whisper's vocabulary, and the compact one that the loss is computed over.

The model has all 51865 tokens, but only a few hundred text tokens occur in the grammar. The training uses
*classes*:

    0 .. T-1           the text tokens that the grammar uses, and the special tokens
    T .. T+1500        the timestamps <|0.00|> .. <|30.00|>
    T+1501             all other tokens, which share one embedding row

Because the rows of the last class are equal, the compact softmax equals the softmax over the complete
vocabulary if log(count) is added to its logit.
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
# Targets for silence: after <|notimestamps|>, Whisper's decoding may not end immediately. The probability
# is spread over these texts.
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
    """Return the tokens of one whitespace-separated word, with the space before it."""
    return tuple(tokenizer().encode(" " + word))


def text_tokens(text: str) -> list[int]:
    """Return the tokens of a sentence, encoded with a leading space."""
    return [token for word in text.split() for token in word_tokens(word)]


def nothing_tokens() -> list[int]:
    """Return the texts of :data:`NOTHING` that are single tokens, as token ids."""
    encoded = [tokenizer().encode(text) for text in NOTHING]
    return sorted({tokens[0] for tokens in encoded if len(tokens) == 1})


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that have an embedding row of their own, sorted, without timestamps."""

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
        """Number of tokens that share the last class."""
        return N_VOCAB - N_TIMES - len(self.tokens)

    def class_of(self) -> dict[int, int]:
        """Return token id -> class, for timestamps and for tokens with a row of their own."""
        classes = {token: i for i, token in enumerate(self.tokens)}
        return classes | {TIME_BEGIN + i: self.first_time + i for i in range(N_TIMES)}

    @classmethod
    def of_words(cls, words: list[str]) -> Vocabulary:
        """Return the vocabulary of a list of words, with their capitals and punctuation."""
        special = {EOT, SOT, EN, TRANSCRIBE, SOT_PREV, NO_SPEECH, NO_TIMESTAMPS}
        used = {token for word in words for token in word_tokens(word)}
        return cls(tuple(sorted(used | special | set(nothing_tokens()))))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.tokens))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        return cls(tuple(json.loads(path.read_text())))
