"""Text made comparable for word error rates: the basic normalisation of Whisper's paper.

Source: Radford et al. 2022, appendix C, for languages other than English; the same as
openai-whisper's `BasicTextNormalizer`, apart from the spaces at both ends. The paper's rules for
English (numbers, contractions, British spelling) are left out: their tables outweigh the rest.
"""

import re
import unicodedata

_BRACKETED = re.compile(r"[<\[][^>\]]*[>\]]")  # [music], <unk>
_PARENTHESISED = re.compile(r"\([^)]+\)")  # (laughs)


def normalize(text: str) -> str:
    """Lower case, without annotations in brackets; marks, symbols and punctuation become spaces.

    "Don't stop [music] — 5 %!" becomes "don t stop 5". Idempotent.
    """
    text = _without(_BRACKETED, ">]", text.lower())
    text = _without(_PARENTHESISED, ")", text)
    kept = (
        " " if unicodedata.category(char)[0] in "MSP" else char
        for char in unicodedata.normalize("NFKC", text)
    )
    return " ".join("".join(kept).lower().split())


def _without(pattern: re.Pattern[str], closing: str, text: str) -> str:
    # Behind the last closing bracket nothing can match, and looking is quadratic in the open ones.
    end = 1 + max(text.rfind(char) for char in closing)
    return pattern.sub("", text[:end]) + text[end:]
