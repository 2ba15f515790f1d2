"""`whisperport lower`"""

from collections import Counter
from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_table,
    print_warning,
    stages,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.shared_options import (
    STALL_MIN,
    as_json,
    no_preflight,
    output_option,
    sizes_option,
    stall_after,
    target_name,
    threads,
    trusting,
)
from whisperport.apps.cli.verb import Verb
from whisperport.apps.cli.watchdog import run_watched
from whisperport.build.lower import Lowered, LowerOptions
from whisperport.build.lower import lower as run_lower
from whisperport.targets import RunOptions, get_target


@click.command(
    cls=Verb, short_help="Lower one program of any model to one file, and compare the two."
)
@click.argument("program", type=Given("program"))
@target_name("Target that runs the lowered program")
@sizes_option
@field_options(LowerOptions, "opset", "simplify", "max_rank", group="Target")
@output_option(
    "FILE",
    "file",
    "File to write; an existing file is replaced. It has the suffix of the target's files, such as .onnx, "
    ".pte or .tflite; the error for any other names it",
)
@as_json
@field_options(LowerOptions, "inputs", "allow_unequal", group="Verification")
@threads
@no_preflight
@stall_after(STALL_MIN)
@trusting("Load and run PROGRAM without a limit on memory")
def lower(
    program: Path,
    target: str,
    out: Path,
    sizes: dict[str, int],
    no_preflight: bool,
    stall_after: float,
    threads: int | None,
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Lower one program to one file, run both on the same inputs, and compare them.

    PROGRAM is a .pt2 file of any model, as torch.export.save writes it. The target's rewrites are
    applied first. Nothing is written if an output differs by more than rounding errors. Parts that a
    target moves to the host, such as the token embedding lookup, are written to files beside FILE. Files
    beside FILE have its stem, and replace other files only if FILE is replaced too.

    \b
    Examples:
      $ whisperport lower encoder.pt2 --target xnnpack --out encoder.pte
      $ whisperport lower decoder.pt2 --target onnxruntime --opset 13 --out decoder.onnx
    """
    options = LowerOptions(
        **field_values(LowerOptions, chosen),
        sizes=sizes,
        preflight=not no_preflight,
        trust=trust,
        run=RunOptions(threads=threads),
    )
    with stages():
        job = (run_lower, program, target, out, options)
        lowered = run_watched(*job, out=out, stall_s=60 * stall_after)
    if as_json:
        print_json(lowered.to_json())
    else:
        _print(lowered)
    if not lowered.equal:
        print_warning("the outputs of the written file differ from those of the program")
    if lowered.facts.get("delegated") == 0 and lowered.facts.get("undelegated"):
        print_warning(
            f"nothing is delegated to {target}: the host runs every node of the written file"
        )
    if get_target(target).compiler is None:
        print_next("inspect", out)
    else:
        print_next("compile", out, "--target", target, "--inputs", "INPUTS_DIR")


def _print(lowered: Lowered) -> None:
    rows = [(name.replace("_", " "), _shown(value)) for name, value in lowered.facts.items()]
    changed = [f"{name} {n}" for name, n in lowered.rewrites.items() if n]
    rows.append(("nodes rewritten", ", ".join(changed) or "none"))
    equality, gate = lowered.equality, lowered.gate
    rows += [
        ("min cosine", f"{equality.cosine:.6f} (limit {gate.min_cosine:g})"),
        ("min SQNR", f"{equality.sqnr_db:.1f} dB (limit {gate.min_sqnr_db:g} dB)"),
        (
            "max error",
            f"{equality.max_relative:.1e} of the largest value (limit {gate.max_relative:g})",
        ),
    ]
    print_table(("fact", "value"), rows)
    beside = [f"file beside it: {file}" for file in lowered.files[1:]]
    why = "" if lowered.equal else f": {equality.reason}"
    result = f"{lowered.files[0]}: {'equal' if lowered.equal else 'NOT EQUAL'}{why}"
    if get_target(lowered.target).compiler is not None:
        result += "; nothing is delegated before `whisperport compile`, which may reject operators"
    print_lines("", *beside, result)


def _shown(value: object) -> str:
    """A fact as text; a list of operators as the count of each."""
    if not isinstance(value, list | tuple):
        return str(value)
    return ", ".join(f"{n} {name}" for name, n in Counter(value).most_common()) or "none"
