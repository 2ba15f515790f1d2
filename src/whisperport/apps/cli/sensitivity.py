"""`whisperport sensitivity`"""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from whisperport.apps.cli.console import (
    WIDTH,
    Argument,
    command_line,
    print_json,
    print_lines,
    print_next,
    print_table,
    shortened,
    stages,
)
from whisperport.apps.cli.given import Given, InputPath
from whisperport.apps.cli.sensitivity_page import sensitivity_page
from whisperport.apps.cli.shared_options import as_json, html_option
from whisperport.apps.cli.verb import IntRange, Verb, option
from whisperport.build.sensitivity import SUFFIXES
from whisperport.build.sensitivity import sensitivity as run_sensitivity
from whisperport.system.outputs import write_page
from whisperport.targets.activations import MIN_SQNR_DB

NAME_WIDTH = 52  # characters; the table then fits 100 columns
BAR_DB = 2.0  # of one character


@click.command(
    cls=Verb,
    short_help="Find the activations of a program that 8 bits ruin, with their channels and frames.",
)
@click.argument("program", type=Given("program", "checkpoint", as_text=True))
@option(
    "--inputs",
    group="Measurement",
    type=InputPath(),
    metavar="PATH",
    show_default="four of the audio files that come with whisperport, if PROGRAM reads a spectrogram",
    help="Audio files, or arrays for all inputs: a folder NUMBER/NAME.npy or a file NUMBER.npz for each "
    "sample. The first four are used",
)
@option(
    "--top",
    group="Output",
    type=IntRange(1, 1000),
    default=12,
    show_default="12",
    metavar="N",
    help="Number of activations to list",
)
@html_option("the activations that 8 bits ruin, with pictures of their channels, and all others")
@as_json
def sensitivity(
    program: str, inputs: Path | None, top: int, html: Path | None, as_json: bool
) -> None:
    """Find the activations of a program that one 8-bit scale ruins, before anything is quantized.

    PROGRAM is an .onnx or .pt2 file of any model, or a checkpoint or a name such as tiny.en, whose encoder
    is measured. It runs in float32 on speech. For each activation, "typical" is the signal-to-noise ratio
    that typical values (of the median frame or channel) keep if the activation has one 8-bit scale from its
    smallest to its largest value; below 20 dB the scale ruins it. For the worst ones, "alone" is the ratio
    of the program's output if only this activation is in 8 bits. Give those that are ruined 16 bits or a
    float type, or quantize only the weights.

    \b
    Examples:
      $ whisperport sensitivity tiny.en
      $ whisperport sensitivity encoder.onnx --inputs talks --html sensitivity.html
    """
    with stages():
        rows = run_sensitivity(
            Path(program) if Path(program).suffix in SUFFIXES else program,
            inputs,
        )
    ruined = [row for row in rows if row["ruined"]]
    following = _next(program, is_ruined=bool(ruined))
    if as_json:
        print_json({"activations": rows, "min_typical_db": MIN_SQNR_DB})
    else:
        _print_rows(rows[:top])
        print_lines("", *(line for row in ruined[:top] for line in wrap(row["text"], WIDTH)))
        print_lines(
            *([""] if ruined else []),
            f"one 8-bit scale ruins {len(ruined)} of {len(rows)} activations (typical values below "
            f"{MIN_SQNR_DB:g} dB)",
        )
    if html is not None:
        page = sensitivity_page(Path(program).name, rows, MIN_SQNR_DB, command_line(*following))
        write_page(html, page)
    if not as_json:
        print_next(*following)


def _next(program: str, *, is_ruined: bool) -> tuple[Argument, ...]:
    """Quantize: a checkpoint's encoder, or a file, with 16 bits for activations if 8 ruin some."""
    suffix = Path(program).suffix
    if suffix == ".onnx":
        precision = "w8a16" if is_ruined else "w8a8"
        return ("compile", Path(program), "--target", "NAME", "--precision", precision)
    if suffix in SUFFIXES:
        return ("lower", Path(program), "--target", "NAME", "--out", "FILE")
    return (
        *("export", program, "--target", "onnxruntime", "--precision", "encoder=w8a8"),
        *("--out", "DIR"),
    )


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print_table(
        ("activation", "operator", "typical", "alone", ""),
        [
            (
                shortened(row["activation"], NAME_WIDTH),
                row["operator"],
                f"{row['typical_db']:.0f} dB",
                "" if row["alone_db"] is None else f"{row['alone_db']:.0f} dB",
                "#" * round(max(0.0, min(row["typical_db"], 40.0)) / BAR_DB),
            )
            for row in rows
        ],
    )
