"""`whisperport inspect`"""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whisperport.apps.cli.console import (
    WIDTH,
    Argument,
    command_line,
    print_filled,
    print_json,
    print_lines,
    print_next,
    print_table,
    print_warning,
    shortened,
    stages,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.inspect_page import in_ms, inspect_page, takes_time
from whisperport.apps.cli.shared_options import as_json, html_option, pairs, threads, trusting
from whisperport.apps.cli.verb import IntRange, Verb, option
from whisperport.build.inspect import InspectOptions
from whisperport.build.inspect import inspect as run_inspect
from whisperport.program.profiling import border_bytes, readable_formats
from whisperport.system.outputs import write_page
from whisperport.targets import PROFILERS

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.model.inspection.lowered import Plan
    from whisperport.program.profiling import NodeProfile, Profile, Subgraph

GAIN = (
    "gain: estimated time saved, in ms, if the node ran as fast per FLOP as the delegated nodes of "
    "this program"
)
NOT_MEASURED = "not measured"
HEADINGS = ("node", "where", "ms", "share", "gain", "rule")
NODE_WIDTH = 40  # characters; the table then fits 100 columns


@click.command(
    cls=Verb,
    short_help="Run a compiled program, and show where each node ran and for how long.",
    help=f"""Run a compiled program, and show for each node where it ran and how long it took.

    Nodes that are not delegated to the accelerator are listed with the reason, if it is known.
    PATH is a {readable_formats(PROFILERS)} file of any model, or a bundle.

    \b
    Examples:
      $ whisperport inspect decoder.pte
      $ whisperport inspect build/tiny-xnnpack --program step --top 5
    """,
)
@click.argument("path", type=Given("program", "bundle"))
@field_options(InspectOptions, "programs", "inputs", "repeat", group="Measurement")
@option(
    "--top",
    group="Output",
    type=IntRange(min=1),
    default=15,
    show_default=True,
    metavar="N",
    help="Number of nodes shown, the slowest first; --json prints all",
)
@html_option("a picture of where each node ran, for how long, and why some are not delegated")
@as_json
@threads
@option(
    "--runtime-option",
    "runtime_options",
    group="Runtime",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an option of the runtime. Of an .onnx file: provider, its execution provider, for example "
    "provider=CUDAExecutionProvider; device, that of the provider; library, the file that has it. May be "
    "repeated",
)
@trusting("Load and run PATH without limits on time and memory")
def inspect(
    path: Path,
    top: int,
    html: Path | None,
    threads: int | None,
    runtime_options: tuple[str, ...],
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    options = InspectOptions(
        threads=threads,
        options=pairs("--runtime-option", runtime_options),
        trust=trust,
        **field_values(InspectOptions, chosen),
    )
    with stages():
        inspected = run_inspect(path, options)
    command = _next_command(path, inspected.profiles)
    if as_json:
        programs_as_json = [profile.to_json() for profile in inspected.profiles]
        plans = [asdict(plan) for plan in inspected.plans]
        skipped = list(inspected.skipped)
        print_json({"programs": programs_as_json, "skipped": skipped, "plans": plans})
    else:
        for profile in inspected.profiles:
            _print_profile(profile, top)
        _print_plans(inspected.plans)
    if html is not None:
        shown = command_line(*command) if command else ""
        write_page(html, inspect_page(inspected, shown))
    if inspected.skipped:
        print_warning(
            f"not measured, since no installed runtime can: {', '.join(inspected.skipped)}"
        )
    if command:
        print_next(*command)


def _print_profile(profile: "Profile", top: int) -> None:
    """Print a summary, the slowest nodes, and why some of them are not delegated."""
    _print_wrapped(_summary(profile))
    print_lines("")
    shown = profile.nodes[:top]
    print_filled(HEADINGS, [_row(profile, node) for node in shown])
    explained = {node.reason: node for node in reversed(shown) if node.reason}
    if explained:
        print_lines("")
        print_table(
            ("node", "why it is not delegated"),
            [(shortened(n.name, NODE_WIDTH), reason) for reason, n in reversed(explained.items())],
        )
    print_lines("")
    for note in _footnotes(profile, shown):
        _print_wrapped(note)
    print_lines("")


def _print_plans(plans: "Sequence[Plan]") -> None:
    """Print where compiled programs run that cannot be measured here."""
    rows = [(p.program, engine, str(n)) for p in plans for engine, n in p.engines.items()]
    if rows:
        print_lines("planned by the vendor's compiler, not measured:", "")
        print_table(("program", "engine", "parts"), rows)
        print_lines("")
    for plan in plans:
        for note in plan.notes:
            print_warning(f"{plan.program}: {note}")


def _print_wrapped(text: str) -> None:
    print_lines(*textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def _summary(profile: "Profile") -> str:
    if profile.on_cpu:
        return (
            f"{profile.program} ({profile.runtime}): {_count(len(profile.nodes), 'node')} on the CPU; "
            f"{in_ms(profile.total_ms)} ms per run"
        )
    off = len(profile.undelegated)
    on = len(profile.nodes) - off
    where = f"{_count(on, 'node')} in {_count(profile.subgraphs, 'subgraph')} of {profile.target}"
    share = profile.undelegated_time_share
    takes = "" if not off or share is None else f", which take {share:.1%} of the time"
    return (
        f"{profile.program} ({profile.runtime}): {where}, {off} not delegated{takes}; "
        f"{in_ms(profile.total_ms)} ms per run"
    )


def _row(profile: "Profile", node: "NodeProfile") -> tuple[str, ...]:
    share = profile.time_share(node)
    return (
        shortened(node.name, NODE_WIDTH),
        node.where,
        NOT_MEASURED if node.ms is None else in_ms(node.ms),
        "" if share is None else f"{share:.1%}",
        "" if node.estimated_gain_ms is None else f"≈{in_ms(node.estimated_gain_ms)}",
        node.rule,
    )


def _footnotes(profile: "Profile", shown: "Sequence[NodeProfile]") -> list[str]:
    lines = []
    if remainder := len(profile.nodes) - len(shown):
        lines.append(f"{remainder} more nodes are shown with --top {len(profile.nodes)}")
    if profile.overhead_ms is not None:
        share = profile.overhead_ms / profile.total_ms if profile.total_ms else 0.0
        lines.append(f"time between nodes: {in_ms(profile.overhead_ms)} ms, {share:.1%}")
    if profile.borders:
        lines.append(border_text(profile.borders))
    if any(node.estimated_gain_ms is not None for node in shown):
        lines.append(GAIN)
    return [*lines, *profile.notes, f"times are medians of {_count(profile.runs, 'run')}"]


def border_text(subgraphs: "Sequence[Subgraph]") -> str:
    """Return how many bytes enter and leave the subgraphs of a program."""
    size = border_bytes(subgraphs)
    return (
        f"{'unknown bytes' if size is None else f'{size / 1e6:.3g} MB'} cross their borders per run"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _next_command(path: Path, profiles: "Sequence[Profile]") -> tuple[Argument, ...]:
    """Explain the rule of the slowest node that has one and takes time; without one, measure a bundle."""
    ruled = [
        node
        for profile in profiles
        for node in profile.nodes
        if node.rule and takes_time(profile, node)
    ]
    if ruled:
        return "explain", max(ruled, key=lambda node: node.ms or 0.0).rule
    return ("bench", path) if path.is_dir() else ()
