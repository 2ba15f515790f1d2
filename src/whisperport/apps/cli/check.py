"""`whisperport check`"""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whisperport.apps.cli.check_page import MAX_UNCOUNTED, check_page
from whisperport.apps.cli.console import (
    WIDTH,
    Argument,
    command_line,
    print_filled,
    print_json,
    print_lines,
    print_next,
    print_note,
    print_table,
    print_warning,
    shortened,
    shown_path,
    stages,
)
from whisperport.apps.cli.explain import rules_about
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.inspect import border_text
from whisperport.apps.cli.shared_options import as_json, html_option, sizes_option, target_name
from whisperport.apps.cli.verb import Verb, option
from whisperport.build.check import Checked, Partitioned
from whisperport.build.check import check as check_program
from whisperport.program.bundle import MANIFEST
from whisperport.program.profiling import readable_formats
from whisperport.program.spec import FindingKind
from whisperport.system.outputs import write_page
from whisperport.system.page import percent
from whisperport.targets import PROFILERS, get_target

if TYPE_CHECKING:  # the package onnx may be missing at run time
    from whisperport.model.inspection.cost import NodeCost
    from whisperport.model.inspection.partitions import Partitions
    from whisperport.model.inspection.rejections import CheckedProgram, FindingGroup, Occurrence

PROJECTED_AGAIN = "WP601"
REPEATED_WORK = (PROJECTED_AGAIN, "WP602")  # warnings that no lowering solves
NAMED_SPLITS = 6  # nodes between two subgraphs that are named; --json has all
HEADINGS: dict[FindingKind, str] = {
    "rejected": "rejected",
    "not seen": "not seen in programs known to compile (not counted as rejected)",
    "warning": "warnings (not counted as rejected)",
}


@click.command(
    cls=Verb,
    short_help="List the nodes of a program that a target rejects, with reasons and fixes.",
    help=f"""List the nodes of a program that a target rejects, with reasons, cost and a rewrite that helps.

    PROGRAM is a {readable_formats(PROFILERS, ".pt2")} file of any model, a bundle, or the folder of a model
    of any architecture in transformers' format, whose weights are not read. The target's compiler is not
    needed. The cost is the share of the program's operations and bytes. The module and the line of
    Python are those that the exporter stored in the file. The exit status is 1 if a node is rejected or
    declined; a warning does not change it, because the target runs the program. Where a vendor publishes no
    list of supported operators, nodes that were not seen in programs known to compile are listed
    separately: they may compile, and do not change the exit status. If a vendor's tool on this
    machine tells what it accepts, its answer is printed too.

    \b
    Examples:
      $ whisperport check decoder.pt2 --target xnnpack
      $ whisperport check decoder.onnx --target litert --all --html check.html
    """,
)
@click.argument("program", type=Given("program", "bundle", "checkpoint"))
@target_name("Target to check the program for")
@sizes_option
@option(
    "--all",
    "every_node",
    group="Output",
    is_flag=True,
    help="List every rejected node with its reason, in addition to one row per kind of node",
)
@html_option("the program's graph with what is rejected, why, and its share of the cost")
@as_json
def check(
    program: Path,
    target: str,
    html: Path | None,
    every_node: bool,
    sizes: dict[str, int],
    as_json: bool,
) -> None:
    """Run the verb."""
    with stages():
        checked = check_program(program, target, sizes=sizes)
    following = _next_command(program, checked, sizes)
    if as_json:
        print_json(checked.to_json())
    else:
        for checked_program in checked.programs:
            _print_checked(checked_program, target, every_node)
        for answer in checked.partitions:
            _print_partitioned(answer)
    if html is not None:
        write_page(html, check_page(checked, command_line(*following)))
    _warn_of_uncounted(checked)
    print_next(*following)
    if not checked:
        sys.exit(1)


def _print_checked(checked: "CheckedProgram", target: str, every_node: bool) -> None:
    for finding, heading in HEADINGS.items():
        if kinds := checked.of(finding):
            print_lines(f"{heading}:", "")
            _print_kinds(checked, kinds, every_node)
    print_lines(_summary(checked, target))
    if checked.predicted is not None and not get_target(target).spec.supports.rejects_programs:
        _print_partitions(checked.predicted, every_node)


