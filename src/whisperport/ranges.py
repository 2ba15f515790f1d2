"""Numbers that a user gives, held against their range."""

from whisperport.errors import UsageError

# ONNX Runtime and XNNPACK were seen to run with as many, in 0.6 GB and 0.4 GB; 100,000 crash both.
MAX_THREADS = 1024
MAX_REPEAT = 10_000  # a measurement that runs longer is a mistake


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raises UsageError where a value is given and is not within `low` to `high`; NaN is not."""
    if value is not None and not low <= value <= high:
        raise UsageError(
            f"`{name}` is {value}",
            why=f"expected {low} to {high}",
            hint="give a number in that range",
        )
