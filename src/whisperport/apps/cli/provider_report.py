"""The text of a verification on an execution provider of ONNX Runtime, program by program."""

import textwrap
from collections.abc import Mapping, Sequence

from whisperport.apps.cli.console import WIDTH, print_lines, print_table
from whisperport.verification.providers import ProviderReport, Trial

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