def _print_partitions(partitions: "Partitions", every_subgraph: bool) -> None:
    """Print how the target divides the program if the rejected nodes run on the host."""
    count = len(partitions.subgraphs)
    print_lines(
        f"predicted: {count} delegated subgraph{'s' * (count != 1)}; {border_text(partitions.subgraphs)}; "
        "time unknown"
    )
    if partitions.splitting:
        remainder = len(partitions.splitting) - NAMED_SPLITS
        names = ", ".join(partitions.splitting[:NAMED_SPLITS]) + (
            f" and {remainder} more" if remainder > 0 else ""
        )
        print_lines(*textwrap.wrap(f"split by {names}", WIDTH, break_on_hyphens=False))
    if every_subgraph and partitions.subgraphs:
        print_lines("")
        rows = [
            (
                str(number),
                str(subgraph.nodes),
                _bytes(subgraph.input_bytes),
                _bytes(subgraph.output_bytes),
            )
            for number, subgraph in enumerate(partitions.subgraphs, 1)
        ]
        print_table(("subgraph", "nodes", "bytes in", "bytes out"), rows)
        print_lines("")


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size:,}"


def _print_partitioned(answer: Partitioned) -> None:
    partition = answer.partition
    if partition is None:
        print_note(f"{answer.program}: {answer.partitioner} was not asked: {answer.reason}")
        return
    if partition.rejection:
        print_lines(f"{answer.program}: {answer.partitioner} rejects it: {partition.rejection}")
        return
    print_lines(
        f"{answer.program}: {answer.partitioner} accepts {partition.accepted} of {partition.total} "
        f"operators; {partition.scope}"
    )
    if partition.declined:
        print_lines("")
        print_table(
            ("declined operator", "its output", "reason"),
            [
                (operator.operator, shortened(operator.tensor, 40), operator.reason)
                for operator in partition.declined
            ],
        )
        print_lines("")


def _print_kinds(
    checked: "CheckedProgram", kinds: "Sequence[FindingGroup]", every_node: bool
) -> None:
    print_table(
        ("rule", "nodes", "operator", "costliest node", "FLOPs", "bytes", "suggestion"),
        [_row(checked, kind) for kind in kinds],
    )
    print_lines("")
    sources = list(dict.fromkeys(kind.source for kind in kinds))
    reasons = dict.fromkeys(
        (kind.rule, kind.occurrences[0].reason, f"[{sources.index(kind.source) + 1}]")
        for kind in kinds
    )
    print_table(("rule", "reason", "source"), list(reasons))
    print_lines("")
    if not every_node:
        _print_places(kinds)
    print_table(("", "sources of the limits"), [(f"[{n}]", s) for n, s in enumerate(sources, 1)])
    print_lines("")
    if every_node:
        _print_every_node(kinds)


def _print_every_node(kinds: "Sequence[FindingGroup]") -> None:
    """Print every node with its place in the model's code; a reason is printed once per run of nodes."""
    rows, before = [], ("", "")
    for kind in kinds:
        for occurrence in kind.occurrences:
            same = (kind.rule, occurrence.reason) == before
            before = kind.rule, occurrence.reason
            rows.append(
                (kind.rule, occurrence.name, *_place(occurrence), "" if same else occurrence.reason)
            )
    print_filled(("rule", "node", "module", "Python line", "reason"), rows)
    print_lines("")


def _print_places(kinds: "Sequence[FindingGroup]") -> None:
    """Print where in the model's code the costliest node of each kind was written, if this is stored."""
    costliest = [(kind.rule, kind.occurrences[0]) for kind in kinds]
    rows = [
        (rule, shortened(occurrence.name, 26), *_place(occurrence))
        for rule, occurrence in costliest
    ]
    if rows := [row for row in rows if any(row[2:])]:
        print_filled(("rule", "costliest node", "module", "Python line"), rows)
        print_lines("")


def _place(place: "Occurrence") -> tuple[str, str]:
    """Return the module and the line of code of a node; empty if the file does not state them."""
    source = place.source
    line = f"{shown_path(Path(source.package_path))}:{source.line}" if source else ""
    while len(line) > 36 and "/" in line.removeprefix("…/"):
        line = f"…/{line.removeprefix('…/').partition('/')[2]}"
    return shortened(place.module, 28), shortened(line, 36)


def _row(checked: "CheckedProgram", kind: "FindingGroup") -> tuple[str, ...]:
    flops, size = checked.share(kind)
    costs = [occurrence.cost for occurrence in kind.occurrences if occurrence.cost]
    unknown = any(not cost.counted for cost in costs)
    return (
        kind.rule,
        str(len(kind.occurrences)),
        shortened(kind.operator, 20) or "-",
        shortened(kind.occurrences[0].name, 26) or "-",
        _share(flops, costs, unknown=unknown),
        _share(size, costs, unknown=unknown and not size),
        kind.suggestion or "-",
    )


