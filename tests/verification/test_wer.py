import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.verification import WordErrors, bootstrap_interval, word_errors

WORDS = st.lists(st.sampled_from(["ask", "not", "what", "your", "country"]), max_size=8)


@pytest.mark.parametrize(
    ("hypothesis", "reference", "errors"),
    [
        ("ask not what", "ask not what", WordErrors(0, 0, 0, 3)),
        ("ask now what", "ask not what", WordErrors(1, 0, 0, 3)),
        ("ask what", "ask not what", WordErrors(0, 1, 0, 3)),
        ("do ask not what", "ask not what", WordErrors(0, 0, 1, 3)),
        ("", "ask not what", WordErrors(0, 3, 0, 3)),
        ("", "", WordErrors(0, 0, 0, 0)),
        ("thank you", "", WordErrors(0, 0, 2, 0)),
        (" ASK, not:  What! ", "ask not what", WordErrors(0, 0, 0, 3)),
        ("...", "ask", WordErrors(0, 1, 0, 1)),
        ("thank you", "?!", WordErrors(0, 0, 2, 0)),
    ],
)
def test_errors_are_counted_by_kind(hypothesis: str, reference: str, errors: WordErrors) -> None:
    assert word_errors(hypothesis, reference) == errors


def test_the_rate_is_errors_per_reference_word() -> None:
    assert WordErrors(1, 2, 3, 12).rate == 0.5
    assert WordErrors(0, 0, 9, 3).rate == 3


def test_words_invented_in_silence_count_when_clips_are_added() -> None:
    silent, spoken = word_errors("thank you", ""), word_errors("ask not", "ask not")

    assert silent.rate == math.inf
    assert word_errors("", "").rate == 0
    assert (silent + spoken).rate == 1


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

        assert word_errors(" ".join(a), " ".join(b)).errors == table[-1]


@given(WORDS, WORDS)
def test_counts_add_up_to_the_words_heard(heard: list[str], spoken: list[str]) -> None:
    found = word_errors(" ".join(heard), " ".join(spoken))

    assert found.n_words == len(spoken)
    assert len(spoken) - found.deletions + found.insertions == len(heard)
    assert (found.errors == 0) == (heard == spoken)


def test_the_interval_holds_the_rate_and_is_the_same_for_the_same_seed() -> None:
    random = np.random.default_rng(0)
    clips = [WordErrors(int(n), 0, 0, 20) for n in random.integers(0, 5, 60)]
    total = sum(clips, WordErrors()).rate

    low, high = bootstrap_interval(clips, seed=1)

    assert low < total < high
    assert (low, high) == bootstrap_interval(clips, seed=1)
    # Normal approximation: 1.96 standard errors to each side; 1,000 draws give it within 15 %.
    half = 1.96 * np.std([clip.rate for clip in clips]) / math.sqrt(60)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)


def test_clips_are_weighted_by_their_words() -> None:
    clips = [WordErrors(0, 0, 0, 1000), WordErrors(1, 0, 0, 1)]

    assert bootstrap_interval(clips, seed=0) == (0.0, 1.0)
    assert sum(clips, WordErrors()).rate < 0.001


def test_a_draw_of_silent_clips_may_be_infinite_but_never_a_nan() -> None:
    low, high = bootstrap_interval([WordErrors(0, 0, 2, 0), WordErrors(0, 0, 0, 5)], seed=0)

    assert low == 0
    assert high == math.inf


@pytest.mark.parametrize(("clips", "n"), [([], 1000), ([WordErrors(0, 0, 0, 1)], 0)])
def test_nothing_to_draw_from_is_an_error(clips: list[WordErrors], n: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval(clips, seed=0, n=n)
