"""`whisperport demo`"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from whisperport.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_table,
    shown_path,
    stages,
)
from whisperport.cli.options import as_json, threads
from whisperport.demo import DEMO_TARGETS, DemoRow, run_demo
from whisperport.doctor import is_installed
from whisperport.errors import MissingPackageError
from whisperport.targets import get_target

HEADINGS = (
    "target",
    "programs",
    "delegated nodes",
    "parity",
    "tokens equal",
    "WER",
    "WER (Whisper normalizer)",
    "encoder ms",
    "ms/token",
    "real-time factor",
)
TEXT_WIDTH = 50  # beside the other columns it fits 100


@click.command(short_help="Show the whole way on the model that comes with whisperport.")
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    metavar="DIR",
    help="Where to write the bundles",
)
@click.option(
    "--target",
    "-t",
    "targets",
    multiple=True,
    metavar="NAME",
    default=DEMO_TARGETS,
    show_default=True,
    help="May be repeated",
)
@threads
@as_json
def demo(out: Path, targets: tuple[str, ...], threads: int | None, as_json: bool) -> None:
    """Export the embedded model, verify it, and transcribe the shipped recordings.

    \b
    Example:
      $ whisperport demo
    """
    for target in targets:
        _check_installed(target)
    with stages() as progress:
        rows = run_demo("default", out, targets, threads=threads, progress=progress)
    if as_json:
        print_json([_as_json(row) for row in rows])
        return
    print_rows(rows)
    recording = rows[-1].transcribed[0].recording.path
    print_next("transcribe", shown_path(recording), "--bundle", rows[-1].folder)


def _check_installed(target: str) -> None:
    """Before minutes of work for the target before it."""
    extra = get_target(target).spec.extra
    if not is_installed(extra):
        raise MissingPackageError(
            f"cannot show `{target}`: what lowers to it is not installed",
            hint=f'pip install "whisperport[{extra}]"',
        )


def print_rows(rows: Sequence[DemoRow]) -> None:
    """What was understood by the last target, then one line a target."""
    _print_transcripts(rows[-1])
    print_table(HEADINGS, [_cells(row) for row in rows])
    print_lines(
        "",
        "delegated nodes: those the target runs, of all; parity: worst signal-to-error ratio of any "
        "output",
        "against torch; real-time factor: processing seconds per second of sound",
    )


def _cells(row: DemoRow) -> tuple[str, ...]:
    equal, of = row.tokens_equal
    return (
        row.target,
        str(row.programs),
        f"{row.delegated} of {row.delegated + row.undelegated}",
        f"{row.sqnr_db:.0f} dB",
        f"{equal} of {of}",
        f"{row.errors.rate:.1%}",
        f"{row.whisper_errors.rate:.1%}",
        f"{row.encoder_ms:.1f}",
        f"{row.token_ms:.2f}",
        f"{row.real_time_factor:.3f}",
    )


def _print_transcripts(row: DemoRow) -> None:
    print_table(
        ("recording", "voice", "errors", f"understood by {row.target}"),
        [
            (
                transcribed.recording.path.name,
                "held out" if transcribed.recording.held_out else "trained",
                f"{transcribed.errors.errors} of {transcribed.errors.length}",
                _clipped(transcribed.text) or "(silence)",
            )
            for transcribed in row.transcribed
        ],
    )
    print_lines("")


def _clipped(text: str) -> str:
    """One line: the transcripts are there to be glanced at, and `transcribe` shows them whole."""
    return text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 1] + "…"


def _as_json(row: DemoRow) -> dict[str, object]:
    data = asdict(row) | {
        "folder": str(row.folder),
        "wer": row.errors.rate,
        "wer_whisper_normalizer": row.whisper_errors.rate,
    }
    for transcribed in data["transcribed"]:
        transcribed["recording"]["path"] = transcribed["recording"]["path"].name
    return data
