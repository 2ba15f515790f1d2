"""The time of n runs after a warm-up."""

import time

import pytest

from whisperport.apps.bench.measure import measure


def test_it_runs_as_often_as_it_says() -> None:
    runs: list[None] = []

    timing = measure(lambda: runs.append(None), warmup=3, n=7)

    assert len(runs) == 10
    assert timing.n == 7


def test_the_warm_up_is_not_counted() -> None:
    slow = iter([0.05, 0.05])

    timing = measure(lambda: time.sleep(next(slow, 0.0)), warmup=2, n=5)

    assert timing.best_ms <= timing.median_ms <= timing.p90_ms < 50


def test_milliseconds_are_milliseconds() -> None:
    timing = measure(lambda: time.sleep(0.01), warmup=0, n=3)

    assert timing.best_ms >= 10


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="`n` is 0"):
        measure(lambda: None, n=0)
