"""Time one thing, so that somebody else can repeat it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of n runs after the warm-up."""

    median_ms: float
    best_ms: float
    p90_ms: float
    n: int


def measure(run: Callable[[], object], *, warmup: int = 2, n: int = 10) -> Timing:
    """Time `run`, which must return only once its result is ready.

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
