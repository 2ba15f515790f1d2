"""Whisper's English text normalizer: the rules for English that published word error rates use.

The rules come from the package `whisper-normalizer`. It adds four rules that openai-whisper does not have:
one turns "cause" into "because", also in "the cause of the fire". These four are removed here, so that
the result equals openai-whisper's.
"""

from collections.abc import Callable
from functools import cache

from whisperport.text import normalize

_ADDED_BY_PACKAGE = (r"\bcause\b", r"\bdunno\b", r"\bkinda\b", r"\bsorta\b")


def normalize_english(text: str) -> str:
    """Normalize English text as openai-whisper's `EnglishTextNormalizer` does.

    Contractions are expanded, numbers are written in digits and British spelling becomes American. Case,
    punctuation, text in brackets and words such as "um" are removed. "I'll take twenty-five colours"
    becomes "i will take 25 colors".

    Source: Radford et al. 2022, appendix C; openai-whisper 20250625, `whisper/normalizers/english.py`.
    """
    try:
        return _normalizer()(text).strip()
    except AssertionError:  # a number of more than 4300 digits, which Python does not convert
        return normalize(text)


@cache
def _normalizer() -> Callable[[str], str]:
    from whisper_normalizer.english import EnglishTextNormalizer  # 0.1 s, only where it is needed

    normalizer = EnglishTextNormalizer()
    for pattern in _ADDED_BY_PACKAGE:
        normalizer.replacers.pop(pattern, None)
    apply: Callable[[str], str] = normalizer
    return apply
