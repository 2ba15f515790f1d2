"""Text made comparable, against openai-whisper's basic normaliser."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from whisper.normalizers import BasicTextNormalizer

from whisperport.speech.text import normalize

from .samples import SAMPLES

TEXT = st.text() | st.text("ab <>[]() .,'é")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop [music] — 5 %!", "don t stop 5"),
        ("  Hello,\n(laughs) <unk> WORLD ", "hello world"),
        ("Ünïcode ﬁne", "ünïcode fine"),
        ("...", ""),
        ("a (b", "a b"),
    ],
)
def test_case_punctuation_and_annotations_go(text: str, expected: str) -> None:
    assert normalize(text) == expected


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_normalized_as_by_openai(name: str) -> None:
    assert normalize(SAMPLES[name]) == BasicTextNormalizer()(SAMPLES[name]).strip()


@given(TEXT)
@example("(a]<b)>c")
@settings(max_examples=500)
def test_any_text_is_normalized_as_by_openai(text: str) -> None:
    assert normalize(text) == BasicTextNormalizer()(text).strip()


@pytest.mark.parametrize("name", SAMPLES)
def test_letters_are_split_as_by_openai(name: str) -> None:
    split = normalize(SAMPLES[name], split_letters=True)

    assert split == BasicTextNormalizer(split_letters=True)(SAMPLES[name]).strip()


# Joiners of letters, halves of Hangul syllables; U+11A3A of Zanabazar Square is left out: Unicode
# let it join what follows in version 10, and Oniguruma does not.
JOINED = st.text("a \u200d\u200c\u1100\u1161\u11a8\ud7b0한ำะ日\u3099\n")


@given(st.text(st.characters(exclude_characters="\U00011a3a", codec="utf-8")) | JOINED)
@settings(max_examples=500)
def test_any_letters_are_split_as_by_openai(text: str) -> None:
    split = normalize(text, split_letters=True)

    assert split == BasicTextNormalizer(split_letters=True)(text).strip()


@given(TEXT)
@settings(max_examples=300)
def test_normalizing_again_changes_nothing(text: str) -> None:
    once = normalize(text)

    assert normalize(once) == once


@pytest.mark.parametrize("text", ["<" * 100_000, "(" * 100_000, "<a>" * 30_000 + "[" * 70_000])
def test_open_brackets_take_linear_time(text: str) -> None:
    start = time.perf_counter()
    normalize(text)

    assert time.perf_counter() - start < 2  # measured: 0.02 s; quadratic would take minutes
