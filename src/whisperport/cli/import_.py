"""`whisperport import`"""

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
from whisperport.cli.evidence_words import how_to_record, manifest_json
from whisperport.cli.options import (
    as_json,
    bundle_out,
    options_help,
    pairs,
    stall_after,
    target_option,
    threads,
)
from whisperport.importing import ImportOptions
from whisperport.importing import import_artifact as run_import
from whisperport.targets import TARGETS, RunOptions
from whisperport.watchdog import run_watched

IMPORTERS = {one.spec.name: one.importer for one in TARGETS if one.importer is not None}


@click.command(
    "import",
    short_help="Put a published, compiled file into a bundle.",
    epilog=options_help({name: importer.options for name, importer in IMPORTERS.items()}),
)
@click.argument("artifact", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    required=True,
    metavar="CHECKPOINT",
    help="What the file was compiled from, as `whisperport export` takes it",
)
@bundle_out
@click.option(
    "--target",
    "-t",
    default="",
    metavar="NAME",
    help=f"The target that runs the file: {', '.join(IMPORTERS)}  [default: the one that it was "
    "compiled for]",
)
@click.option(
    "--program",
    "programs",
    multiple=True,
    metavar="PROGRAM=FILE",
    help="Also the compiled file of another program, such as uncached_decoder; may be repeated",
)
@target_option
@stall_after
@threads
@as_json
def import_verb(
    artifact: Path,
    checkpoint: str,
    out: Path,
    target: str,
    programs: tuple[str, ...],
    target_options: tuple[str, ...],
    stall_after: float,
    threads: int | None,
    as_json: bool,
) -> None:
    """Put the compiled file of a Whisper encoder, as vendors publish them, into a bundle.

    Its window and target are read from the file, and its shapes are compared with the checkpoint, which
    gives all other programs. They are verified with emulation in place of the file, which is not run.

    \b
    Example:
      $ whisperport import encoder.bin --checkpoint tiny --out build/tiny-npu
    """
    options = ImportOptions(
        target=target,
        programs={name: Path(file) for name, file in pairs("--program", programs).items()},
        options=pairs("--option", target_options),
        run=RunOptions(threads=threads),
    )
    with stages() as progress:
        job = (run_import, artifact, checkpoint, out, options)
        bundle = run_watched(*job, out=out, progress=progress, stall_s=60 * stall_after)
    manifest = bundle.manifest
    if as_json:
        print_json(manifest_json(manifest))
    else:
        rows = [
            (e.spec.name, e.target, e.files[0], manifest.status(e.spec.name))
            for e in manifest.programs
        ]
        print_table(("program", "target", "file", "status"), rows)
        print_lines("", f"{out}: imported")
    print_note(how_to_record(out, manifest))
    print_next("transcribe", "talk.mp3", "--bundle", out)
