"""`whisperport judge`"""

from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.checks_table import print_checks, print_failures
from whisperport.apps.cli.console import (
    print_json,
    print_lines,
    print_next,
    print_table,
    stages,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.shared_options import as_json
from whisperport.apps.cli.verb import Verb, option
from whisperport.build.judge.judge import Judgement
from whisperport.build.judge.judge import judge as run_judge
from whisperport.build.layouts.convert import ConvertOptions

MOST_WEIGHTS = 5  # that are named


@click.command(
    cls=Verb, short_help="Find what is wrong with the files of an app, whoever made them."
)
@click.argument("path", type=Given("layout", "checkpoint", "program"))
@option(
    "--checkpoint",
    group="Comparison",
    type=Given("checkpoint", as_text=True),
    metavar="CHECKPOINT",
    help="Checkpoint that the files were made of: its weights are looked for in the files, and each "
    "installed app must return what the checkpoint emits",
)
@option(
    *("--for", "app"),
    group="Comparison",
    metavar="APP",
    help="Run this app only. Default: every installed app that loads such files",
)
@field_options(ConvertOptions, "verify_with", "language", group="Comparison")
@as_json
def judge(
    path: Path, checkpoint: str | None, app: str | None, as_json: bool, **chosen: Any
) -> None:
    """Find what is wrong with a folder or file that an app loads, whoever made it.

    PATH is the folder or the only file that an app loads; `whisperport apps` lists the apps. What the app
    needs and the files lack is listed, with a rule's code; `whisperport explain CODE` says more. With
    --checkpoint, each weight is looked for in the files, and each app that is installed must return what
    the checkpoint emits. The exit status is 1 if anything is wrong, and 0 if the app only loses something
    (a warning). The files are only read, except by the apps that load them.

    \b
    Examples:
      $ whisperport judge their-folder
      $ whisperport judge their-folder --checkpoint openai/whisper-small
    """
    with stages():
        judgement = run_judge(path, checkpoint, app=app, **field_values(ConvertOptions, chosen))
    if as_json:
        print_json(judgement.to_json())
    else:
        _print(judgement)
    if not judgement.checkpoint:
        print_next("judge", path, "--checkpoint", "CHECKPOINT")
    elif not judgement:
        app = next(iter(judgement.layout.apps))
        print_next("convert", judgement.checkpoint, "--for", app, "--out", "build/converted")
    if not judgement:
        raise SystemExit(1)


def _print(judgement: Judgement) -> None:
    apps = ", ".join(judgement.layout.apps)
    print_lines(
        f"{judgement.path}: {judgement.layout.title}, {judgement.precision}, for {apps}", ""
    )
    if judgement.problems:
        kinds = {True: "warning", False: "wrong"}
        rows = [(p.code, kinds[p.is_warning], p.file, p.reason) for p in judgement.problems]
        print_table(("rule", "kind", "file", "problem"), rows)
    elif judgement.layout.rules:
        print_lines(f"rules: none of {len(judgement.layout.rules)} is broken")
    else:
        print_lines("rules: there are none for such files")
    _print_weights(judgement)
    checks = [check for run in judgement.runs for check in run.checks]
    if checks:
        print_lines("")
        print_checks(checks)
        print_failures([f"{check.what}: {check.reason}" for check in checks if not check.passed])
    for run in judgement.runs:
        if run.reason:
            print_lines("", f"{'FAIL: ' if run.failed else ''}{run.app}: {run.reason}")
    print_lines("")
    print_table(
        ("app", "what it does not take from a checkpoint, or limits"),
        [(name, "; ".join(app.drops)) for name, app in judgement.layout.apps.items()],
    )


def _print_weights(judgement: Judgement) -> None:
    """Print how many weights are those of the checkpoint, and which are not."""
    identity = judgement.identity
    if identity is None:
        return
    rounded = [
        f"{len(names)} rounded to {form}"
        for names, form in ((identity.half, "float16"), (identity.eight_bits, "8 bits"))
        if names
    ]
    counts = ", ".join([f"{len(identity.equal)} equal to the bit", *rounded])
    same = len(identity.equal) + len(identity.half) + len(identity.eight_bits)
    print_lines(
        f"weights: {same} of {same + len(identity.changed)} are those of {judgement.checkpoint} ({counts})"
    )
    for weight in identity.changed[:MOST_WEIGHTS]:
        print_lines(f"  changed: {weight}")
    if len(identity.changed) > MOST_WEIGHTS:
        print_lines(f"  and {len(identity.changed) - MOST_WEIGHTS} more")
