"""`whisperport export`"""

from pathlib import Path

import click

from whisperport.bundle import Manifest
from whisperport.cli.console import Word, print_json, print_lines, print_next, print_table, stages
from whisperport.cli.evidence_words import emulated_targets, manifest_json, verified_words
from whisperport.cli.options import (
    as_json,
    bundle_out,
    no_preflight,
    options_help,
    pairs,
    stall_after,
    target_option,
    threads,
)
from whisperport.exporting import ExportOptions
from whisperport.exporting import export as run_export
from whisperport.targets import TARGETS, RunOptions
from whisperport.watchdog import run_watched
from whisperport.window import DEFAULT_PADDING, PADDINGS, Padding, WindowOptions


@click.command(
    short_help="Lower a checkpoint to a target, verify it, and write a bundle.",
    epilog=options_help({one.spec.name: one.lower_options for one in TARGETS}),
)
@click.argument("checkpoint")
@click.option(
    "--target",
    "-t",
    required=True,
    metavar="NAME",
    help="Target that runs the programs; `whisperport targets` lists them",
)
@bundle_out
@click.option(
    "--window",
    type=float,
    metavar="SECONDS",
    help="Length of audio that the encoder reads at once, a multiple of 0.02  [default: the "
    "checkpoint's, 30]",
)
@click.option(
    "--padding",
    type=click.Choice(PADDINGS),
    default=DEFAULT_PADDING,
    show_default=True,
    help="What follows the audio of a window shorter than the checkpoint's, for the decoder",
)
@click.option(
    "--pad-to",
    type=float,
    metavar="SECONDS",
    help="Length of the audio context that the decoder attends to, padding included  "
    "[default: the checkpoint's]",
)
@click.option(
    "--audio",
    type=float,
    metavar="SECONDS",
    help="Length of audio put into each window; the rest of it is silence  [default: the "
    "complete window]",
)
@click.option(
    "--placement",
    multiple=True,
    metavar="PROGRAM=TARGET",
    help="Run one program on another target; may be repeated",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    metavar="[PROGRAM=]NAME",
    help="Precision of all programs on the target, or of one program; may be repeated  "
    "[default: the target's]",
)
@click.option(
    "--uncached-decoder",
    is_flag=True,
    help="Export the decoder without KV cache too, for targets that can run it",
)
@target_option
@click.option(
    "--allow-unverified",
    is_flag=True,
    help="Write the bundle although its verification failed; it stays marked as unverified",
)
@no_preflight
@stall_after
@threads
@as_json
def export(
    checkpoint: str,
    target: str,
    out: Path,
    window: float | None,
    padding: Padding,
    pad_to: float | None,
    audio: float | None,
    placement: tuple[str, ...],
    precisions: tuple[str, ...],
    uncached_decoder: bool,
    target_options: tuple[str, ...],
    allow_unverified: bool,
    no_preflight: bool,
    stall_after: float,
    threads: int | None,
    as_json: bool,
) -> None:
    """Lower a checkpoint to one target, verify it, and write a bundle.

    CHECKPOINT is a folder or hub id in Hugging Face's form, an OpenAI .pt file, a name such as
    tiny.en or turbo, or `default`: the small model that comes with whisperport.

    \b
    Example:
      $ whisperport export openai/whisper-tiny --target xnnpack --out build/tiny-xnnpack
    """
    options = ExportOptions(
        window=WindowOptions(seconds=window, padding=padding, context_s=pad_to, audio_s=audio),
        placement=pairs("--placement", placement),
        precision=_of_all(precisions),
        precisions=pairs("--precision", tuple(p for p in precisions if "=" in p)),
        options=pairs("--option", target_options),
        uncached_decoder=uncached_decoder,
        allow_unverified=allow_unverified,
        preflight=not no_preflight,
        run=RunOptions(threads=threads),
    )
    with stages() as progress:
        job = (run_export, checkpoint, target, out, options)
        bundle = run_watched(*job, out=out, progress=progress, stall_s=60 * stall_after)
    manifest = bundle.manifest
    if as_json:
        print_json(manifest_json(manifest))
    else:
        print_table(
            ("program", "target", "delegated", "left", "status"),
            [
                (
                    entry.spec.name,
                    entry.target,
                    str(entry.delegation.get("delegated", "")),
                    ", ".join(entry.delegation.get("undelegated", ())) or "0",
                    manifest.status(entry.spec.name),
                )
                for entry in manifest.programs
            ],
        )
        print_lines("", f"{out}: {verified_words(manifest)}")
    print_next(*_next_command(out, manifest))


def _of_all(precisions: tuple[str, ...]) -> str:
    """The precision that is given without a program.

    Raises:
        click.BadParameter: there are several.
    """
    found = [one for one in precisions if "=" not in one]
    if len(found) > 1:
        raise click.BadParameter("`--precision` is given twice without a program")
    return found[0] if found else ""


def _next_command(out: Path, manifest: Manifest) -> tuple[Word, ...]:
    if emulated_targets(manifest):
        return "compile", out, "--calibration", "AUDIO_DIR"
    return "transcribe", "talk.mp3", "--bundle", out
