"""Options of a target for lowering, running, compiling or importing: fields of a frozen dataclass.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        epochs: Annotated[int | None, Option("Number of fine-tuning epochs", low=1)] = None

is set on the command line as `--option TARGET.epochs=4`. A field has the type int, bool, str, Path, or a
Literal of ints and strings; each of them may be combined with None.
"""

import difflib
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from whisperport.errors import UsageError
from whisperport.system.option import Option as Option
from whisperport.system.option import check_ranges as check_ranges
from whisperport.system.option import declared

ON, OFF = ("on", "true", "yes"), ("off", "false", "no")


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options class where there are no options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationOptions:
    """Options for running: on the device, or emulated on the CPU."""

    emulate: Annotated[
        Literal["off", "on"],
        Option(
            "on runs the lowered files in emulation on the CPU; off runs the compiled files on the device"
        ),
    ] = "off"


def clips_option(runs_in: str, note: str = "") -> Option:
    """Return the option `emulate` for compiling.

    Args:
        runs_in: the simulator or the emulator.
        note: what else the user should know.
    """
    return Option(
        "Number of the reference's audio clips that every program is verified on in "
        f"{runs_in}; 0 verifies none{note}",
        low=0,
        high=1000,
    )


@dataclass(frozen=True, slots=True)
class OptionHelp:
    """One option, as help texts show it."""

    name: str  # name on the command line, such as "optimization-level"
    values: str  # allowed values, such as "0 to 4"
    default: str  # empty: the help text explains the default
    help: str


def describe(options: type[Any]) -> tuple[OptionHelp, ...]:
    """Describe every option of an options class, in the order of its fields."""
    defaults = {field.name: field.default for field in fields(options)}
    return tuple(
        OptionHelp(name.replace("_", "-"), _values(kind, about), _shown(defaults[name]), about.help)
        for name, (kind, about) in declared(options).items()
    )


def parse_options(options: type[Any], texts: Mapping[str, str], target: str) -> Any:
    """Make an options object from texts.

    Args:
        options: the options class.
        texts: name of the option -> value, as on the command line.
        target: name of the target, for errors.

    Raises:
        UsageError: there is no option of this name, or a value is not allowed.
    """
    fields_of = declared(options)
    known = {name.replace("_", "-"): name for name in fields_of}
    values = {}
    for name, text in texts.items():
        if name not in known:
            raise UsageError(
                f"`{target}` has no option `{name[:40]}` for this command",
                why=_similar(options, name, target),
                hint=(
                    f"its options are {', '.join(f'{target}.{option}' for option in known)}"
                    if known
                    else f"`{target}` has no options for this command"
                )
                + "; `export`, `compile` and `transcribe` have different ones",
            )
        kind, about = fields_of[known[name]]
        try:
            values[known[name]] = _parsed(text, kind, about)
        except ValueError as error:
            raise UsageError(
                f"the option `{target}.{name}` cannot be `{text[:40]}`",
                hint=f"expected {_values(kind, about)}",
            ) from error
    return options(**values)


def _similar(options: type[Any], name: str, target: str) -> str:
    """Return the option whose name is the most similar one, with its help; "" if none is similar."""
    helps = {option.name: option.help for option in describe(options)}
    near = difflib.get_close_matches(name, helps, n=1, cutoff=0.75)
    return (
        f"the option with a similar name is `{target}.{near[0]}`: {helps[near[0]]}" if near else ""
    )


def by_target(texts: Mapping[str, str], targets: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Make one options object per target from texts.

    Args:
        texts: `TARGET.NAME` -> value, as on the command line.
        targets: name -> options class, of every target that may have options for this command.

    Raises:
        UsageError: there is no such target or option, or a value is not allowed.
    """
    grouped: dict[str, dict[str, str]] = {name: {} for name in targets}
    for full_name, text in texts.items():
        target, dot, name = full_name.partition(".")
        if not dot or target not in grouped:
            names = [
                f"{owner}.{option.name}" for owner in targets for option in describe(targets[owner])
            ]
            raise UsageError(
                f"there is no option `{full_name}` for this command",
                why=f"no program here is for `{target}`: the targets are {', '.join(targets) or 'none'}"
                if dot
                else "an option is written as TARGET.NAME=VALUE",
                hint=f"options are {', '.join(names) or 'none'}",
            )
        grouped[target][name] = text
    return {name: parse_options(targets[name], grouped[name], name) for name in targets}


def own_options(texts: Mapping[str, str], target: str) -> dict[str, str]:
    """Select the options of one target: `TARGET.NAME` -> value becomes `NAME` -> value."""
    parts = {name.partition("."): text for name, text in texts.items()}
    return {name: text for (owner, _, name), text in parts.items() if owner == target}


def with_target(options: Mapping[str, str], target: str) -> dict[str, str]:
    """Add the target's name to options: `NAME` -> value becomes `TARGET.NAME` -> value."""
    return {f"{target}.{name}": text for name, text in options.items()}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a value can have, without None."""
    if get_origin(hint) in (types.UnionType, Union):
        return tuple(part for part in get_args(hint) if part is not type(None))
    return (hint,)


def _parsed(text: str, hint: Any, about: Option) -> Any:
    """Convert a text to a value of the type `hint`.

    Raises:
        ValueError: the text is not an allowed value.
    """
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            for value in get_args(kind):
                if str(value) == text:
                    return value
        elif kind is bool and text.lower() in (*ON, *OFF):
            return text.lower() in ON
        elif kind is int:
            if not re.fullmatch("-?[0-9]{1,18}", text):
                raise ValueError(text)
            number = int(text)
            low, high = about.low, about.high
            if (low is None or number >= low) and (high is None or number <= high):
                return number
        elif kind in (str, Path) and text:
            return kind(text)
    raise ValueError(text)


def _values(hint: Any, about: Option) -> str:
    return " or ".join(_values_of(kind, about) for kind in _alternatives(hint))


def _values_of(kind: Any, about: Option) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if kind is bool:
        return "on or off"
    if kind is int:
        low, high = about.low, about.high
        if low is not None and high is not None:
            return f"{low} to {high}"
        return "a number" if low is None else f"{low} or more"
    return "a path" if kind is Path else "text"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return ON[0] if default else OFF[0]
    return "" if default is None else str(default)
