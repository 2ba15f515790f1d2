"""Whisper's English normalizer, and the word error rates that follow from it."""

import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from whisper.normalizers import EnglishTextNormalizer

from whisperport.verification import (
    TextErrors,
    Unit,
    text_errors,
    unit_of,
    whisper_text_errors,
)
from whisperport.verification.clips import ShippedAudio, shipped_audio
from whisperport.verification.error_rate import normalize_english

OPENAI = EnglishTextNormalizer()
TOKENS = (
    *("one", "twenty", "five", "hundred", "million", "point", "double", "half", "dollars", "cents"),
    *(
        "percent",
        "zero",
        "oh",
        "third",
        "twenties",
        "minus",
        "$",
        "€",
        "¢",
        "%",
        ".",
        ",",
        "'",
        "-",
    ),
    *("1,000", "4.5", "3rd", "1960s", "٣", "²", "½", "(", ")", "[", "]", "<", ">", "um", "colour"),
    *("cause", "kinda", "sorta", "dunno", "won't", "gonna", "Mr.", "he's", "I'd", "café", "\n"),
)


@pytest.mark.parametrize(
    ("hypothesis", "reference", "plain", "whisper"),
    [
        ("I'll wait", "I will wait", (1, 0, 0, 3), (0, 0, 0, 3)),
        ("it costs 25 dollars", "it costs twenty-five dollars", (1, 1, 0, 5), (0, 0, 0, 3)),
        ("set it to 25", "set it to twenty-five", (1, 1, 0, 5), (0, 0, 0, 4)),
        ("the colour grey", "the color gray", (2, 0, 0, 3), (0, 0, 0, 3)),
        ("um turn it off", "turn it off", (0, 0, 1, 3), (0, 0, 0, 3)),
        ("the cause", "the because", (1, 0, 0, 2), (1, 0, 0, 2)),
        ("turn it on", "turn it off", (1, 0, 0, 3), (1, 0, 0, 3)),
        ("thank you", "", (0, 0, 2, 0), (0, 0, 2, 0)),
    ],
)
def test_english_words_are_counted_after_whispers_normalizer(
    hypothesis: str,
    reference: str,
    plain: tuple[int, int, int, int],
    whisper: tuple[int, int, int, int],
) -> None:
    assert text_errors(hypothesis, reference) == TextErrors(*plain)
    assert whisper_text_errors(hypothesis, reference) == TextErrors(*whisper)


@pytest.mark.parametrize(
    ("language", "unit"), [("de", None), ("zh", None), ("en", "characters"), ("zh", "words")]
)
def test_the_basic_normalizer_serves_other_languages_and_characters(
    language: str, unit: Unit | None
) -> None:
    errors = whisper_text_errors("I'll 25 请左转", "I will 25 请右转", language, unit)

    expected = unit or unit_of(language)
    assert errors == text_errors("I'll 25 请左转", "I will 25 请右转", expected)


@given(
    st.lists(st.sampled_from(TOKENS)).map(" ".join) | st.lists(st.sampled_from(TOKENS)).map("".join)
)
@example("the cause of it, kinda, sorta, dunno")
@settings(max_examples=500)
def test_english_is_normalized_as_by_openai(text: str) -> None:
    assert normalize_english(text) == OPENAI(text).strip()


@pytest.mark.parametrize("clip", shipped_audio(), ids=lambda clip: clip.path.stem)
def test_shipped_transcripts_are_normalized_as_by_openai(clip: ShippedAudio) -> None:
    assert normalize_english(clip.text) == OPENAI(clip.text).strip()


def test_a_number_too_long_for_python_does_not_stop_the_count() -> None:
    assert whisper_text_errors("1" * 5000, "one").substitutions == 1


def test_the_tables_are_loaded_only_when_english_is_normalized() -> None:
    code = "import sys, whisperport.verification; sys.exit('whisper_normalizer' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
