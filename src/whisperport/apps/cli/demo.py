"""`whisperport demo`"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from whisperport.apps.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_note,
    print_table,
    shown_path,
    stages,
)
from whisperport.apps.cli.paths import OutputPath
from whisperport.apps.cli.shared_options import as_json, threads
from whisperport.apps.cli.verb import Verb, option
from whisperport.apps.demo import DEMO_TARGETS, DemoRow, choose_checkpoint, run_demo
from whisperport.build.doctor import is_installed
from whisperport.errors import MissingPackageError
from whisperport.targets import get_target

# With line breaks, so that the table fits 100 columns.
HEADINGS = (
    "target",
    "programs",
    "delegated\nnodes",
    "min\nSQNR",
    "equal\ntokens",
    "WER",
    "WER (Whisper\nnormalizer)",
    "encoder\nms",
    "ms per\ntoken",
    "real-time\nfactor",
)
NOT_JUDGED = "-"
TEXT_WIDTH = 50  # characters; the table then fits 100 columns


@click.command(
    cls=Verb, short_help="Export, verify and run OpenAI's tiny.en or the small embedded model."
)
@option(
    "--out",
    "-o",
    type=OutputPath("folder"),
    default=Path("build/demo"),
    show_default=True,
    metavar="DIR",
    group="Output",
    help="Folder to write the bundles to, one folder per target; bundles there are replaced",
)
@option(
    "--target",
    "-t",
    "targets",
    multiple=True,
    metavar="NAME",
    default=DEMO_TARGETS,
    show_default=True,
    group="Target",
    help="Target to export for; may be repeated",
)
@threads
@as_json
def demo(out: Path, targets: tuple[str, ...], threads: int | None, as_json: bool) -> None:
    """Export a model, verify it, and transcribe synthetic sample speech that comes with whisperport.

    The model is OpenAI's tiny.en if a cache or the network has it, or else the small embedded model. For
    each target, the table shows the number of delegated nodes, the numerical difference from PyTorch, the
    word error rate of the embedded model and the speed. It takes minutes.

    \b
    Examples:
      $ whisperport demo
      $ whisperport demo --target xnnpack --out build/xnnpack-demo
    """
    for target in targets:
        _check_installed(target)
    with stages():
        checkpoint, which = choose_checkpoint()
        rows = run_demo(checkpoint, out, targets, threads=threads)
    print_note(which)
    if as_json:
        print_json([_as_json(row) for row in rows])
        return
    print_rows(rows)
    audio = rows[-1].transcribed[0].clip.path
    print_next("transcribe", shown_path(audio), "--bundle", rows[-1].folder)


def _check_installed(target: str) -> None:
    """Check that a target can be lowered to, before minutes of work for another target.

    Raises:
        MissingPackageError: a package is not installed.
    """
    extra = get_target(target).spec.software.extra
    if not is_installed(extra):
        raise MissingPackageError(
            f"cannot export for `{target}`: a package that it needs is not installed",
            hint=f'pip install "whisperport[{extra}]"',
        )


def print_rows(rows: Sequence[DemoRow]) -> None:
    """Print the transcripts of the last target, then one row per target."""
    _print_transcripts(rows[-1])
    print_table(HEADINGS, [_cells(row) for row in rows])
    if rows[-1].embedded:
        print_lines("", "WER and transcripts: embedded model, synthetic speech")
    else:
        print_lines(
            "", "- : the sample is synthetic speech, which says nothing about this model's WER"
        )
    print_lines(
        "",
        "delegated nodes: nodes that the target runs, of all nodes",
        "min SQNR: lowest signal-to-quantization-noise ratio of any output, compared with PyTorch",
        "equal tokens: short clips of which every token equals the one that PyTorch decodes",
        "WER: word error rate; the Whisper normalizer makes it comparable with published rates",
        "encoder ms, ms per token: median time of one window, and of one decoded token",
        "real-time factor: seconds of processing per second of audio",
    )


def _cells(row: DemoRow) -> tuple[str, ...]:
    equal, of = row.tokens_equal
    return (
        row.target,
        str(row.programs),
        f"{row.delegated} of {row.delegated + row.undelegated}",
        f"{row.sqnr_db:.0f} dB",
        f"{equal} of {of}",
        f"{row.errors.rate:.1%}" if row.embedded else NOT_JUDGED,
        f"{row.whisper_errors.rate:.1%}" if row.embedded else NOT_JUDGED,
        f"{row.encoder_ms:.1f}",
        f"{row.token_ms:.2f}",
        f"{row.real_time_factor:.3f}",
    )


def _print_transcripts(row: DemoRow) -> None:
    print_table(
        ("audio file", "voice in\ntraining", "word\nerrors", f"transcript by {row.target}"),
        [
            (
                transcribed.clip.path.name,
                ("no" if transcribed.clip.held_out else "yes") if row.embedded else NOT_JUDGED,
                f"{transcribed.errors.errors} of {transcribed.errors.length}"
                if row.embedded
                else NOT_JUDGED,
                _clipped(transcribed.text) or "(silence)",
            )
            for transcribed in row.transcribed
        ],
    )
    print_lines("")


def _clipped(text: str) -> str:
    """The text, shortened to one line; `transcribe` prints it completely."""
    return text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 1] + "…"


def _as_json(row: DemoRow) -> dict[str, object]:
    data = asdict(row) | {
        "folder": str(row.folder),
        "wer": row.errors.rate,
        "wer_whisper_normalizer": row.whisper_errors.rate,
    }
    for transcribed in data["transcribed"]:
        transcribed["clip"]["path"] = transcribed["clip"]["path"].name
    return data
