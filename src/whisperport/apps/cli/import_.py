"""`whisperport import`"""

from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_note,
    print_table,
    stages,
)
from whisperport.apps.cli.evidence_words import how_to_record, manifest_json
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.shared_options import (
    STALL_MIN,
    as_json,
    bundle_out,
    pairs,
    stall_after,
    target_option,
    threads,
)
from whisperport.apps.cli.verb import TargetOptions, Verb, option
from whisperport.apps.cli.watchdog import run_watched
from whisperport.build.compile.importing import ImportOptions, prepared_at
from whisperport.build.compile.importing import import_artifact as run_import
from whisperport.targets import RunOptions


@click.command(
    "import",
    cls=Verb,
    short_help="Make a bundle from a compiled encoder that a vendor published.",
    target_options=TargetOptions(
        "--option", lambda target: target.importer.options if target.importer else None
    ),
)
@click.argument("artifact", metavar="FILE", type=Given("program"))
@option(
    "--checkpoint",
    group="Model",
    required=True,
    type=Given("checkpoint", as_text=True),
    metavar="CHECKPOINT",
    help="Checkpoint that FILE was compiled from: a hub id, folder, .pt file or name, as for "
    "`whisperport export`",
)
@field_options(ImportOptions, "programs", group="Model")
@field_options(ImportOptions, "target", group="Target")
@target_option
@bundle_out
@as_json
@threads
@stall_after(STALL_MIN)
def import_verb(
    artifact: Path,
    checkpoint: str,
    out: Path,
    target_options: tuple[str, ...],
    stall_after: float,
    threads: int | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Make a bundle from FILE, the compiled Whisper encoder that a vendor published.

    The window and the target are read from FILE. Its shapes are compared with the checkpoint, from which
    all other programs are exported. FILE itself is not run: the verification runs the checkpoint's
    encoder on the CPU in its place. Run `whisperport verify BUNDLE --record` on the device to verify FILE.

    \b
    Examples:
      $ whisperport import FILE --checkpoint tiny --out build/tiny-npu
      $ whisperport import FILE --checkpoint openai/whisper-base --out build/base-npu
    """
    options = ImportOptions(
        options=pairs("--option", target_options),
        run=RunOptions(threads=threads),
        **field_values(ImportOptions, chosen),
    )
    with stages():
        job = (run_import, artifact, checkpoint, out, options)
        bundle = run_watched(*job, out=out, writes=prepared_at(out), stall_s=60 * stall_after)
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
