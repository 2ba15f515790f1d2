"""Range checks for numbers that a user gives."""

import math

from whisperport.errors import UsageError

# ONNX Runtime and XNNPACK ran with 1024 threads, in 0.6 GB and 0.4 GB of memory; 100,000 crash both.
MAX_THREADS = 1024
MAX_REPEAT = 10_000  # runs of a measurement; more are taken as a mistake


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Check that `value` is None or lies within `low` to `high`, both included. NaN is out of range.

    Raises:
        UsageError: `value` is out of range; the message names `name`.
    """
    if value is not None and not low <= value <= high:
        raise UsageError(
            f"`{name}` is {value}",
            why=f"expected {low} or more" if high == math.inf else f"expected {low} to {high}",
            hint="give a number in this range",
        )
