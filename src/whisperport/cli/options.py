"""Options that several verbs share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from whisperport.ranges import MAX_THREADS
from whisperport.targets import TARGETS, RunOptions
from whisperport.targets.options import describe
from whisperport.watchdog import MAX_STALL_S, STALL_S

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout")
bundle_out = click.option(
    "--out",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where to write the bundle",
)
threads = click.option(
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    help="Number of CPU threads of each runtime  [default: as many as the runtime chooses]",
)
no_preflight = click.option(
    "--no-preflight", is_flag=True, help="Do not ask first whether memory and disk suffice"
)
stall_after = click.option(
    "--stall-after",
    type=click.FloatRange(0, MAX_STALL_S / 60, min_open=True),
    default=STALL_S / 60,
    show_default=True,
    metavar="MINUTES",
    help="Stop if one stage takes longer than this",
)
target_option = click.option(
    "--option",
    "target_options",
    multiple=True,
    metavar="TARGET.NAME=VALUE",
    help="Set an option of one target; see below; may be repeated",
)


def options_help(targets: Mapping[str, type[Any]], option: str = "--option") -> str:
    """The options of targets, by options class, as the end of a verb's help."""
    lines = ["\b", f"Options of targets, given as {option} TARGET.NAME=VALUE:"]
    for options in dict.fromkeys(targets.values()):
        described = describe(options)
        if described:
            names = [name for name, one in targets.items() if one is options]
            lines.append(f"  {', '.join(names)}:")
        for one in described:
            default = f"; default {one.default}" if one.default else ""
            lines += [f"    {one.name}  {one.values}{default}", f"        {one.help}"]
    return "\n".join(lines) if len(lines) > 2 else ""


run_option = click.option(
    "--run-option",
    "run_options",
    multiple=True,
    metavar="TARGET.NAME=VALUE",
    help="Set an option of one target's runtime; see below; may be repeated",
)


def run_options_help() -> str:
    """The run options of every target, as the end of a verb's help."""
    return options_help({one.spec.name: one.run_options for one in TARGETS}, "--run-option")


trust = click.option(
    "--trust",
    is_flag=True,
    help="Load the bundle's programs without the trial run that limits time and memory; use it for "
    "bundles from a source you trust",
)

trust_program = click.option(
    "--trust",
    is_flag=True,
    help="Run the program without a limit on memory; use it for files from a source you trust",
)


def pairs(option: str, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE` strings as a mapping.

    Raises:
        click.BadParameter: one has no `=`, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint=option)
        if name in found:
            raise click.BadParameter(f"`{name}` is given twice", param_hint=option)
        found[name] = value
    return found


def run_options_of(
    threads: int | None, values: tuple[str, ...], *, trust: bool = False
) -> RunOptions:
    return RunOptions(threads=threads, options=pairs("--run-option", values), trust=trust)


def run_option_words(values: tuple[str, ...], *, trust: bool = False) -> list[str]:
    """The same options for the next command."""
    words = [word for value in values for word in ("--run-option", value)]
    return [*words, *["--trust"] * trust]
