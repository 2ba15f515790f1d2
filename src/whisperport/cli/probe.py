"""`whisperport probe`"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from whisperport.cli.console import (
    WIDTH,
    Argument,
    print_json,
    print_lines,
    print_next,
    print_table,
    print_warning,
    stages,
)
from whisperport.cli.options import as_json, pairs, threads, trust
from whisperport.cli.verb import FloatRange, IntRange, Verb, option
from whisperport.probing import Attempt, Probed, ProbeOptions
from whisperport.probing import probe as run_probe
from whisperport.probing.bundle_probe import MAX_TIMEOUT_S
from whisperport.probing.choice import option_sets
from whisperport.ranges import MAX_REPEAT

HEADINGS: tuple[str, ...] = (
    "program",
    "session",
    "nodes there",
    "nodes elsewhere",
    "SQNR",
    "repeats",
)
HEADINGS += ("ms", "ms on CPU")


@click.command(
    cls=Verb,
    short_help="Try a bundle's programs on an execution provider of ONNX Runtime.",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@option(
    "--provider",
    group="Provider",
    required=True,
    metavar="NAME",
    help="Name of the execution provider, as ONNX Runtime lists it on this machine",
)
@option(
    "--provider-option",
    "provider_options",
    group="Provider",
    multiple=True,
    metavar="NAME=VALUE",
    show_default="those that the provider's vendor documents, where whisperport knows them",
    help="Set an option of the provider in every trial; may be repeated",
)
@option(
    "--program",
    "programs",
    group="Measurement",
    multiple=True,
    metavar="NAME",
    show_default="all",
    help="Program of the bundle to try; may be repeated",
)
@option(
    "--repeat",
    group="Measurement",
    type=IntRange(1, MAX_REPEAT),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of measured runs of each program, after one run that is not measured",
)
@option(
    "--timeout",
    group="Runtime",
    type=FloatRange(0, MAX_TIMEOUT_S, min_open=True),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Time limit in seconds for each program and set of options, compilation included",
)
@as_json
@threads
@trust
def probe(
    bundle: Path,
    provider: str,
    provider_options: tuple[str, ...],
    programs: tuple[str, ...],
    repeat: int,
    timeout: float,
    threads: int | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Try each ONNX program of a bundle on an execution provider of ONNX Runtime.

    The command shows which programs the provider can run, where their nodes ran, how far the outputs are
    from those of ONNX Runtime's CPU provider, whether repeated runs return the same outputs, and the time
    per run. It then recommends which programs to run on the provider, and with which options.

    Each session is created in a process of its own, with limits on memory and time. If it crashes, the
    command continues with the next program. The bundle has programs for the target onnxruntime. The
    inputs are those of one of its audio clips. The exit status is 1 if no program can run on the
    provider.

    \b
    Examples:
      $ whisperport probe build/tiny-onnxruntime --provider CUDAExecutionProvider
      $ whisperport probe build/tiny-onnxruntime --provider CUDAExecutionProvider --program encoder
    """
    options = ProbeOptions(
        provider_options=pairs("--provider-option", provider_options),
        programs=programs,
        repeat=repeat,
        timeout_s=timeout,
        threads=threads,
        trust=trust,
    )
    with stages() as progress:
        probed = run_probe(bundle, provider, options, progress=progress)
    if as_json:
        print_json(probed.to_json())
    else:
        _print(probed)
    for note in probed.notes:
        print_warning(note)
    if probed.skipped:
        print_warning(f"not tried, since they have no ONNX file: {', '.join(probed.skipped)}")
    if not probed:
        sys.exit(1)
    print_next("transcribe", "talk.mp3", "--bundle", bundle, *_run_options(probed))


def _print(probed: Probed) -> None:
    for options in option_sets(probed.attempts):
        of_set = [attempt for attempt in probed.attempts if attempt.options == options]
        _print_wrapped([f"{probed.provider} {_with(options)}:"])
        print_lines("")
        print_table(HEADINGS, [_row(probed, attempt) for attempt in of_set])
        print_lines("")
        _print_wrapped([line for attempt in of_set for line in _details(attempt)])
        print_lines("")
    _print_wrapped(_opsets(probed))
    print_lines("")
    _print_wrapped(_recommendation(probed))
    print_lines("")
    _print_wrapped(
        [
            "nodes: after ONNX Runtime's fusions; a provider that compiles subgraphs runs each as one node",
            f"inputs: those of {probed.clip}; SQNR: the lowest of all outputs, in dB, against ONNX "
            f"Runtime's CPU provider, with the limits of {probed.precision}; ONNX Runtime {probed.version}",
        ]
    )


