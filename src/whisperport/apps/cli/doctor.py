"""`whisperport doctor`"""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

import click

from whisperport.apps.cli.console import (
    WIDTH,
    print_error,
    print_json,
    print_lines,
    print_next,
    print_table,
)
from whisperport.apps.cli.shared_options import as_json
from whisperport.apps.cli.verb import Verb
from whisperport.build.doctor import Finding, examine
from whisperport.errors import CheckpointError
from whisperport.speech.data import embedded_model
from whisperport.verification.machine import machine

CORE = "the core"


@click.command(
    cls=Verb,
    short_help="Show which packages are installed, and how to install those that are missing.",
)
@as_json
def doctor(as_json: bool) -> None:
    """Show which packages are installed, and how to install those that are missing.

    The exit status is 1 if a package that whisperport always needs is missing, or the model that comes
    with whisperport is damaged.

    \b
    Examples:
      $ whisperport doctor
      $ whisperport doctor --json
    """
    findings, damage = examine(), _model_error()
    if as_json:
        packages = [asdict(finding) for finding in findings]
        state = damage.what if damage else "complete"
        print_json({"machine": machine(), "packages": packages, "embedded_model": state})
    else:
        for name, value in machine().items():
            line = f"{name.replace('_', ' '):15} {value}"
            print_lines(
                *textwrap.wrap(line, WIDTH, subsequent_indent=" " * 16, break_on_hyphens=False)
            )
        print_lines(f"{'embedded model':15} {'damaged or missing' if damage else 'complete'}", "")
        _print_packages(findings)
    if damage:
        print_error(damage)
    if damage or any(finding.fix and finding.needed_for == CORE for finding in findings):
        sys.exit(1)
    print_next("targets")


def _print_packages(findings: Sequence[Finding]) -> None:
    """Print one row per package, then how to install each missing one."""
    needed_for: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        needed_for.setdefault((finding.package, finding.version), []).append(finding.needed_for)
    print_table(
        ("package", "version", "needed for: [extra] targets"),
        [(*package, ", ".join(uses)) for package, uses in needed_for.items()],
    )
    missing = {finding.fix: finding.needed_for for finding in findings if finding.fix}
    for fix, use in missing.items():
        print_lines("", f"missing for {use}:", f"  {fix}")


def _model_error() -> CheckpointError | None:
    """The error of unpacking the model that comes with the package, if it is damaged or missing."""
    try:
        embedded_model.check_model()
    except CheckpointError as error:
        return error
    return None
