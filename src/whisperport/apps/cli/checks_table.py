"""A table of comparisons, and the rules that they must meet."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from whisperport.apps.cli.console import print_lines, print_table
from whisperport.build.layouts.record import Verification
from whisperport.program.checks import Check


def print_checks(checks: Sequence[Check]) -> None:
    """Print one row per comparison, then the rules."""
    print_table(
        ("level", "program", "compared", "measured", "result"),
        [
            (c.level, c.program, c.what, measured(c.value), "pass" if c.passed else "FAIL")
            for c in checks
        ],
    )
    print_lines("")
    rules = dict.fromkeys((check.level, check.rule) for check in checks)
    print_table(("level", "rule"), list(rules))


def print_failures(failures: Sequence[str]) -> None:
    """Print the failed comparisons with their reasons."""
    for failure in failures:
        first, *rest = str(failure).split("\n")
        print_lines("", f"FAIL: {first}", *rest)


def print_in_app(path: Path, verification: Verification | None) -> None:
    """Print what an app returned with its files; None: it did not run."""
    if verification is None:
        print_lines(f"{path}: NOT VERIFIED")
        return
    print_checks(verification.checks)
    print_failures(verification.failures())
    packages = ", ".join(f"{name} {version}" for name, version in verification.versions.items())
    print_lines("", f"{path}: {'verified' if verification else 'NOT VERIFIED'} with {packages}")


# The most important numbers and their formats; `--json` has all of them.
_SHOWN = {
    "sqnr_db": "SQNR {:.0f} dB",
    "speech_sqnr_db": "{:.0f} dB in speech",
    "max_relative": "max error {:.1e} of max",
    "sum_error": "log of the sum differs by {:.1e}",
    "part_of_bound": "{:.0%} of the bound",
    "hard_flips": "{:.0f} hard flips",
    "mean_kl": "mean KL {:.1e}",
    "n_same": "{:.0f} equal tokens",
    "wer": "WER {:.2%}",
    "reference_wer": "reference's {:.2%}",
    "cer": "CER {:.2%}",
    "reference_cer": "reference's {:.2%}",
    "avg_logprob_change": "log-probability changed by {:g}",
}


def measured(value: Mapping[str, float]) -> str:
    """The most important numbers of a comparison, in words."""
    return ", ".join(text.format(value[name]) for name, text in _SHOWN.items() if name in value)