def _share(share: float, costs: "Sequence[NodeCost]", *, unknown: bool) -> str:
    """Return the share of a program that some nodes have; "-" for what is not a node."""
    if not costs:
        return "-"
    return "unknown" if unknown and not share else f"{'≥ ' if unknown else ''}{percent(share)}"


def _summary(checked: "CheckedProgram", target: str) -> str:
    graph, cost = checked.graph, checked.cost
    gflop, moved = f"{cost.flops / 1e9:.3g} GFLOP", f"{cost.bytes / 1e6:.3g} MB moved"
    unseen = checked.not_seen_nodes
    also = f"; {unseen} not seen in programs known to compile" if unseen else ""
    again = sum(kind.flops for kind in checked.findings if kind.rule == PROJECTED_AGAIN)
    if again and cost.flops:
        also += f"; {percent(again / cost.flops)} of the FLOPs repeat for every token ({PROJECTED_AGAIN})"
    if not checked.rejected:
        nodes = f"{len(graph.nodes)} nodes"
        return f"{graph.name}: {target} rejects nothing ({nodes}, {gflop}, {moved}){also}"
    if not checked.rejected_nodes:
        return f"{graph.name}: {target} rejects the program for the reasons above, but no single node{also}"
    rejects = f"{graph.name}: {target} rejects {checked.rejected_nodes} of {len(graph.nodes)} nodes"
    if cost.uncounted > len(graph.nodes) * MAX_UNCOUNTED:
        return f"{rejects}{also}"
    flops = sum(kind.flops for kind in checked.rejected) / cost.flops if cost.flops else 0.0
    size = sum(kind.bytes for kind in checked.rejected) / cost.bytes if cost.bytes else 0.0
    return f"{rejects}, {percent(flops)} of {gflop}, {percent(size)} of {moved}{also}"


def _warn_of_uncounted(checked: Checked) -> None:
    uncounted = sum(program.cost.uncounted for program in checked.programs)
    if uncounted:
        print_warning(
            f"{uncounted} nodes are not included in the shares of FLOPs and bytes: their shapes are not "
            "static, or their cost is not known"
        )


def _next_command(
    program: Path, checked: Checked, sizes: Mapping[str, int]
) -> tuple[Argument, ...]:
    target = checked.target
    rejected = [kind for checked_program in checked.programs for kind in checked_program.rejected]
    rules = {kind.rule for checked_program in checked.programs for kind in checked_program.findings}
    one_graph = program.is_file() and len(checked.programs) == 1
    one_graph = one_graph and checked.programs[0].graph.format == "torch"
    for answer in checked.partitions:
        message = answer.partition.rejection if answer.partition is not None else ""
        if message and len(about := rules_about(message)) == 1:
            return "explain", about[0].code
    if "WP604" in rules:
        return "explain", "WP604"
    is_bundle = (program / MANIFEST).is_file()
    if not rejected and not is_bundle and (warned := sorted(rules & set(REPEATED_WORK))):
        return _instead_of_repeated_work(checked, warned[0])
    if "WP204" in rules:
        numbers = _size_options(dict.fromkeys(_symbols(checked), "NUMBER")) if one_graph else []
        return ("check", program, "--target", target, *numbers) if numbers else ("explain", "WP204")
    fixed_sizes = _size_options(sizes)
    if one_graph and any(kind.rewrite for kind in rejected):
        out = program.with_suffix(".fixed.pt2")
        return "fix", program, "--target", target, *fixed_sizes, "--out", out
    if rejected:
        return "explain", rejected[0].rule
    suffix = get_target(target).spec.lowering.lowered_suffix
    if suffix and one_graph:
        out = program.with_suffix(suffix)
        return "lower", program, "--target", target, *fixed_sizes, "--out", out
    if program.is_dir():
        return ("verify", program) if is_bundle else ("lower", "--help")
    return "inspect", program


def _instead_of_repeated_work(checked: Checked, rule: str) -> tuple[Argument, ...]:
    """Return the command that replaces a decoder of Whisper, or else explains the rule."""
    from whisperport.model.inspection.rules.decoding import is_whisper_decoder

    if rule == PROJECTED_AGAIN and all(
        is_whisper_decoder(program.graph) for program in checked.programs
    ):
        return "export", "CHECKPOINT", "--target", checked.target, "--out", "DIR"
    return "explain", rule


def _size_options(sizes: Mapping[str, object]) -> list[str]:
    return [part for name, number in sizes.items() for part in ("--size", f"{name}={number}")]


def _symbols(checked: Checked) -> list[str]:
    """Return the symbols in the shapes of the inputs of the program."""
    axes = (axis for value in checked.programs[0].graph.inputs for axis in value.shape or ())
    return sorted({axis for axis in axes if isinstance(axis, str) and axis.isidentifier()})
