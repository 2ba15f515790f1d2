"""`whisperport doctor`"""

import sys
from dataclasses import asdict

import click

from whisperport.bundle import Bundle
from whisperport.cli.console import print_json, print_next, print_table
from whisperport.cli.options import as_json
from whisperport.doctor import examine
from whisperport.errors import BundleError
from whisperport.transcription import default_bundle
from whisperport.verification.machine import machine


@click.command()
@as_json
def doctor(as_json: bool) -> None:
    """Say what is installed, what is missing, and how to get it. Exits 1 if the core is damaged."""
    findings, bundle = examine(), _bundle_state()
    if as_json:
        packages = [asdict(finding) for finding in findings]
        print_json({"machine": machine(), "packages": packages, "default bundle": bundle})
    else:
        for name, value in machine().items():
            print(f"{name:14}{value}")
        print(f"{'bundle':14}{bundle}\n")
        print_table(
            ("package", "version", "needed for", "to install"),
            [(f.package, f.version, f.needed_for, f.fix) for f in findings],
        )
    if bundle != "whole" or any(f.fix and f.needed_for == "the core" for f in findings):
        sys.exit(1)
    print_next("whisperport targets")


def _bundle_state() -> str:
    try:
        Bundle.open(default_bundle())
    except BundleError as error:
        return error.what
    return "whole"
