"""`whisperport lower`"""

from collections import Counter
from pathlib import Path

import click

from whisperport.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_table,
    print_warning,
    stages,
)
from whisperport.cli.options import as_json, no_preflight, stall_after, threads, trust_program
from whisperport.lowering import Lowered, LowerOptions
from whisperport.lowering import lower as run_lower
from whisperport.targets import TARGETS, RunOptions
from whisperport.targets.onnxruntime import OPSETS
from whisperport.watchdog import run_watched

SUFFIXES = ", ".join(f"{t.spec.lowered_suffix} for {t.spec.name}" for t in TARGETS)


@click.command(short_help="Lower one program, of any model, to one file, and compare the two.")
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--target", "-t", required=True, metavar="NAME", help="See `whisperport targets`")
@click.option(
    "--out",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Where to write the file: {SUFFIXES}",
)
@click.option(
    "--opset",
    type=click.IntRange(OPSETS[0], OPSETS[-1]),
    help="ONNX opset to write, for targets that read ONNX  [default: the target's]",
)
@click.option("--simplify", is_flag=True, help="Simplify the ONNX graph with onnxslim")
@click.option(
    "--max-rank",
    type=click.IntRange(min=3),
    metavar="N",
    help="Maximum rank of a tensor; axes above it are folded, or the program is rejected  "
    "[default: 4 for onnxruntime, else the target's limit]",
)
@click.option(
    "--inputs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="Inputs by name that both are compared on too; may be repeated",
)
@click.option(
    "--allow-unequal", is_flag=True, help="Write the file although it computes something else"
)
@no_preflight
@stall_after
@threads
@trust_program
@as_json
def lower(
    program: Path,
    target: str,
    out: Path,
    opset: int | None,
    simplify: bool,
    max_rank: int | None,
    inputs: tuple[Path, ...],
    allow_unequal: bool,
    no_preflight: bool,
    stall_after: float,
    threads: int | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Lower one program to one file, run both on the same inputs, and compare them.

    PROGRAM is a .pt2 file, as torch.export.save writes it, of any model. The target's rewrites are
    applied first. Nothing is written if an output differs by more than another order of sums explains.
    What a target moves to the host, such as a token lookup, is written beside FILE.

    \b
    Example:
      $ whisperport lower decoder.pt2 --target onnxruntime --opset 13 --out decoder.onnx
    """
    options = LowerOptions(
        opset=opset,
        simplify=simplify,
        max_rank=max_rank,
        inputs=inputs,
        allow_unequal=allow_unequal,
        preflight=not no_preflight,
        trust=trust,
        run=RunOptions(threads=threads),
    )
    with stages() as progress:
        job = (run_lower, program, target, out, options)
        lowered = run_watched(*job, out=out, progress=progress, stall_s=60 * stall_after)
    if as_json:
        print_json(lowered.to_json())
    else:
        _print(lowered)
    if not lowered.equal:
        print_warning("this file does not compute what the program does")
    print_next("inspect", out)


def _print(lowered: Lowered) -> None:
    rows = [(name.replace("_", " "), _said(value)) for name, value in lowered.facts.items()]
    changed = [f"{name} {n}" for name, n in lowered.rewrites.items() if n]
    rows.append(("nodes rewritten", ", ".join(changed) or "none"))
    found, gate = lowered.equality, lowered.gate
    rows += [
        ("min cosine", f"{found.cosine:.6f} (limit {gate.min_cosine:g})"),
        ("min SQNR", f"{found.sqnr_db:.1f} dB (limit {gate.min_sqnr_db:g} dB)"),
        (
            "max error",
            f"{found.max_relative:.1e} of the largest value (limit {gate.max_relative:g})",
        ),
    ]
    print_table(("fact", "value"), rows)
    beside = [f"beside it: {file}" for file in lowered.files[1:]]
    why = "" if lowered.equal else f": {found.reason}"
    result = f"{lowered.files[0]}: {'equal' if lowered.equal else 'NOT EQUAL'}{why}"
    print_lines("", *beside, result)


def _said(value: object) -> str:
    """A list of operators as how many of each."""
    if not isinstance(value, list | tuple):
        return str(value)
    return ", ".join(f"{n} {name}" for name, n in Counter(value).most_common()) or "none"
