"""`whisperport judge`"""

from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.checks_table import print_checks, print_failures
from whisperport.apps.cli.console import (
    Argument,
    command_line,
    print_json,
    print_lines,
    print_next,
    print_table,
    stages,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.judge_page import answers, judge_page, verdict_sentence
from whisperport.apps.cli.shared_options import as_json, html_option
from whisperport.apps.cli.verb import Verb, option
from whisperport.build.judge.judge import Judgement
from whisperport.build.judge.judge import judge as run_judge
from whisperport.build.layouts.convert import ConvertOptions
from whisperport.system.outputs import write_page


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
    show_default="every installed app that loads them",
    help="App that runs the files",
)
@field_options(ConvertOptions, "verify_with", "language", group="Comparison")
@option(
    "--precision",
    group="Input",
    metavar="NAME",
    show_default="the first that is there",
    help="Precision of the weights that are judged, if the folder has several",
)
@html_option(
    "the answers, the words that differ with their audio, the broken rules and the weights"
)
@as_json
def judge(
    path: Path,
    checkpoint: str | None,
    app: str | None,
    precision: str | None,
    html: Path | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Find what is wrong with a folder or file that an app loads, whoever made it.

    PATH is the folder or the only file that an app loads; `whisperport apps` lists the apps. What the app
    needs and the files lack is listed, with a rule's code; `whisperport explain CODE` says more. With
    --checkpoint, each weight is looked for in the files, and each app that is installed must return what
    the checkpoint emits. The exit status is 1 if anything is wrong, and 0 if there are only warnings: the
    app transcribes, but loses something, such as word timestamps. The files are not changed; their graphs
    run only in apps, and in processes with limits, which compare them layer by layer if something differs.

    \b
    Examples:
      $ whisperport judge their-folder
      $ whisperport judge their-folder --checkpoint openai/whisper-small
    """
    with stages():
        judgement = run_judge(
            path, checkpoint, app=app, precision=precision, **field_values(ConvertOptions, chosen)
        )
    following = _next(judgement)
    if as_json:
        print_json(judgement.to_json())
    else:
        print_judgement(judgement)
    if html is not None:
        write_page(html, judge_page(judgement, command_line(*following) if following else ""))
    if following:
        print_next(*following)
    if not judgement:
        raise SystemExit(1)


def _next(judgement: Judgement) -> tuple[Argument, ...]:
    remedies = {problem.remedy for problem in judgement.problems}
    if remedies & {"fix", "fix --checkpoint"}:
        name = judgement.checkpoint or ("CHECKPOINT" if "fix" not in remedies else "")
        known = ("--checkpoint", name) if name else ()
        return ("fix", judgement.path, *known, "--out", "build/fixed")
    if not judgement.checkpoint:
        return ("judge", judgement.path, "--checkpoint", "CHECKPOINT")
    if judgement:
        return ()
    if target := judgement.layout.target:
        return ("export", judgement.checkpoint, "--target", target, "--out", "build/exported")
    app = next(iter(judgement.layout.apps))
    return ("convert", judgement.checkpoint, "--for", app, "--out", "build/converted")


def print_judgement(judgement: Judgement) -> None:
    """Print what files are, what is wrong with them, and what would make them right."""
    print_lines(f"{judgement.path}: {verdict_sentence(judgement)}", "")
    print_table(
        ("question", "answer"),
        [
            ("" if place else question, line)
            for question, lines in answers(judgement).items()
            for place, line in enumerate(lines)
        ],
    )
    if judgement.problems:
        kinds = {True: "warning", False: "wrong"}
        rows = [
            (p.code, kinds[p.is_warning], p.file, p.reason, p.remedy) for p in judgement.problems
        ]
        print_lines("")
        print_table(("rule", "kind", "file", "problem", "remedy"), rows)
    checks = [check for run in judgement.runs for check in run.checks]
    if checks:
        print_lines("")
        print_checks(checks)
        print_failures([f"{check.what}: {check.reason}" for check in checks if not check.passed])
    print_lines("")
    print_table(
        ("app", "what it does not take from any checkpoint, or limits"),
        [(name, "; ".join(app.drops)) for name, app in judgement.layout.apps.items()],
    )
