"""`whisperport verify`"""

import sys
from pathlib import Path

import click

from whisperport.apps.cli.checks_table import print_checks, print_failures, print_in_app
from whisperport.apps.cli.console import (
    Argument,
    command_line,
    print_json,
    print_lines,
    print_next,
    print_note,
    print_warning,
    stages,
)
from whisperport.apps.cli.evidence_words import verified_words
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.provider_report import print_provider_report
from whisperport.apps.cli.shared_options import (
    RUN_OPTIONS,
    as_json,
    html_option,
    run_option,
    run_option_arguments,
    run_options_of,
    threads,
    trust,
)
from whisperport.apps.cli.verb import Verb, option
from whisperport.apps.cli.verify_page import verify_page
from whisperport.build.layouts.record import is_layout
from whisperport.build.layouts.verifying import verify_layout
from whisperport.program.bundle import Bundle
from whisperport.system.outputs import write_page
from whisperport.targets import RunOptions
from whisperport.verification.bundle_check import verify as run_verify
from whisperport.verification.providers import verify_each_program
from whisperport.verification.reference import Reference


@click.command(
    cls=Verb,
    short_help="Run a bundle, or the files of an app, and compare the outputs with the reference.",
    target_options=RUN_OPTIONS,
)
@click.argument("bundle", type=Given("bundle", "layout"))
@option(
    "--record",
    group="Verification",
    is_flag=True,
    help="Add the result to the bundle's manifest, as evidence that its files ran on this machine; of the "
    "files of an app, to their record",
)
@option(
    "--each-program",
    group="Verification",
    is_flag=True,
    help="Run each program alone on the execution provider of ONNX Runtime that the option "
    "onnxruntime.provider names, and compare it with the CPU provider",
)
@option(
    "--clip",
    "clips",
    group="Verification",
    multiple=True,
    metavar="NAME",
    show_default="all clips",
    help="Clip of the bundle's reference to verify with; may be repeated",
)
@html_option("the error of each program, and the words of each clip with its audio")
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
    each_program: bool,
    clips: tuple[str, ...],
    html: Path | None,
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

    With --each-program, every session is created in a process of its own, so that a crash is a result.
    The command shows which programs the provider can run, where their nodes ran, how exact and how stable
    their outputs are, and the time per run. It then recommends which programs to run there, and with which
    options. The inputs are those of one clip. The exit status is 1 if no program can run there.

    The files of an app, which `whisperport convert` writes, are verified in that app: none has changed, and
    it returns what the checkpoint emits. Only --record and --json are options for them.

    `whisperport diagnose` says why the output of a device is not that of the bundle.

    \b
    Examples:
      $ whisperport verify build/tiny-xnnpack
      $ whisperport verify build/tiny-xnnpack --record
      $ whisperport verify build/tiny --each-program --run-option onnxruntime.provider=NAME
    """
    if is_layout(bundle):
        if each_program or html is not None or clips or run_options or threads or trust:
            raise click.UsageError("only --record and --json are options for the files of an app")
        _in_app(bundle, record=record, as_json=as_json)
        return
    run = run_options_of(threads, run_options, trust=trust)
    if each_program:
        if record or html is not None:
            raise click.UsageError("--each-program cannot be used with --record or --html")
        _on_provider(bundle, run, as_json=as_json)
        return
    opened = Bundle.open(bundle)
    with stages():
        report = run_verify(opened, run=run, clips=clips, record=record)
    same = run_option_arguments(run_options, trust=trust)
    following: tuple[Argument, ...] = ("transcribe", "talk.mp3", "--bundle", bundle, *same)
    if html is not None:
        reference = Reference.from_arrays(opened.reference())
        write_page(html, verify_page(report, reference, command_line(*following)))
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
    print_next(*following)


def _in_app(path: Path, *, record: bool, as_json: bool) -> None:
    """Verify the files of an app in it; exit with status 1 if it returned something else."""
    with stages():
        verified = verify_layout(path, record=record)
    if as_json:
        print_json(verified.to_json())
    else:
        print_in_app(path, verified)
    if not verified.is_verified:
        sys.exit(1)


def _on_provider(bundle: Path, run: RunOptions, *, as_json: bool) -> None:
    """Run each program on an execution provider; exit with status 1 if none can run there."""
    with stages():
        report = verify_each_program(bundle, run)
    if as_json:
        print_json(report.to_json())
    else:
        print_provider_report(report)
    if not report:
        sys.exit(1)
    recommended = tuple(f"{name}={value}" for name, value in report.run_options().items())
    same = run_option_arguments(recommended, trust=run.trust)
    print_next("transcribe", "talk.mp3", "--bundle", bundle, *same)
