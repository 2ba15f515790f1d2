"""Options that several verbs share."""

from collections.abc import Callable
from pathlib import Path

import click

from whisperport import targets
from whisperport.apps.cli.given import InputPath
from whisperport.apps.cli.paths import OutputPath
from whisperport.apps.cli.verb import Decorator, FloatRange, IntRange, TargetOptions, option
from whisperport.apps.cli.watchdog import MAX_STALL_S, STALL_S
from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.program.spec import TargetSpec
from whisperport.program.window import UNVERIFIED
from whisperport.system.option import MAX_THREADS
from whisperport.system.outputs import Kind
from whisperport.targets import RunOptions

as_json = option("--json", "as_json", group="Output", is_flag=True, help="Print the result as JSON")


def html_option(what: str) -> Decorator:
    """The option `--html`: `what` the page shows."""
    return option(
        "--html",
        group="Output",
        type=OutputPath("page"),
        metavar="FILE",
        show_default="no page",
        help=f"Also write one HTML page, which needs no network: {what}",
    )


def output_option(metavar: str, kind: Kind | None, help: str, default: str = "") -> Decorator:
    """The option `--out` of a verb; `kind` of `Output`, or None; where it writes without it, if it may."""
    return option(
        *("--out", "-o"),
        group="Output",
        required=not default,
        type=OutputPath(kind),
        metavar=metavar,
        show_default=default or None,
        help=help,
    )


bundle_out = output_option(
    "DIR", "bundle", "Folder to write the bundle to; an existing bundle there is replaced"
)


