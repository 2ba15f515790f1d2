"""Measure the time of one function over several runs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of `n` runs after the warm-up, in milliseconds."""

    median_ms: float
    best_ms: float
    p90_ms: float  # 90th percentile
    n: int


def measure(run: Callable[[], object], *, warmup: int = 2, n: int = 10) -> Timing:
    """Measure the time of `run`, which must not return before its result is ready.

    Args:
        warmup: number of runs before the measured ones.
        n: number of measured runs.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"`n` is {n}; expected 1 or more")
    for _ in range(warmup):
        run()
    times = sorted(_milliseconds(run) for _ in range(n))
    return Timing(statistics.median(times), times[0], times[min(n - 1, round(0.9 * n))], n)


def _milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)
