"""Options of a verb that are declared as fields of an options class; see `whisperport.system.option`."""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click

from whisperport.apps.cli.given import InputPath
from whisperport.apps.cli.paths import OutputPath
from whisperport.apps.cli.shared_options import pairs
from whisperport.apps.cli.verb import Decorator, FloatRange, IntRange, option, together
from whisperport.system.option import Option, declared

METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}


def field_options(options: type[Any], *names: str, group: str) -> Decorator:
    """The declared fields of an options class as options of a verb.

    Args:
        options: the options class.
        names: names of the fields, in the order of the help; none: all that are declared.
        group: heading under which the help shows them.
    """
    defaults = {field.name: field.default for field in fields(options)}
    declarations = declared(options)
    return together(
        *(
            _option(group, name, *declarations[name], defaults[name])
            for name in names or tuple(declarations)
        )
    )


def field_values(options: type[Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an options class's declared fields, among all values that click parsed."""
    return {
        name: _mapping(hint, about, chosen[name]) if _is_mapping(hint) else chosen[name]
        for name, (hint, about) in declared(options).items()
        if name in chosen
    }


def _is_mapping(hint: Any) -> bool:
    return get_origin(hint) is Mapping


def _mapping(hint: Any, about: Option, texts: tuple[str, ...]) -> dict[str, Any]:
    """The mapping that an option's NAME=VALUE strings give."""
    return {
        name: get_args(hint)[1](text) for name, text in pairs(about.flag.split()[0], texts).items()
    }


def _option(group: str, name: str, hint: Any, about: Option, default: Any) -> Decorator:
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    kind = next(member for member in kinds if member is not type(None))
    flag = about.flag or f"--{name.replace('_', '-')}"
    item = get_args(kind)[0] if get_origin(kind) is tuple else kind
    shown: Any = about.default or (default not in (None, False, "", ()))
    if kind is bool:
        if default is False:
            return option(flag, name, group=group, is_flag=True, help=about.help)
        flags = f"{flag}/--no-{flag.removeprefix('--')}"
        text = {"default": default, "show_default": shown, "help": about.help}
        return option(flags, name, group=group, **text)
    if about.or_none:
        limits = f"values: {about.low:g} to {about.high:g}, or none"
        shown = f"{'none' if default is None else format(default, 'g')}; {limits}"
    if _is_mapping(kind):
        default = None
    if get_origin(kind) is tuple and not about.repeat:
        default = ",".join(map(str, default))
    return option(
        *flag.split(),
        name,
        group=group,
        type=_type(kind, about),
        multiple=about.repeat or _is_mapping(kind),
        default=default,
        show_default=shown,
        metavar=about.metavar or (None if about.choices else METAVARS.get(item)),
        help=about.help,
    )


def _type(kind: Any, about: Option) -> Any:
    """The type of an option, as click takes it."""
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return _type(item, about) if about.repeat else _separated(item)
    if get_origin(kind) is Literal:
        return click.Choice([str(value) for value in get_args(kind)])
    if about.choices:
        return click.Choice(about.choices)
    if about.exists:
        return InputPath()
    if kind is Path:
        return OutputPath("folder") if about.is_output else click.Path(path_type=Path)
    if about.or_none:
        return _number_or_none
    if kind in (int, float) and (about.low is not None or about.high is not None):
        kind_of_range: Any = IntRange if kind is int else FloatRange
        return kind_of_range(about.low, about.high)
    return kind if kind in (int, float) else None


def _number_or_none(value: str | float) -> float | None:
    """Parse a number, or `none` for no limit.

    Raises:
        click.BadParameter: the value is neither.
    """
    if value == "none":
        return None
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(f"expected a number or none, got {value!r}") from None


def _separated(kind: type[Any]) -> Callable[[str], tuple[Any, ...]]:
    """A parser of numbers separated by commas."""

    def parse(value: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(piece) for piece in value.split(",") if piece.strip())
        except ValueError:
            raise click.BadParameter(
                f"expected numbers separated by commas, got {value!r}"
            ) from None

    return parse
