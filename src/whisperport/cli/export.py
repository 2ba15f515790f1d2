"""`whisperport export`"""

from pathlib import Path

import click

from whisperport.bundle import Manifest
from whisperport.cli.console import Word, print_json, print_lines, print_next, print_table, stages
from whisperport.cli.options import as_json, no_preflight, pairs, stall_after, threads
from whisperport.exporting import ExportOptions
from whisperport.exporting import export as run_export
from whisperport.spec import Status
from whisperport.targets import RunOptions
from whisperport.targets.onnxruntime import OPSETS
from whisperport.watchdog import run_watched
from whisperport.window import DEFAULT_PADDING, PADDINGS, Padding, WindowOptions

CHECKED: Status = "checked against contract"  # with no compiler at hand


@click.command(short_help="Lower a checkpoint to a target, verify it, and write a bundle.")
@click.argument("checkpoint")
@click.option("--target", "-t", required=True, metavar="NAME", help="See `whisperport targets`")
@click.option(
    "--out",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to write the bundle",
)
@click.option(
    "--window",
    type=float,
    metavar="SECONDS",
    help="Sound taken at once, a multiple of 0.02  [default: as the checkpoint was trained, 30]",
)
@click.option(
    "--padding",
    type=click.Choice(PADDINGS),
    default=DEFAULT_PADDING,
    show_default=True,
    help="What the decoder hears after a shorter window",
)
@click.option(
    "--pad-to",
    type=float,
    metavar="SECONDS",
    help="How much it hears in all  [default: as the checkpoint was trained]",
)
@click.option(
    "--sound",
    type=float,
    metavar="SECONDS",
    help="Sound put into a window; the rest stays quiet  [default: all of it]",
)
@click.option(
    "--place",
    multiple=True,
    metavar="PROGRAM=NAME",
    help="Put one program on another target; may be repeated",
)
@click.option(
    "--full", is_flag=True, help="Also the decoder without a cache, for targets that measure it"
)
@click.option(
    "--opset",
    type=click.IntRange(OPSETS[0], OPSETS[-1]),
    help="ONNX opset to write, where the target is ONNX  [default: the target's newest]",
)
@click.option(
    "--option",
    "target_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the target, such as rows=64; may be repeated",
)
@click.option(
    "--allow-unverified",
    is_flag=True,
    help="Write the bundle although verification failed, marked so for ever",
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
    sound: float | None,
    place: tuple[str, ...],
    full: bool,
    opset: int | None,
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
        window=WindowOptions(seconds=window, padding=padding, heard_s=pad_to, sound_s=sound),
        place=pairs(place),
        full=full,
        lower=pairs(target_options) | ({"opset": str(opset)} if opset else {}),
        allow_unverified=allow_unverified,
        preflight=not no_preflight,
        run=RunOptions(threads=threads),
    )
    with stages() as say:
        job = (run_export, checkpoint, target, out, options)
        bundle = run_watched(*job, out=out, say=say, stall_s=60 * stall_after)
    manifest = bundle.manifest
    if as_json:
        print_json(manifest.to_json())
    else:
        print_table(
            ("program", "target", "delegated", "left", "status"),
            [
                (
                    entry.spec.name,
                    entry.target,
                    str(entry.delegation.get("delegated", "")),
                    ", ".join(entry.delegation.get("undelegated", ())) or "0",
                    entry.status,
                )
                for entry in manifest.programs
            ],
        )
        absent = dict.fromkeys(e.target for e in manifest.programs if e.status == CHECKED)
        stood_in = f", with a stand-in for {', '.join(absent)}" if absent else ""
        status = "verified" if manifest.verified else "NOT VERIFIED"
        print_lines("", f"{out}: {status}{stood_in}")
    print_next(*_next_command(out, manifest))


def _next_command(out: Path, manifest: Manifest) -> tuple[Word, ...]:
    if any(entry.status == CHECKED for entry in manifest.programs):
        return "compile", out, "--calibration", "AUDIO_DIR"
    return "transcribe", "talk.mp3", "--bundle", out
