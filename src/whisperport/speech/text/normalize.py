"""Normalize text for error rates, with the basic normalization of Whisper's paper.

Source: Radford et al. 2022, appendix C, for languages other than English. The result equals
    openai-whisper's
`BasicTextNormalizer`, except for spaces at both ends. The paper's rules for English (numbers, contractions,
British spelling) are not part of this module, because they need large tables.
"""

import re
import unicodedata
from functools import cache
from typing import Any

_BRACKETED = re.compile(r"[<\[][^>\]]*[>\]]")  # [music], <unk>
_PARENTHESISED = re.compile(r"\([^)]+\)")  # (laughs)


def normalize(text: str, *, split_letters: bool = False) -> str:
    """Normalize text: lower case, no annotations in brackets, spaces for marks, symbols and punctuation.

    "Don't stop [music] — 5 %!" becomes "don t stop 5". Normalizing twice changes nothing more.

    Args:
        text: any text.
        split_letters: whether to put a space between any two letters, for languages without spaces.
    """
    text = _without(_BRACKETED, ">]", text.lower())
    text = _without(_PARENTHESISED, ")", text)
    kept = (
        " " if unicodedata.category(char)[0] in "MSP" else char
        for char in unicodedata.normalize("NFKC", text)
    )
    words = "".join(kept).lower().split()
    if split_letters:
        words = [letter for word in words for letter, _ in _letters().pre_tokenize_str(word)]
    return " ".join(words)


@cache
def _letters() -> Any:
    r"""Return what splits a word into letters, of several code points each; `re` has no `\X`."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    return Split(Regex(r"\X"), "isolated")


def _without(pattern: re.Pattern[str], closing: str, text: str) -> str:
    """Remove matches of a pattern that ends in one of the `closing` characters."""
    # There is no match after the last closing bracket, and a search there takes quadratic time.
    end = 1 + max(text.rfind(char) for char in closing)
    return pattern.sub("", text[:end]) + text[end:]
