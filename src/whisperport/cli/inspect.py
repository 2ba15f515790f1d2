"""`whisperport inspect`"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whisperport.cli.console import (
    WIDTH,
    Word,
    print_json,
    print_lines,
    print_next,
    print_table,
    print_warning,
    shortened,
    stages,
)
from whisperport.cli.options import as_json, pairs, threads
from whisperport.inspecting import InspectOptions
from whisperport.inspecting import inspect as run_inspect
from whisperport.ranges import MAX_REPEAT

if TYPE_CHECKING:  # boards have no inspection
    from whisperport.inspection.profile import NodeProfile, Profile

GAIN = (
    "gain: an estimate, in ms: the node's time less the same work at the rate of this program's "
    "delegated nodes"
)
NOT_MEASURED = "not measured"
HEADINGS = ("node", "where", "ms", "share", "gain", "rule")
NODE_WIDTH = 40  # beside the other columns it fits 100


@click.command(short_help="Run a compiled program, and say which nodes ran where, and how long.")
@click.argument("lowered", type=click.Path(path_type=Path))
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="NAME",
    help="A program of a bundle, or a method of a .pte; may be repeated  [default: all]",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=15,
    show_default=True,
    help="Nodes shown, the most expensive first; --json has all",
)
@click.option(
    "--repeat",
    type=click.IntRange(1, MAX_REPEAT),
    default=5,
    show_default=True,
    help="Number of runs after a warm-up run; times are medians",
)
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Arrays by the names of the inputs  [default: random; integers 0 to 99]",
)
@threads
@click.option(
    "--runtime-option",
    "runtime_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an option of the file's runtime, such as provider=CUDAExecutionProvider; may be repeated",
)
@click.option(
    "--trust",
    is_flag=True,
    help="Run the program without limits on time and memory; use it for files from a source you trust",
)
@as_json
def inspect(
    lowered: Path,
    programs: tuple[str, ...],
    top: int,
    repeat: int,
    inputs: Path | None,
    threads: int | None,
    runtime_options: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> None:
    """Run a compiled program, and say which nodes ran where, how long each took, and why not elsewhere.

    LOWERED is a .pte, .onnx, OpenVINO .xml or .tflite file, or a bundle, of any model.

    \b
    Example:
      $ whisperport inspect decoder.pte
    """
    options = InspectOptions(
        repeat=repeat,
        threads=threads,
        options=pairs("--runtime-option", runtime_options),
        inputs=inputs,
        programs=programs,
        trust=trust,
    )
    with stages() as progress:
        inspected = run_inspect(lowered, options, progress=progress)
    if as_json:
        programs_as_json = [profile.to_json() for profile in inspected.profiles]
        print_json({"programs": programs_as_json, "skipped": list(inspected.skipped)})
    else:
        for profile in inspected.profiles:
            _print_profile(profile, top)
    if inspected.skipped:
        print_warning(f"no runtime here measures {', '.join(inspected.skipped)}")
    print_next(*_next_command(lowered, inspected.profiles))


def _print_profile(profile: "Profile", top: int) -> None:
    """What was found in a sentence, then the most expensive nodes, then why some stay off."""
    _print_wrapped(_summary(profile))
    print_lines("")
    shown = profile.nodes[:top]
    _print_filled(HEADINGS, [_row(profile, node) for node in shown])
    explained = {node.reason: node for node in reversed(shown) if node.reason}
    if explained:
        print_lines("")
        print_table(
            ("node", "why"),
            [(shortened(n.name, NODE_WIDTH), reason) for reason, n in reversed(explained.items())],
        )
    print_lines("")
    for note in _footnotes(profile, len(shown)):
        _print_wrapped(note)
    print_lines("")


def _print_wrapped(text: str) -> None:
    print_lines(*textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def _print_filled(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without the columns in which nothing stands."""
    filled = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    print_table(
        [headings[place] for place in filled], [[row[place] for place in filled] for row in rows]
    )


def _summary(profile: "Profile") -> str:
    off = len(profile.undelegated)
    on = len(profile.nodes) - off
    where = f"{_count(on, 'node')} in {_count(profile.subgraphs, 'subgraph')} of {profile.target}"
    share = profile.undelegated_time_share
    takes = "" if not off or share is None else f", which take {share:.1%}"
    return (
        f"{profile.program} ({profile.runtime}): {where}, {off} outside{takes}; "
        f"{_ms(profile.total_ms)} ms a run"
    )


def _row(profile: "Profile", node: "NodeProfile") -> tuple[str, ...]:
    share = profile.time_share(node)
    return (
        shortened(node.name, NODE_WIDTH),
        node.where,
        NOT_MEASURED if node.ms is None else _ms(node.ms),
        "" if share is None else f"{share:.1%}",
        "" if node.estimated_gain_ms is None else f"≈{_ms(node.estimated_gain_ms)}",
        node.rule,
    )


def _footnotes(profile: "Profile", shown: int) -> list[str]:
    lines = []
    if shown < len(profile.nodes):
        lines.append(f"{len(profile.nodes) - shown} more nodes: --top {len(profile.nodes)}")
    if profile.overhead_ms is not None:
        share = profile.overhead_ms / profile.total_ms if profile.total_ms else 0.0
        lines.append(f"between nodes: {_ms(profile.overhead_ms)} ms, {share:.1%}")
    if any(node.estimated_gain_ms is not None for node in profile.nodes):
        lines.append(GAIN)
    return [*lines, *profile.notes, f"medians of {_count(profile.runs, 'run')}"]


def _ms(number: float) -> str:
    return f"{number:.1f}" if number >= 10 else f"{number:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _next_command(lowered: Path, profiles: "Sequence[Profile]") -> tuple[Word, ...]:
    """The rule that costs the most, or else what else can be measured."""
    ruled = [node for profile in profiles for node in profile.nodes if node.rule]
    if ruled:
        return "explain", max(ruled, key=lambda node: node.ms or 0.0).rule
    if lowered.is_dir():
        return "bench", lowered
    return "check", "PROGRAM", "--target", "xnnpack"
