"""`whisperport convert`"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.checks_table import print_in_app
from whisperport.apps.cli.console import (
    print_json,
    print_next,
    print_warning,
    stages,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.paths import OutputPath
from whisperport.apps.cli.shared_options import as_json, stall_after
from whisperport.apps.cli.verb import Verb, option
from whisperport.apps.cli.watchdog import run_watched
from whisperport.build.layouts.convert import Converted, ConvertOptions, choose
from whisperport.build.layouts.convert import convert as run_convert

STALL_MIN = 30


@click.command(
    cls=Verb, short_help="Write a checkpoint as the files of another app, and verify them there."
)
@click.argument("checkpoint", type=Given("checkpoint", as_text=True))
@option(
    *("--for", "app"),
    group="App",
    required=True,
    metavar="APP",
    help="App that loads the files, such as faster-whisper; `whisperport apps` lists all",
)
@field_options(ConvertOptions, "precision", "calibration", group="App")
@option(
    "--chips",
    group="App",
    default="",
    metavar="NAME,...",
    help="Chips that the files of an app on NPUs are compiled for, such as rk3588; `whisperport apps` "
    "lists those of each app, and `--for sherpa-onnx` takes those of all its apps on NPUs. --out gets a "
    "folder for each chip; a folder that was verified for the same checkpoint and audio is kept",
)
@option(
    *("--out", "-o"),
    group="Output",
    required=True,
    type=OutputPath(None),
    metavar="PATH",
    help="Folder or file to write, as the app loads it; one that `convert` wrote before is replaced",
)
@as_json
@field_options(ConvertOptions, "verify_with", "language", "allow_unverified", group="Verification")
@stall_after(STALL_MIN)
def convert(
    checkpoint: str,
    app: str,
    chips: str,
    out: Path,
    as_json: bool,
    stall_after: float,
    **chosen: Any,
) -> None:
    """Write a checkpoint as the files that another app loads, and verify them in that app.

    CHECKPOINT is what `whisperport export` accepts. Before the files are moved to --out, the app loads
    them in an environment of its own and transcribes a few clips. Its result must be that of the
    checkpoint in PyTorch, decoded as the app decodes. `whisperport apps --install APP` installs an app;
    `whisperport verify PATH` repeats the verification.

    \b
    Examples:
      $ whisperport convert my-finetune --for faster-whisper --out build/ct2
      $ whisperport convert tiny.en --for whisper.cpp --out build/tiny.en.bin --precision w8
      $ whisperport convert my-finetune --for sherpa-onnx --chips sm8650,rk3588 --out build/npu
    """
    options, results = ConvertOptions(**field_values(ConvertOptions, chosen)), list[Converted]()
    of_chips = {chip: replace(options, chip=chip) for chip in chips.split(",")}
    for chosen_options in of_chips.values():
        choose(app, chosen_options)  # all, before minutes of work for the first
    for chip, chosen_options in of_chips.items():
        place = out / chip
        with stages():
            job = (run_convert, checkpoint, app, place, chosen_options)
            results.append(run_watched(*job, out=place, stall_s=60 * stall_after))
    if as_json:
        described = [converted.to_json() for converted in results]
        print_json(described if chips else described[0])
    else:
        print_in_app({converted.path: converted.record for converted in results})
    for warning in dict.fromkeys(
        warning for converted in results for warning in converted.warnings
    ):
        print_warning(warning)
    if results[-1].record.verification is None:
        print_next("apps", "--install", results[-1].record.app)
    else:
        print_next("verify", results[-1].path)
