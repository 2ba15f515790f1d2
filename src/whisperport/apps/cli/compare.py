"""`whisperport compare`"""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.compare_page import (
    compare_page,
    decibels,
    divergence_sentences,
    operators,
)
from whisperport.apps.cli.console import (
    WIDTH,
    Argument,
    command_line,
    print_filled,
    print_json,
    print_lines,
    print_next,
    shortened,
    shown_path,
    stages,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.shared_options import as_json, html_option, trusting
from whisperport.apps.cli.verb import Verb, option
from whisperport.build.compare import CompareOptions
from whisperport.build.compare import compare as run_compare
from whisperport.program.profiling import readable_formats
from whisperport.system.outputs import write_page
from whisperport.targets import PROFILERS
from whisperport.verification.diagnosis.divergence import ComparedPrograms, ComparedValue

SHOWN_BEFORE, SHOWN_AFTER = 3, 20  # layers around the first that diverges
HEADINGS = ("", "layer", "operator", "Python line", "error", "SQNR")
LAYER_WIDTH, LINE_WIDTH, OPERATOR_WIDTH = 38, 26, 14  # characters; the table then fits 100 columns


@click.command(
    cls=Verb,
    short_help="Compare two programs, and name the first layer at which they diverge.",
    help=f"""Run two programs on the same inputs, and name the first layer at which they diverge.

    A and B are .pt2, {readable_formats(PROFILERS)} files of any model, BUNDLE:PROGRAM for a program of a
    bundle, or a folder of arrays that a device wrote, NAME.npy or NAME.bin, named after the values of the
    other program. Errors are relative to A. The two may be of different formats, precisions and layouts:
    inner values are matched by their names, modules and order, and by their similarity. A .pte keeps only
    the values at the borders of its delegates.

    "error" is the size of the difference divided by that of A's value, and SQNR the same in dB. The exit
    status is 1 if an output differs by more than the precision of the programs explains, or a value is
    NaN. An inner difference that no output shows does not change the exit status.

    \b
    Examples:
      $ whisperport compare encoder.pt2 encoder.onnx --html compare.html
      $ whisperport compare build/float:encoder build/int8:encoder --inputs talk.wav
    """,
)
@click.argument("a", type=Given("program", "bundle", as_text=True))
@click.argument("b", type=Given("program", "bundle", as_text=True))
@field_options(CompareOptions, "inputs", "seed", group="Comparison")
@trusting("Load and run A and B without limits on time and memory")
@option(
    "--all",
    "every_value",
    group="Output",
    is_flag=True,
    help="List every matched value. Otherwise, the layers near the first that diverges are listed",
)
@html_option("a picture of the error from layer to layer, and the first layer that diverges")
@as_json
def compare(
    a: str,
    b: str,
    trust: bool,
    every_value: bool,
    html: Path | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Run the verb."""
    options = CompareOptions(trust=trust, **field_values(CompareOptions, chosen))
    with stages():
        comparison = run_compare(a, b, options)
    following = _next(comparison, a, b)
    if as_json:
        print_json(comparison.to_json())
    else:
        _print(comparison, every_value)
    if html is not None:
        shown = command_line(*following) if following else ""
        write_page(html, compare_page(comparison, shown))
    if following:
        print_next(*following)
    if not comparison:
        sys.exit(1)


def _print(comparison: ComparedPrograms, every_value: bool) -> None:
    rows, hidden = _shown(comparison, every_value)
    print_filled(HEADINGS, [_row(comparison, value) for value in rows])
    print_lines("")
    for text in _sentences(comparison, hidden):
        print_lines(*textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def _shown(comparison: ComparedPrograms, every_value: bool) -> tuple[Sequence[ComparedValue], int]:
    """Return the rows of the table, and how many layers are not among them."""
    if every_value:
        return comparison.values, 0
    layers = comparison.layers
    first = layers.index(comparison.values[comparison.first]) if comparison.first is not None else 0
    rows = layers[max(0, first - SHOWN_BEFORE) : first + SHOWN_AFTER]
    if rows[-1] is not layers[-1]:
        rows = (*rows, layers[-1])
    return rows, len(layers) - len(rows)


def _row(comparison: ComparedPrograms, value: ComparedValue) -> tuple[str, ...]:
    first = comparison.first is not None and value is comparison.values[comparison.first]
    worst = comparison.worst is not None and value is comparison.values[comparison.worst]
    path, _, number = value.line.rpartition(":")
    line = f"{shown_path(Path(path))}:{number}" if path else ""
    return (
        "first" if first else "most" if worst else "",
        shortened(value.layer, LAYER_WIDTH),
        shortened(operators(value), OPERATOR_WIDTH),
        line if len(line) <= LINE_WIDTH else f"…{line[-LINE_WIDTH + 1 :]}",
        "0" if value.error == 0 else f"{value.error:.1e}",
        decibels(value.sqnr_db),
    )


def _sentences(comparison: ComparedPrograms, hidden: int) -> list[str]:
    kept = comparison.kept
    texts = [f"{hidden} further layers are shown with --all"] if hidden else []
    texts.append(
        f"{len(comparison.values)} values were matched, of {kept[0]} in {comparison.a} and {kept[1]} in "
        f"{comparison.b}"
    )
    texts += comparison.notes
    passed = sum(map(bool, comparison.outputs))
    texts += [
        f"output {output.output}: {output.reason} ({output.rule})"
        for output in comparison.outputs
        if not output
    ]
    texts.append(f"{passed} of {len(comparison.outputs)} outputs are within the limits")
    texts += divergence_sentences(comparison)
    return texts


def _next(comparison: ComparedPrograms, a: str, b: str) -> tuple[Argument, ...]:
    return () if comparison or comparison.first is None else ("compare", a, b, "--all")
