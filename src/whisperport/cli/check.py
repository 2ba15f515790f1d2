"""`whisperport check`"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whisperport.cli.console import (
    Word,
    print_json,
    print_lines,
    print_next,
    print_table,
    print_warning,
    shortened,
    stages,
)
from whisperport.cli.mend import mend
from whisperport.cli.options import as_json
from whisperport.targets import TARGETS, get_target

if TYPE_CHECKING:  # boards have no onnx
    from whisperport.inspection.check import Checked, Kind

LOWERED = {"onnxruntime": ".onnx", "xnnpack": ".pte"}  # what `lower` writes for them


@click.command(short_help="Say what a target would refuse of a program, and why.")
@click.argument("program", type=click.Path(path_type=Path))
@click.option(
    "--target",
    "-t",
    required=True,
    metavar="NAME",
    help=f"What it should run on: {', '.join(target.spec.name for target in TARGETS)}",
)
@click.option("--all", "every_node", is_flag=True, help="List every node, not one row a kind")
@click.option(
    "--fix", is_flag=True, help="Apply the target's rewrites, prove each, write the result"
)
@click.option(
    "--out", "-o", type=click.Path(path_type=Path), metavar="FILE.pt2", help="Where --fix writes it"
)
@click.option(
    "--inputs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Inputs by name that --fix proves rewrites on too; may be repeated",
)
@click.option("--overwrite", is_flag=True, help="Let --fix replace a file that is there")
@click.option(
    "--trust",
    is_flag=True,
    help="Let --fix run the program without a limit on memory; use it for files from a source you trust",
)
@as_json
def check(
    program: Path,
    target: str,
    every_node: bool,
    fix: bool,
    out: Path | None,
    inputs: tuple[Path, ...],
    overwrite: bool,
    trust: bool,
    as_json: bool,
) -> None:
    """Say what a target would refuse of a program, why, what it costs, and what mends it.

    PROGRAM is a .pt2, .onnx or .tflite file, or a bundle, of any model. Neither its weights nor the
    target's compiler are needed. Exits 1 if anything is refused.

    With --fix, a .pt2 is mended: the target's rewrites are applied, and each is proved by running both
    programs in torch, on random inputs and, for a mel spectrogram, on recordings. Exits 1 if anything
    that computes remains refused.

    \b
    Examples:
      $ whisperport check decoder.pt2 --target xnnpack
      $ whisperport check decoder.pt2 --target xnnpack --fix --out mended.pt2
    """
    if fix != (out is not None):
        raise click.UsageError("--fix and --out FILE.pt2 go together")
    if out is not None:
        mend(program, target, out, inputs, overwrite=overwrite, trust=trust, as_json=as_json)
        return
    from whisperport.inspection.check import check as check_graph
    from whisperport.inspection.read import read_graphs

    spec = get_target(target).spec
    with stages() as say:
        say(f"reading {program.name}")
        checked = [check_graph(graph, spec) for graph in read_graphs(program)]
    if as_json:
        print_json({"target": spec.name, "programs": [one.to_json() for one in checked]})
    else:
        for one in checked:
            _print_checked(one, spec.name, every_node)
    _warn_of_uncounted(checked)
    refused = [kind for one in checked for kind in one.refused]
    print_next(*_next_command(program, spec.name, checked, refused))
    if refused:
        sys.exit(1)


def _print_checked(checked: "Checked", target: str, every_node: bool) -> None:
    if checked.kinds:
        print_table(
            ("rule", "nodes", "operator", "costliest", "FLOPs", "bytes", "mended by"),
            [_row(checked, kind) for kind in checked.kinds],
        )
        print_lines("")
        print_table(("rule", "why, and where the limit was read"), list(map(_why, checked.kinds)))
        print_lines("")
    if checked.kinds and every_node:
        places = [(kind.rule, place) for kind in checked.kinds for place in kind.places]
        print_table(("rule", "node", "reason"), [(rule, p.name, p.reason) for rule, p in places])
        print_lines("")
    print_lines(_summary(checked, target))


def _row(checked: "Checked", kind: "Kind") -> tuple[str, ...]:
    flops, size = checked.share(kind)
    is_node = kind.places[0].cost is not None
    return (
        kind.rule,
        str(len(kind.places)),
        shortened(kind.operator, 20) or "-",
        shortened(kind.places[0].name, 26) or "-",
        _percent(flops) if is_node else "-",
        _percent(size) if is_node else "-",
        kind.rewrite or "-",
    )


def _why(kind: "Kind") -> tuple[str, str]:
    note = "warning: " if kind.warning else ""
    return kind.rule, f"{note}{kind.places[0].reason}  [{kind.source}]"


def _summary(checked: "Checked", target: str) -> str:
    graph, cost = checked.graph, checked.cost
    gflop, moved = f"{cost.flops / 1e9:.3g} GFLOP", f"{cost.bytes / 1e6:.3g} MB moved"
    if not checked.refused:
        return (
            f"{graph.name}: {target} refuses nothing ({len(graph.nodes)} nodes, {gflop}, {moved})"
        )
    flops = sum(kind.flops for kind in checked.refused) / cost.flops if cost.flops else 0.0
    size = sum(kind.bytes for kind in checked.refused) / cost.bytes if cost.bytes else 0.0
    return (
        f"{graph.name}: {target} refuses {checked.refused_nodes} of {len(graph.nodes)} nodes, "
        f"{_percent(flops)} of {gflop}, {_percent(size)} of {moved}"
    )


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"


def _warn_of_uncounted(checked: "Sequence[Checked]") -> None:
    uncounted = sum(one.cost.uncounted for one in checked)
    if uncounted:
        print_warning(
            f"{uncounted} nodes have no static shape or a computation that is not counted; "
            "the shares leave them out"
        )


def _next_command(
    program: Path, target: str, checked: "Sequence[Checked]", refused: "Sequence[Kind]"
) -> tuple[Word, ...]:
    if refused:
        return "explain", refused[0].rule
    if target in LOWERED and len(checked) == 1 and checked[0].graph.format == "torch":
        out = program.with_suffix(LOWERED[target])
        return "lower", program, "--target", target, "--out", out
    return "export", "CHECKPOINT", "--target", target, "--out", f"build/{target}"
