"""`whisperport verify`"""

import sys
from pathlib import Path

import click

from whisperport.bundle import Bundle
from whisperport.cli.console import print_json, print_next, print_table, stages, stderr
from whisperport.cli.options import as_json, run_option, run_options_of, threads
from whisperport.verification.bundle_check import verify as run_verify


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@threads
@run_option
@as_json
def verify(bundle: Path, threads: int | None, run_options: tuple[str, ...], as_json: bool) -> None:
    """Run a bundle on the reference it carries: arrays, tokens, words, isolation.

    Needs no torch beyond what the bundle's targets need. Exits 1 if anything differs.

    \b
    Example:
      $ whisperport verify build/tiny-xnnpack
    """
    opened = Bundle.open(bundle)
    with stages() as say:
        report = run_verify(opened, run=run_options_of(threads, run_options), say=say)
    if as_json:
        print_json(report.to_json())
    else:
        rows = report.summary()
        print_table(
            ("level", "program", "what", "measured", "result"),
            [
                tuple(row[k] for k in ("level", "program", "what", "measured", "result"))
                for row in rows
            ],
        )
        print(f"\n{bundle}: {'verified' if report else 'NOT VERIFIED'}")
    if not opened.manifest.verified:
        stderr.print("warning: this bundle was written with --allow-unverified")
    if not report:
        sys.exit(1)
    print_next(f"whisperport transcribe talk.mp3 --bundle {bundle}")