def _print_wrapped(lines: Sequence[str]) -> None:
    for line in lines:
        further = "    " if line.startswith("  ") else "  "
        print_lines(*textwrap.wrap(line, WIDTH, subsequent_indent=further, break_on_hyphens=False))


def _row(probed: Probed, attempt: Attempt) -> tuple[str, ...]:
    cpu_ms = f"{probed.on_cpu[attempt.program].ms:.1f}"
    if attempt.status != "ran":
        return (attempt.program, attempt.status, "", "", "", "", "", cpu_ms)
    elsewhere, all_nodes = sum(attempt.elsewhere.values()), _count(probed.on_cpu[attempt.program])
    wrong = not attempt.comparisons or not all(attempt.comparisons)
    return (
        attempt.program,
        f"created in {attempt.create_s:.1f} s" if attempt.on_provider else "all nodes declined",
        str(attempt.on_provider),
        f"{elsewhere} of {all_nodes}",
        ("identical" if attempt.sqnr_db == float("inf") else f"{attempt.sqnr_db:.1f}")
        + (" WRONG" if wrong else ""),
        "identical" if attempt.identical else f"differ by {attempt.deviation:.1e}",
        f"{attempt.ms:.1f}",
        cpu_ms,
    )


def _count(on_cpu: Attempt) -> int:
    """Return the number of nodes that the CPU provider runs if it runs all."""
    return sum(node.count for node in on_cpu.nodes)


def _details(attempt: Attempt) -> list[str]:
    """Return what the table has no room for: why an attempt failed, and which operators ran elsewhere."""
    if attempt.status != "ran":
        return [
            f"{attempt.program} {attempt.status}: {attempt.reason}",
            *(f"  last message: {message}" for message in attempt.messages[-1:]),
        ]
    lines = [
        f"{attempt.program}, `{one.output}`: {one.reason}" for one in attempt.comparisons if not one
    ]
    if attempt.elsewhere:
        counts = ", ".join(f"{count} {name}" for name, count in attempt.elsewhere.items())
        lines.append(f"{attempt.program}, not on the provider: {counts}")
    return lines


def _opsets(probed: Probed) -> list[str]:
    versions = sorted(set(probed.opsets.values()))
    rule = "the provider's documentation, as far as whisperport knows it, states no limit"
    if probed.min_opset:
        holds = "which holds" if min(versions) >= probed.min_opset else "which does NOT hold"
        rule = f"the provider's documentation asks for {probed.min_opset} or newer, {holds}"
    lines = [f"opset: {', '.join(map(str, versions))}; {rule}"]
    return lines + [f"{name}: {one}" for name, found in probed.objections.items() for one in found]


def _recommendation(probed: Probed) -> list[str]:
    choice = probed.choice
    if not choice.programs:
        first = "recommended: run all programs on the CPU"
    else:
        first = (
            f"recommended: run {', '.join(choice.programs)} on {probed.provider} {_with(choice.options)}; "
            f"estimated saving {choice.saved_ms:.0f} ms per window"
        )
    return [first, *(f"  {name} on the CPU: {_short(why)}" for name, why in choice.because.items())]


def _short(why: str) -> str:
    """Return a reason without the text of an error, which is printed below the table."""
    ended = ("it failed", "it crashed")
    return next((words for words in ended if why.startswith(f"{words}:")), why)


def _run_options(probed: Probed) -> list[Argument]:
    """Return the arguments that run the recommended programs on the provider."""
    choice = probed.choice
    if not choice.programs:
        return []
    found = [f"onnxruntime.provider={probed.provider}"]
    if choice.options:
        text = ";".join(f"{name}={value}" for name, value in choice.options.items())
        found.append(f"onnxruntime.provider-options={text}")
    if choice.because:
        found.append(f"onnxruntime.provider-programs={','.join(choice.programs)}")
    return [word for one in found for word in ("--run-option", one)]


def _with(options: Mapping[str, str]) -> str:
    if not options:
        return "with its default options"
    return f"with {', '.join(f'{name}={value}' for name, value in options.items())}"
