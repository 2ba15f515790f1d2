"""Words and numbers for the results of `bench`, as its text and its page show them."""

from whisperport.apps.bench.transcribing import BenchResult
from whisperport.verification import TextErrors

UNKNOWN = "not measured"
NORMALIZED = " (Whisper normalizer)"


def acceptance_value(value: float | None, unit: str) -> str:
    """Return a value of the acceptance table with its unit."""
    if value is None:
        return UNKNOWN
    return {"ms": f"{value:.2f} ms", "clips": f"{value:.0f}", "share": f"{value:.2%}"}[unit]


def rate_name(result: BenchResult) -> str:
    """Name of the error rate; bundles that are compared share it, since they share the audio."""
    unit = "words" if result.errors is None else result.errors.unit
    return f"{unit.removesuffix('s')} error rate"


def rate(errors: TextErrors | None) -> str:
    """Return an error rate."""
    return UNKNOWN if errors is None else f"{errors.rate:.1%}"


def rate_in_full(errors: TextErrors | None) -> str:
    """Return an error rate with what was counted."""
    if errors is None:
        return f"{UNKNOWN}: the correct transcript is not known; give it with --transcript"
    return f"{rate(errors)} ({errors.errors} errors in {errors.length} {errors.unit})"


def memory(result: BenchResult) -> str:
    """Return the peak memory."""
    if result.peak_memory_mib is None:
        return UNKNOWN
    return f"{result.peak_memory_mib:.0f} MiB, in a separate process that only transcribes"