class _TargetName(click.types.StringParamType):
    """The name of a target; a command without one is told a target that suits every machine."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return "`--target onnxruntime` runs on any CPU; `whisperport targets` lists all targets"


def target_name(what: str, auto: str = "", *, required: bool = True) -> Decorator:
    """The option `--target`; `what` the target is, and what the name auto does, if anything."""
    return option(
        *("--target", "-t"),
        group="Target",
        required=required,
        type=_TargetName(),
        metavar="NAME",
        shell_complete=lambda _, __, typed: [
            name
            for name in (target.spec.name for target in targets.TARGETS)
            if name.startswith(typed)
        ],
        help=f"{what}; `whisperport targets` lists all targets{f'. {auto}' if auto else ''}",
    )


def _threads(default: str, help: str) -> Decorator:
    """The option `--threads`."""
    return option(
        "--threads",
        group="Runtime",
        type=IntRange(1, MAX_THREADS),
        metavar="N",
        show_default=default,
        help=help,
    )


threads = _threads(
    "one per core that the process may use", "Number of CPU threads that each runtime uses"
)
threads_for_calibration = _threads(
    "chosen by the runtime",
    "Number of CPU threads for computing the calibration set. It does not limit the compiler",
)
no_preflight = option(
    "--no-preflight",
    group="Runtime",
    is_flag=True,
    help="Skip the checks of memory, disk space and model size before the work starts",
)


def stall_after(minutes: int) -> Decorator:
    """The option `--stall-after`, with its default in minutes."""
    return option(
        "--stall-after",
        group="Runtime",
        type=FloatRange(0, MAX_STALL_S / 60, min_open=True),
        default=minutes,
        show_default=True,
        metavar="MINUTES",
        help="Time limit in minutes for each stage, such as lowering one program; a longer stage stops "
        "the command with an error",
    )


STALL_MIN = round(STALL_S / 60)
target_option = option(
    "--option",
    "target_options",
    group="Target",
    multiple=True,
    metavar="TARGET.NAME=VALUE",
    help="Set an option of a target, listed at the end of --help and on the target's page; may be "
    "repeated",
)
run_option = option(
    "--run-option",
    "run_options",
    group="Runtime",
    multiple=True,
    metavar="TARGET.NAME=VALUE",
    help="Set an option of a target's runtime, listed at the end of --help and on the target's page; "
    "may be repeated",
)
short_windows = option(
    "--short-windows/--no-short-windows",
    group="Runtime",
    default=None,
    show_default="on if the bundle was verified with them",
    help="Encode the end of the audio in a window of {:g} to {:g} s, or one of `export --windows`, if it "
    "fits, in place of 30 s. 2 to 4 s of audio take about a third of the time. A few texts differ from "
    "openai-whisper's, whose windows have 30 s".format(
        *(UNVERIFIED.positions[end] * SECONDS_PER_POSITION for end in (0, -1))
    ),
)
adapter_option = option(
    "--adapter",
    group="Runtime",
    type=InputPath(file_okay=False),
    metavar="DIR",
    show_default="none",
    help="Folder of a LoRA adapter of PEFT, for a bundle of export --adapters-as-inputs",
)
sizes_option = option(
    "--size",
    "sizes",
    group="Input",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=lambda _, __, values: sizes_of(values),
    help="Number for a dynamic size of a .pt2 file, as the file names it, such as s27=128; may be repeated",
)
# For the help of a verb that has `--run-option`.
RUN_OPTIONS = TargetOptions("--run-option", lambda target: target.run_options)


def trusting(what: str, kind: str = "files", group: str = "Runtime") -> Decorator:
    """The option `--trust`: what is done without limits, for files or bundles."""
    of = f"{what}. Use it only for {kind} from a source you trust"
    return option("--trust", group=group, is_flag=True, help=of)


trust = trusting(
    "Load the bundle without first running its programs in a process with limited time and memory",
    "bundles",
)


def targets_by(value_of: Callable[[TargetSpec], str], unlisted: str | None = None) -> str:
    """Values with the targets that share each, such as ".onnx for onnxruntime; .pte for xnnpack".

    Args:
        value_of: returns the value of a target.
        unlisted: value whose targets are not listed, but called "all others"; None: list all targets.
    """
    names_by_value: dict[str, list[str]] = {}
    for target in targets.TARGETS:
        names_by_value.setdefault(value_of(target.spec), []).append(target.spec.name)
    rest = names_by_value.pop(unlisted, None) if unlisted is not None else None
    listed = [f"{value} for {', '.join(names)}" for value, names in names_by_value.items()]
    return "; ".join([*listed, *([f"{unlisted} for all others"] if rest else [])])


def pairs(option: str, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE` strings as a mapping.

    Raises:
        click.BadParameter: a string has no `=`, or a name is given twice.
    """
    mapping: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint=option)
        if name in mapping:
            raise click.BadParameter(f"`{name}` is given twice", param_hint=option)
        mapping[name] = value
    return mapping


def sizes_of(values: tuple[str, ...]) -> dict[str, int]:
    """`NAME=NUMBER` strings as a mapping.

    Raises:
        click.BadParameter: a string has another form, or a name is given twice.
    """
    numbers = pairs("--size", values)
    for name, number in numbers.items():
        if not number.isascii() or not number.isdigit() or len(number) > 12:
            raise click.BadParameter(
                f"expected a whole number for `{name}`, got {number!r}", param_hint="--size"
            )
    return {name: int(number) for name, number in numbers.items()}


def run_options_of(
    threads: int | None,
    values: tuple[str, ...],
    *,
    trust: bool = False,
    short_windows: bool | None = None,
    adapter: Path | None = None,
) -> RunOptions:
    """The values of `--threads` and of all other options of the group Runtime as one object."""
    return RunOptions(
        threads=threads,
        options=pairs("--run-option", values),
        trust=trust,
        short_windows=short_windows,
        adapter=adapter,
    )


def run_option_arguments(values: tuple[str, ...], *, trust: bool = False) -> list[str]:
    """The command-line arguments that repeat the given `--run-option` and `--trust`."""
    words = [word for value in values for word in ("--run-option", value)]
    return [*words, *["--trust"] * trust]
