"""A table of comparisons, and the rules that they must meet."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from whisperport.apps.cli.console import print_lines, print_note, print_table
from whisperport.build.layouts.record import LayoutRecord
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


def print_in_app(written: Mapping[Path, LayoutRecord]) -> None:
    """Print what is known of the files of an app at each path, and what the app returned if it ran."""
    if checks := [check for record in written.values() for check in record.checks]:
        print_checks(checks)
    for record in written.values():
        print_failures(record.failures())
        if record.not_compared:
            print_note(f"the files were not compared without the app: {record.not_compared}")
    print_lines("")
    for path, record in written.items():
        versions = {} if record.verification is None else record.verification.versions
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
        result = "verified" if record.is_verified else "NOT VERIFIED"
        print_lines(f"{path}: {result} {f'with {packages}' if packages else f'in {record.app}'}")


# The most important numbers and their formats; `--json` has all of them.
_SHOWN = {
    "sqnr_db": "SQNR {:.0f} dB",
    "speech_sqnr_db": "{:.0f} dB in speech",
    "max_relative": "max error {:.1e} of max",
    "sum_error": "log of the sum differs by {:.1e}",
    "part_of_bound": "{:.0%} of the bound",
    "hard_flips": "{:.0f} hard flips",
    "mean_kl": "mean KL {:.1e}",
    "tensors": "{:.0f} tensors",
    "n_same": "{:.0f} equal tokens",
    "wer": "WER {:.2%}",
    "reference_wer": "reference's {:.2%}",
    "cer": "CER {:.2%}",
    "reference_cer": "reference's {:.2%}",
    "part_of_words": "{:.0%} of the words",
    "avg_logprob_change": "log-probability changed by {:g}",
}


def measured(value: Mapping[str, float]) -> str:
    """The most important numbers of a comparison, in words."""
    return ", ".join(text.format(value[name]) for name, text in _SHOWN.items() if name in value)
