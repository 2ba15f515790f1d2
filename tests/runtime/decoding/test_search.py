"""The next token: the largest of a row, or a sampled one; and how often a row is copied for it."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from whisperport.runtime.decoding.search import Beams, Candidate, Sampling, numpy_sampler, top
from whisperport.runtime.engine.scores import Scores

V = 51_865  # multilingual Whisper's vocabulary
ROW = 4 * V  # bytes


def logits(n: int = V, seed: int = 0) -> np.ndarray:
    """A row after the rules: a third of its logits is -inf."""
    generator = np.random.default_rng(seed)
    row = (4 * generator.standard_normal(n)).astype(np.float32)
    row[generator.random(n) < 0.3] = -np.inf
    return row


rows = hnp.arrays(
    np.float32,
    st.integers(1, 2000),
    elements=st.sampled_from([-np.inf, *np.linspace(-30, 30, 13).tolist()]),
)


@given(rows, st.integers(1, 12))
def test_the_top_are_the_largest_and_of_equals_the_first(row: np.ndarray, count: int) -> None:
    count = min(count, row.size)

    found = top(row, count)

    assert found.tolist() == np.argsort(-row, kind="stable")[:count].tolist()


def test_the_top_of_a_whole_vocabulary_are_found() -> None:
    for seed in range(20):
        row = logits(seed=seed)
        assert top(row, 6).tolist() == np.argsort(-row, kind="stable")[:6].tolist()


def test_the_top_of_what_is_no_number_are_still_so_many() -> None:
    row = np.full(V, np.nan, np.float32)

    assert len(set(top(row, 6).tolist())) == 6


def test_tokens_are_sampled_as_often_as_they_are_probable() -> None:
    """1000 tokens in several blocks, 20,000 samples; within five standard deviations."""
    row = np.full(1000, -np.inf, np.float32)
    said = [0, 3, 255, 256, 700, 999]
    row[said] = [1.0, 2.0, 0.0, 2.5, 1.5, 0.5]
    weights = np.exp(row.astype(np.float64))
    expected = weights / weights.sum()

    sampled = numpy_sampler(np.random.default_rng(0))(np.broadcast_to(row, (20_000, 1000)))

    counts = np.bincount(sampled, minlength=1000)
    deviation = np.sqrt(20_000 * expected * (1 - expected))
    assert (np.abs(counts - 20_000 * expected) <= 5 * deviation).all()
    assert set(np.flatnonzero(counts)) == set(said)


class Uniform:
    """A generator that returns the given number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@given(rows, st.sampled_from([0.0, 1e-12, 0.25, 0.5, 0.999999, 1 - 2**-53]))
def test_tokens_with_probability_zero_are_never_sampled(row: np.ndarray, uniform: float) -> None:
    row[0] = 0.0

    (token,) = numpy_sampler(Uniform(uniform))(row[None])  # type: ignore[arg-type]

    assert np.isfinite(row[token])


def test_the_same_seed_draws_the_same_tokens() -> None:
    first, second = (numpy_sampler(np.random.default_rng(7)) for _ in range(2))

    assert [first(logits()[None]) for _ in range(20)] == [second(logits()[None]) for _ in range(20)]


@pytest.mark.parametrize(
    "search",
    [
        Sampling(0, 0.0, 1, None),
        Sampling(0, 0.7, 3, numpy_sampler(np.random.default_rng(0))),
        Beams(0, 3, 1.0),
    ],
    ids=["greedy", "sampled", "beams"],
)
def test_each_token_has_its_part_of_the_log_probability(search: Sampling | Beams) -> None:
    candidates = [Candidate() for _ in range(search.width)]
    for step in range(4):
        rows = [logits(7, seed=10 * step + beam) for beam in range(len(candidates))]
        for row in rows:
            row[0] = 8.0 * step - 12  # the end becomes probable
        candidates, _, _ = search.advance(candidates, [Scores(row) for row in rows])

    finished = search.finish(candidates)

    assert any(each.ended for each in finished)
    for each in finished:
        assert len(each.logprobs) == len(each.tokens) > 0
        of_text = sum(each.logprobs)
        assert each.logprob < of_text if each.ended else each.logprob == pytest.approx(of_text)


@pytest.mark.parametrize(
    ("what", "make", "width", "copies"),
    [
        ("greedy", lambda: Sampling(50257, 0.0, 1, numpy_sampler(np.random.default_rng(0))), 1, 1),
        ("sampled", lambda: Sampling(50257, 0.4, 1, numpy_sampler(np.random.default_rng(0))), 1, 2),
        (
            "best of 5",
            lambda: Sampling(50257, 0.4, 5, numpy_sampler(np.random.default_rng(0))),
            5,
            6,
        ),
        ("beam 5", lambda: Beams(50257, 5, 1.0), 5, 1),
    ],
)
def test_no_row_is_copied_twice(
    what: str, make: Callable[[], Sampling | Beams], width: int, copies: int
) -> None:
    """Live copies: summing the probabilities needs one; sampling needs another one of all divided rows."""
    search = make()
    found = [Scores(logits(seed=seed)) for seed in range(width)]
    paths = [Candidate() for _ in range(width)]
    search.advance(paths, found)

    tracemalloc.start()
    make().advance([Candidate() for _ in range(width)], found)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < (copies + 0.6) * ROW
