"""`whisperport import-hef`"""

from pathlib import Path

import click

from whisperport.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_note,
    print_table,
    stages,
)
from whisperport.cli.options import as_json, stall_after, threads
from whisperport.importing import CHIPS, ImportOptions
from whisperport.importing import import_hef as run_import
from whisperport.targets import RunOptions
from whisperport.watchdog import run_watched


@click.command("import-hef", short_help="Wrap a published Hailo file into a bundle.")
@click.argument("hef", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    required=True,
    metavar="CHECKPOINT",
    help="What the HEF was made of, as `whisperport export` takes it",
)
@click.option(
    "--out",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to write the bundle",
)
@click.option(
    "--target",
    "-t",
    type=click.Choice([chip.name for chip in CHIPS]),
    help="The chip that is to run it  [default: the one it was compiled for]",
)
@click.option(
    "--decoder",
    type=click.Path(path_type=Path),
    metavar="HEF",
    help="Also a decoder without a cache, to be measured beside the cached one",
)
@click.option(
    "--assets",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The decoder's tables, to be compared with the checkpoint's",
)
@stall_after
@threads
@as_json
def import_hef(
    hef: Path,
    checkpoint: str,
    out: Path,
    target: str | None,
    decoder: Path | None,
    assets: Path | None,
    stall_after: float,
    threads: int | None,
    as_json: bool,
) -> None:
    """Wrap the HEF of a Whisper encoder into a bundle.

    Its window and chip are read from it, and its shapes held against the checkpoint, which gives all
    other programs. They are verified with ONNX in the HEF's place: the HEF itself is not run.

    \b
    Example:
      $ whisperport import-hef tiny-whisper-encoder-10s.hef --checkpoint tiny --out build/tiny-hailo8l
    """
    options = ImportOptions(
        chip=target or "", decoder=decoder, assets=assets, run=RunOptions(threads=threads)
    )
    with stages() as say:
        job = (run_import, hef, checkpoint, out, options)
        bundle = run_watched(*job, out=out, say=say, stall_s=60 * stall_after)
    manifest = bundle.manifest
    if as_json:
        print_json(manifest.to_json())
    else:
        rows = [(e.spec.name, e.target, e.files[0], e.status) for e in manifest.programs]
        print_table(("program", "target", "file", "status"), rows)
        print_lines("", f"{out}: imported")
    print_note("the HEF was not run here: copy the bundle to the board, and transcribe there")
    print_next("transcribe", "talk.mp3", "--bundle", out)
