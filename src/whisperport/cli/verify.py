"""`whisperport verify`"""

import sys
from pathlib import Path

import click

from whisperport.bundle import Bundle
from whisperport.cli.checks_table import print_checks, print_failures
from whisperport.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_note,
    print_warning,
    stages,
)
from whisperport.cli.evidence_words import verified_words
from whisperport.cli.options import (
    as_json,
    run_option,
    run_option_words,
    run_options_help,
    run_options_of,
    threads,
    trust,
)
from whisperport.verification.bundle_check import verify as run_verify
from whisperport.verification.recording import verify_and_record


@click.command(
    short_help="Run a bundle on the reference it carries, and compare.", epilog=run_options_help()
)
@click.argument("bundle", type=click.Path(path_type=Path))
@threads
@run_option
@trust
@click.option(
    "--record",
    is_flag=True,
    help="Add the result to the bundle's manifest, as evidence that its files ran on this machine",
)
@as_json
def verify(
    bundle: Path,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    record: bool,
    as_json: bool,
) -> None:
    """Run a bundle on the reference it carries: arrays, tokens, words, isolation.

    Needs no torch beyond what the bundle's targets need. Exits 1 if anything differs. The manifest of a
    bundle says what was run where; `--record` adds this machine, for example the board.

    \b
    Example:
      $ whisperport verify build/tiny-xnnpack
    """
    opened = Bundle.open(bundle)
    with stages() as progress:
        run = run_options_of(threads, run_options, trust=trust)
        report = (verify_and_record if record else run_verify)(opened, run=run, progress=progress)
    if as_json:
        print_json(report.to_json())
    else:
        print_checks(report.checks)
        print_failures(report.failures())
        how = f" ({', '.join(run_options)})" if run_options else ""  # a stand-in is no chip
        print_lines("", f"{bundle}: {'verified' if report else 'NOT VERIFIED'}{how}")
    if record:
        print_note(f"recorded in {bundle}: {verified_words(Bundle.open(bundle).manifest)}")
    if opened.manifest.failed:
        print_warning("this bundle was written with --allow-unverified")
    if not report:
        sys.exit(1)
    same = run_option_words(run_options, trust=trust)
    print_next("transcribe", "talk.mp3", "--bundle", bundle, *same)
