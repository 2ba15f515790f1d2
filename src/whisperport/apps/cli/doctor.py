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
from whisperport.build.doctor import Finding, devices, examine
from whisperport.errors import CheckpointError
from whisperport.program.execution_providers import Device
from whisperport.speech.data import embedded_model
from whisperport.verification.machine import machine

CORE = "the core"


@click.command(
    cls=Verb,
    short_help="Show which packages and devices are here, and how to install packages that are missing.",
)
@as_json
def doctor(as_json: bool) -> None:
    """Show which packages and devices are here, and how to install packages that are missing.

    The devices are those of ONNX Runtime's execution providers; `transcribe --run-option
    onnxruntime.provider=NAME --run-option onnxruntime.device=KIND` uses one.

    The exit status is 1 if a package that whisperport always needs is missing, or the model that comes
    with whisperport is damaged.

    \b
    Examples:
      $ whisperport doctor
      $ whisperport doctor --json
    """
    findings, damage, listed = examine(), _model_error(), devices()
    if as_json:
        packages = [asdict(finding) for finding in findings]
        state = damage.what if damage else "complete"
        print_json(
            {
                "machine": machine(),
                "packages": packages,
                "devices": listed if isinstance(listed, str) else [asdict(d) for d in listed],
                "embedded_model": state,
            }
        )
    else:
        for name, value in machine().items():
            line = f"{name.replace('_', ' '):15} {value}"
            print_lines(
                *textwrap.wrap(line, WIDTH, subsequent_indent=" " * 16, break_on_hyphens=False)
            )
        print_lines(f"{'embedded model':15} {'damaged or missing' if damage else 'complete'}", "")
        _print_packages(findings)
        _print_devices(listed)
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


def _print_devices(devices: Sequence[Device] | str) -> None:
    """Print one row per device of an execution provider, or why they are not known."""
    print_lines("")
    if isinstance(devices, str):
        print_lines(*textwrap.wrap(f"ONNX Runtime's devices are not known: {devices}", WIDTH))
        return
    print_table(
        ("execution provider", "device", "kind", "from"),
        [(d.provider, d.name, d.kind, f"{d.origin} {d.version}".strip()) for d in devices],
    )


def _model_error() -> CheckpointError | None:
    """The error of unpacking the model that comes with the package, if it is damaged or missing."""
    try:
        embedded_model.check_model()
    except CheckpointError as error:
        return error
    return None
