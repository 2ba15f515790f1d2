"""Text made comparable for error rates: the basic normalisation of Whisper's paper.

Source: Radford et al. 2022, appendix C, for languages other than English; the same as
openai-whisper's `BasicTextNormalizer`, apart from the spaces at both ends. The paper's rules for
English (numbers, contractions, British spelling) are left out: their tables outweigh the rest.
"""

import re
import unicodedata

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

_BRACKETED = re.compile(r"[<\[][^>\]]*[>\]]")  # [music], <unk>
_PARENTHESISED = re.compile(r"\([^)]+\)")  # (laughs)
# What a reader takes for one letter, which may be several code points; `re` has no `\X`.
_LETTERS = Split(Regex(r"\X"), "isolated")


def normalize(text: str, *, split_letters: bool = False) -> str:
    """Lower case, without annotations in brackets; marks, symbols and punctuation become spaces.

    "Don't stop [music] — 5 %!" becomes "don t stop 5". Idempotent.

    Args:
        split_letters: put a space between any two letters, for languages written without spaces.
    """
    text = _without(_BRACKETED, ">]", text.lower())
    text = _without(_PARENTHESISED, ")", text)
    kept = (
        " " if unicodedata.category(char)[0] in "MSP" else char
        for char in unicodedata.normalize("NFKC", text)
    )
    words = "".join(kept).lower().split()
    if split_letters:
        words = [letter for word in words for letter, _ in _LETTERS.pre_tokenize_str(word)]
    return " ".join(words)


def _without(pattern: re.Pattern[str], closing: str, text: str) -> str:
    # Behind the last closing bracket nothing can match, and looking is quadratic in the open ones.
    end = 1 + max(text.rfind(char) for char in closing)
    return pattern.sub("", text[:end]) + text[end:]
