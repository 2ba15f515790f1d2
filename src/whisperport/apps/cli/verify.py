"""`whisperport verify`"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from whisperport.apps.cli.checks_table import print_checks, print_failures, print_in_app
from whisperport.apps.cli.console import (
    WIDTH,
    Argument,
    command_line,
    print_json,
    print_lines,
    print_next,
    print_note,
    print_table,
    print_warning,
    stages,
)
from whisperport.apps.cli.evidence_words import verified_words
from whisperport.apps.cli.given import Given
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
from whisperport.build.layouts.verifying import doubt_of, verify_layout
from whisperport.program.bundle import Bundle
from whisperport.system.outputs import write_page
from whisperport.targets import RunOptions
from whisperport.verification.bundle_check import verify as run_verify
from whisperport.verification.providers import ProviderReport, Trial, verify_each_program
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
    if as_json:
        print_json(report.to_json())
    else:
        print_checks(report.checks)
        print_failures(report.failures())
        how = f" ({', '.join(run_options)})" if run_options else ""
        print_lines("", f"{bundle}: {'verified' if report else 'NOT VERIFIED'}{how}")
    if html is not None:
        reference = Reference.from_arrays(opened.reference())
        write_page(html, verify_page(report, reference, command_line(*following)))
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
        print_in_app({path: verified})
    if warning := doubt_of(verified):
        print_warning(warning)
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


HEADINGS = (
    *("program", "session", "nodes there", "nodes elsewhere"),
    *("SQNR", "repeats", "ms", "ms on CPU"),
)


def print_provider_report(report: ProviderReport) -> None:
    """Print a table for each set of options, and the programs to run on the provider."""
    for trials in report.by_options():
        _print_wrapped([f"{report.provider} {_with(trials[0].options)}:"])
        print_lines("")
        print_table(HEADINGS, [_row(trial) for trial in trials])
        print_lines("")
        _print_wrapped([line for trial in trials for line in _details(trial)])
        print_lines("")
    _print_wrapped(report.remarks)
    print_lines("")
    _print_wrapped(_recommendation(report))
    print_lines("")
    _print_wrapped(
        [
            "nodes: after ONNX Runtime's fusions; a provider that compiles subgraphs runs each as one node",
            f"inputs: those of {report.clip}; SQNR: the lowest of all outputs, in dB, against ONNX "
            f"Runtime's CPU provider, with the limits of {report.precision}; ONNX Runtime {report.version}",
        ]
    )


def _print_wrapped(lines: Sequence[str]) -> None:
    for line in lines:
        further = "    " if line.startswith("  ") else "  "
        print_lines(*textwrap.wrap(line, WIDTH, subsequent_indent=further, break_on_hyphens=False))


def _row(trial: Trial) -> tuple[str, ...]:
    cpu_ms = f"{trial.cpu_ms:.1f}"
    if trial.failure:
        return (trial.program, "failed", "", "", "", "", "", cpu_ms)
    wrong = not trial.comparisons or not all(trial.comparisons)
    return (
        trial.program,
        f"created in {trial.create_s:.1f} s" if trial.on_provider else "all nodes declined",
        str(trial.on_provider),
        str(sum(trial.elsewhere.values())),
        ("identical" if trial.sqnr_db == float("inf") else f"{trial.sqnr_db:.1f}")
        + (" WRONG" if wrong else ""),
        f"differ by {trial.deviation:.1e}" if trial.deviation else "identical",
        f"{trial.ms:.1f}",
        cpu_ms,
    )


def _details(trial: Trial) -> list[str]:
    """Return what the table has no room for: why a program failed, and which operators ran elsewhere."""
    if trial.failure:
        last = [f"  last message: {message}" for message in trial.messages[-1:]]
        return [f"{trial.program} failed: {trial.failure}", *last]
    lines = [
        f"{trial.program}, `{comparison.output}`: {comparison.reason}"
        for comparison in trial.comparisons
        if not comparison
    ]
    if trial.elsewhere:
        counts = ", ".join(f"{count} {name}" for name, count in trial.elsewhere.items())
        lines.append(f"{trial.program}, not on the provider: {counts}")
    return lines


def _recommendation(report: ProviderReport) -> list[str]:
    trials = report.recommended()
    chosen = [trial for trial in trials if not trial.why_on_cpu()]
    on_cpu = [
        f"  {trial.program} on the CPU: {'it failed' if trial.failure else trial.why_on_cpu()}"
        for trial in trials
        if trial not in chosen
    ]
    if not chosen:
        return ["recommended: run all programs on the CPU", *on_cpu]
    names = ", ".join(trial.program for trial in chosen)
    saved_ms = sum(trial.saved_ms for trial in chosen)
    return [
        f"recommended: run {names} on {report.provider} {_with(trials[0].options)}; estimated saving "
        f"{saved_ms:.0f} ms per window",
        *on_cpu,
    ]


def _with(options: Mapping[str, str]) -> str:
    if not options:
        return "with its default options"
    return f"with {', '.join(f'{name}={value}' for name, value in options.items())}"
