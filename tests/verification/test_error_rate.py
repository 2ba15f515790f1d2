import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.speech.text import LANGUAGES
from whisperport.verification import TextErrors, bootstrap_interval, text_errors, unit_of

CHARACTERS = st.text("请在车站右转", max_size=12)
WORDS = st.lists(st.sampled_from(["ask", "not", "what", "your", "country"]), max_size=8)


@pytest.mark.parametrize(
    ("hypothesis", "reference", "errors"),
    [
        ("ask not what", "ask not what", TextErrors(0, 0, 0, 3)),
        ("ask now what", "ask not what", TextErrors(1, 0, 0, 3)),
        ("ask what", "ask not what", TextErrors(0, 1, 0, 3)),
        ("do ask not what", "ask not what", TextErrors(0, 0, 1, 3)),
        ("", "ask not what", TextErrors(0, 3, 0, 3)),
        ("", "", TextErrors(0, 0, 0, 0)),
        ("thank you", "", TextErrors(0, 0, 2, 0)),
        (" ASK, not:  What! ", "ask not what", TextErrors(0, 0, 0, 3)),
        ("...", "ask", TextErrors(0, 1, 0, 1)),
        ("thank you", "?!", TextErrors(0, 0, 2, 0)),
    ],
)
def test_errors_are_counted_by_kind(hypothesis: str, reference: str, errors: TextErrors) -> None:
    assert text_errors(hypothesis, reference) == errors


@pytest.mark.parametrize(
    ("hypothesis", "reference", "errors"),
    [
        ("请右转", "请右转。", (0, 0, 0, 3)),
        ("请左转", "请 右转", (1, 0, 0, 3)),
        ("右转", "请右转", (0, 1, 0, 3)),
        ("请向右转", "请右转", (0, 0, 1, 3)),
        ("ドアを閉めて", "ドアを開めて", (1, 0, 0, 6)),
        ("３時 ABC", "3時 abc", (0, 0, 0, 5)),  # full width, and words of another script
        ("", "锁门", (0, 2, 0, 2)),
        ("谢谢", "", (0, 0, 2, 0)),
        ("ปิดประตู", "เปิดประตู", (0, 1, 0, 7)),  # marks above and below do not count
    ],
)
def test_characters_are_counted_where_words_have_no_spaces(
    hypothesis: str, reference: str, errors: tuple[int, int, int, int]
) -> None:
    assert text_errors(hypothesis, reference, "characters") == TextErrors(*errors, "characters")


def test_one_wrong_character_is_not_a_whole_sentence() -> None:
    hypothesis, reference = "请在车站左转然后直走", "请在车站右转然后直走"

    assert text_errors(hypothesis, reference, "words").rate == 1.0
    assert text_errors(hypothesis, reference, "characters").rate == 0.1


def test_characters_are_counted_for_the_languages_of_whisper_s_paper() -> None:
    counted = {code for code in LANGUAGES if unit_of(code) == "characters"}

    assert counted == {"zh", "ja", "th", "lo", "my", "yue"}


def test_a_rate_has_the_name_of_its_unit() -> None:
    assert TextErrors().name == "WER"
    assert TextErrors(unit="characters").name == "CER"


def test_words_and_characters_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="cannot add characters to words"):
        TextErrors(0, 0, 0, 3) + TextErrors(0, 0, 0, 3, "characters")


def test_the_rate_is_errors_per_reference_word() -> None:
    assert TextErrors(1, 2, 3, 12).rate == 0.5
    assert TextErrors(0, 0, 9, 3).rate == 3


def test_words_invented_in_silence_count_when_clips_are_added() -> None:
    silent, speech = text_errors("thank you", ""), text_errors("ask not", "ask not")

    assert silent.rate == math.inf
    assert text_errors("", "").rate == 0
    assert (silent + speech).rate == 1


def test_an_error_count_equals_the_edit_distance() -> None:
    """By the textbook's table, on 200 random pairs."""
    random = np.random.default_rng(0)
    for _ in range(200):
        a, b = ([f"w{i}" for i in random.integers(0, 4, random.integers(1, 9))] for _ in range(2))
        table = list(range(len(a) + 1))
        for j, word in enumerate(b, 1):
            diagonal, table[0] = table[0], j
            for i, other in enumerate(a, 1):
                cost = min(diagonal + (word != other), table[i - 1] + 1, table[i] + 1)
                diagonal, table[i] = table[i], cost

        assert text_errors(" ".join(a), " ".join(b)).errors == table[-1]


@given(WORDS, WORDS)
def test_counts_add_up_to_the_words_of_the_hypothesis(
    hypothesis: list[str], reference: list[str]
) -> None:
    found = text_errors(" ".join(hypothesis), " ".join(reference))

    assert found.length == len(reference)
    assert len(reference) - found.deletions + found.insertions == len(hypothesis)
    assert (found.errors == 0) == (hypothesis == reference)


@given(CHARACTERS, CHARACTERS)
def test_counts_add_up_to_the_characters_of_the_hypothesis(hypothesis: str, reference: str) -> None:
    found = text_errors(hypothesis, reference, "characters")

    assert found.length == len(reference)
    assert len(reference) - found.deletions + found.insertions == len(hypothesis)
    assert (found.errors == 0) == (hypothesis == reference)


def test_the_interval_holds_the_rate_and_is_the_same_for_the_same_seed() -> None:
    random = np.random.default_rng(0)
    clips = [TextErrors(int(n), 0, 0, 20) for n in random.integers(0, 5, 60)]
    total = sum(clips, TextErrors()).rate

    low, high = bootstrap_interval(clips, seed=1)

    assert low < total < high
    assert (low, high) == bootstrap_interval(clips, seed=1)
    # Normal approximation: 1.96 standard errors to each side; 1,000 draws give it within 15 %.
    half = 1.96 * np.std([clip.rate for clip in clips]) / math.sqrt(60)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)


def test_clips_are_weighted_by_their_words() -> None:
    clips = [TextErrors(0, 0, 0, 1000), TextErrors(1, 0, 0, 1)]

    assert bootstrap_interval(clips, seed=0) == (0.0, 1.0)
    assert sum(clips, TextErrors()).rate < 0.001


def test_a_draw_of_silent_clips_may_be_infinite_but_never_a_nan() -> None:
    low, high = bootstrap_interval([TextErrors(0, 0, 2, 0), TextErrors(0, 0, 0, 5)], seed=0)

    assert low == 0
    assert high == math.inf


@pytest.mark.parametrize(("clips", "n"), [([], 1000), ([TextErrors(0, 0, 0, 1)], 0)])
def test_nothing_to_draw_from_is_an_error(clips: list[TextErrors], n: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval(clips, seed=0, n=n)


def test_the_first_use_shows_no_warning_of_the_packages_source(tmp_path: Path) -> None:
    call = "from whisperport.verification.error_rate import normalize_english as n; print(n('Hi'))"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}  # compiles the package again
    command = [sys.executable, "-W", "error::SyntaxWarning", "-c", call]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    assert done.stdout.strip() == "hi", done.stderr
