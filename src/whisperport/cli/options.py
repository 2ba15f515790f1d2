"""Options that several verbs share."""

import click

from whisperport.ranges import MAX_THREADS
from whisperport.targets import RunOptions
from whisperport.watchdog import MAX_STALL_S, STALL_S

as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout")
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
run_option = click.option(
    "--run-option",
    "run_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the target, such as provider=CUDAExecutionProvider; may be repeated",
)

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


def pairs(values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE` strings as a mapping.

    Raises:
        click.BadParameter: one has no `=`.
    """
    split = [value.partition("=") for value in values]
    for name, equals, _ in split:
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, got {name!r}")
    return {name: value for name, _, value in split}


def run_options_of(
    threads: int | None, values: tuple[str, ...], *, trust: bool = False
) -> RunOptions:
    return RunOptions(threads=threads, options=pairs(values), trust=trust)


def run_option_words(values: tuple[str, ...], *, trust: bool = False) -> list[str]:
    """The same options for the next command."""
    words = [word for value in values for word in ("--run-option", value)]
    return [*words, *["--trust"] * trust]
