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
    RUN_OPTIONS,
    as_json,
    run_option,
    run_option_arguments,
    run_options_of,
    threads,
    trust,
)
from whisperport.cli.verb import Verb, option
from whisperport.verification.bundle_check import verify as run_verify
from whisperport.verification.record_evidence import verify_and_record


@click.command(
    cls=Verb,
    short_help="Run a bundle and compare its outputs with its reference.",
    target_options=RUN_OPTIONS,
)
@click.argument("bundle", type=click.Path(path_type=Path))
@option(
    "--record",
    group="Verification",
    is_flag=True,
    help="Add the result to the bundle's manifest, as evidence that its files ran on this machine",
)
@as_json
@threads
@run_option
@trust
def verify(
    bundle: Path,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    record: bool,
    as_json: bool,
) -> None:
    """Run a bundle's programs on this machine and compare them with its reference.

    The reference is what PyTorch computed for a few audio clips when the bundle was exported; it is stored
    in the bundle, with the clips.

    \b
    Four levels are compared:
      arrays     the outputs of each program
      tokens     the tokens decoded from each of these clips
      words      the transcripts of all clips, by their word error rate against the true text
      isolation  the result of a clip, with and without other clips before it

    PyTorch is needed only if a runtime of the bundle needs it. The exit status is 1 if a comparison
    fails.

    \b
    Examples:
      $ whisperport verify build/tiny-xnnpack
      $ whisperport verify build/tiny-xnnpack --record
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
        how = f" ({', '.join(run_options)})" if run_options else ""
        print_lines("", f"{bundle}: {'verified' if report else 'NOT VERIFIED'}{how}")
    if record:
        print_note(f"recorded in {bundle}: {verified_words(Bundle.open(bundle).manifest)}")
    if opened.manifest.failed:
        print_warning(
            "this bundle failed its verification at export; it was written with --allow-unverified"
        )
    if not report:
        sys.exit(1)
    same = run_option_arguments(run_options, trust=trust)
    print_next("transcribe", "talk.mp3", "--bundle", bundle, *same)
