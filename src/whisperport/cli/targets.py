"""`whisperport targets`"""

from dataclasses import asdict

import click

from whisperport.cli.console import print_json, print_next, print_table
from whisperport.cli.options import as_json
from whisperport.doctor import is_installed
from whisperport.targets import TARGETS


@click.command(short_help="List the targets, and what was proven of each.")
@as_json
def targets(as_json: bool) -> None:
    """List the targets, what was proven of each, and what is installed here.

    \b
    Example:
      $ whisperport targets
    """
    specs = [target.spec for target in TARGETS]
    if as_json:
        print_json([{**asdict(spec), "operators": sorted(spec.operators or ())} for spec in specs])
        return
    print_table(
        ("target", "what", "proven", "lowers here", "runs here"),
        [
            (
                spec.name,
                spec.summary,
                spec.status,
                "yes" if is_installed(spec.extra) else f"no: [{spec.extra}]",
                "yes" if is_installed(spec.run_extra) else f"no: [{spec.run_extra}]",
            )
            for spec in specs
        ],
    )
    lowers = next((spec.name for spec in specs if is_installed(spec.extra)), None)
    if lowers:
        print_next("export", "default", "--target", lowers, "--out", "build/default")
    else:
        print_next("doctor")
