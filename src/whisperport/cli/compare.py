"""`whisperport compare`"""

import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from whisperport.cli.console import (
    WIDTH,
    Argument,
    print_filled,
    print_json,
    print_lines,
    print_next,
    shortened,
    shown_path,
    stages,
)
from whisperport.cli.fields import field_options, field_values
from whisperport.cli.options import as_json, trusting
from whisperport.cli.verb import Verb, option
from whisperport.commands.compare import CompareOptions
from whisperport.commands.compare import compare as run_compare
from whisperport.diagnosis.divergence import ComparedPrograms, ComparedValue

SHOWN_BEFORE, SHOWN_AFTER = 3, 20  # layers around the first that diverges
HEADINGS = ("", "layer", "operator", "Python line", "error", "SQNR")
LAYER_WIDTH, LINE_WIDTH, OPERATOR_WIDTH = 38, 26, 14  # characters; the table then fits 100 columns


@click.command(
    cls=Verb, short_help="Compare two programs, and name the first layer at which they diverge."
)
@click.argument("a")
@click.argument("b")
@field_options(CompareOptions, "inputs", "seed", group="Comparison")
@trusting("Load and run A and B without limits on time and memory")
@option(
    "--all",
    "every_value",
    group="Output",
    is_flag=True,
    help="List every matched value. Otherwise, the layers near the first that diverges are listed",
)
@as_json
def compare(a: str, b: str, trust: bool, every_value: bool, as_json: bool, **chosen: Any) -> None:
    """Run two programs on the same inputs, and name the first layer at which they diverge.

    A and B are .pt2, .onnx, .tflite or .pte files of any model, BUNDLE:PROGRAM for a program of a bundle,
    or a folder of arrays that a device wrote, NAME.npy or NAME.bin, named after the values of the other
    program. Errors are relative to A. The two may be of different formats, precisions and layouts: inner
    values are matched by their names, modules and order, and by their similarity. A .pte keeps only the
    values at the borders of its delegates.

    "error" is the size of the difference divided by that of A's value, and SQNR the same in dB. The exit
    status is 1 if an output differs by more than the precision of the programs explains, or a value is
    NaN. An inner difference that no output shows does not change the exit status.

    \b
    Examples:
      $ whisperport compare encoder.pt2 encoder.onnx
      $ whisperport compare build/float:encoder build/int8:encoder --inputs talk.wav
    """
    options = CompareOptions(trust=trust, **field_values(CompareOptions, chosen))
    with stages() as progress:
        found = run_compare(a, b, options, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found, every_value)
    if found.first is not None and (command := _next(found, a, b)):
        print_next(*command)
    if not found:
        sys.exit(1)


def _print(found: ComparedPrograms, every_value: bool) -> None:
    rows, hidden = _shown(found, every_value)
    print_filled(HEADINGS, [_row(found, one) for one in rows])
    print_lines("")
    for text in _sentences(found, hidden):
        print_lines(*textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def _shown(found: ComparedPrograms, every_value: bool) -> tuple[Sequence[ComparedValue], int]:
    """Return the rows of the table, and how many layers are not among them."""
    if every_value:
        return found.values, 0
    layers = found.layers
    first = layers.index(found.values[found.first]) if found.first is not None else 0
    rows = layers[max(0, first - SHOWN_BEFORE) : first + SHOWN_AFTER]
    if rows[-1] is not layers[-1]:
        rows = (*rows, layers[-1])
    return rows, len(layers) - len(rows)


def _row(found: ComparedPrograms, one: ComparedValue) -> tuple[str, ...]:
    first = found.first is not None and one is found.values[found.first]
    worst = found.worst is not None and one is found.values[found.worst]
    path, _, number = one.line.rpartition(":")
    line = f"{shown_path(Path(path))}:{number}" if path else ""
    operator = one.operator
    if one.other_operator not in ("", one.operator):
        operator = f"{operator}/{one.other_operator}"
    return (
        "first" if first else "most" if worst else "",
        shortened(one.layer, LAYER_WIDTH),
        shortened(operator, OPERATOR_WIDTH),
        line if len(line) <= LINE_WIDTH else f"…{line[-LINE_WIDTH + 1 :]}",
        "0" if one.error == 0 else f"{one.error:.1e}",
        _decibels(one.sqnr_db),
    )


def _decibels(number: float) -> str:
    if number == math.inf:
        return "equal"
    return f"{number:.0f} dB" if math.isfinite(number) else "NaN"


def _sentences(found: ComparedPrograms, hidden: int) -> list[str]:
    kept = found.kept
    texts = [f"{hidden} further layers are shown with --all"] if hidden else []
    texts.append(
        f"{len(found.values)} values were matched, of {kept[0]} in {found.a} and {kept[1]} in {found.b}"
    )
    texts += found.notes
    passed = sum(map(bool, found.outputs))
    texts += [f"output {one.output}: {one.reason} ({one.rule})" for one in found.outputs if not one]
    texts.append(f"{passed} of {len(found.outputs)} outputs are within the limits")
    texts += _divergence(found)
    return texts


def _divergence(found: ComparedPrograms) -> list[str]:
    """Say where the programs diverge, and what to do next."""
    last = found.values[-1]
    if found.first is None:
        largest = max(one.error for one in found.values)
        if largest == 0:
            return ["The programs are equal: every matched value is identical."]
        grown = f"The largest error of a value is {largest:.1e}"
        return [f"No layer diverges: the errors are those of rounding. {grown}."]
    first = found.values[found.first]
    place = f" ({first.line})" if first.line else ""
    texts = [
        f"The programs diverge first at {first.fault}{place}: the error of `{first.name}` is "
        f"{_error(first)}, that of what it is computed from at most {first.before:.1e}. "
        f"At the last matched value, `{last.name}`, it is {_error(last)}."
    ]
    if others := [module for module in first.modules if module != first.fault]:
        texts.append(
            f"One of the programs joins it with {', '.join(others)}, where the fault may be too."
        )
    if first.between:
        extra = ", ".join(f"{operator} in {side}" for side, operator, _ in first.between[:6])
        texts.append(f"Before it, only one of the programs computes: {extra}.")
    if found.worst is not None and found.worst != found.first:
        worst = found.values[found.worst]
        texts.append(
            f"The error grows most at {worst.fault}: from {worst.before:.1e} to {_error(worst)}."
        )
    operators = dict.fromkeys(filter(None, (first.operator, first.other_operator)))
    texts.append(
        f"Compare the weights and the arguments of this layer ({', '.join(operators)}) in both programs. "
        "If it is quantized, give it more bits, or leave it in float."
    )
    return texts


def _error(one: ComparedValue) -> str:
    return f"{one.error:.1e} ({_decibels(one.sqnr_db)})"


def _next(found: ComparedPrograms, a: str, b: str) -> tuple[Argument, ...]:
    return () if found else ("compare", a, b, "--all")
