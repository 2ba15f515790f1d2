"""A verb's help: options under headings, with defaults and ranges in plain words."""

import re
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from whisperport import targets
from whisperport.apps.cli.console import WIDTH, HintedUsageError, be_quiet
from whisperport.apps.cli.given import OPTIONS, kind_of
from whisperport.apps.cli.paths import check_paths
from whisperport.targets import Target
from whisperport.targets.target_options import describe

FEW = 6  # a verb with fewer options shows them under one heading
MAX_COLUMN = 30  # columns of an option's name; the help of a longer one begins on the next line

Decorator = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """An option, such as `--option`, that sets options of targets.

    Attributes:
        option: its name.
        class_of: a target -> the options class that it has here; None: it has none.
    """

    option: str
    class_of: Callable[[Target], type[Any] | None]

    def classes(self) -> dict[str, type[Any]]:
        """Return the name of each target -> its class. All targets are imported: only help needs them."""
        return {
            target.spec.name: options
            for target in targets.TARGETS
            for options in [self.class_of(target)]
            if options is not None
        }


class Verb(click.Command):
    """A command that shows its options under headings, and the options of targets below them.

    Args:
        target_options: the option that sets options of targets.
    """

    def __init__(
        self,
        *args: Any,
        target_options: TargetOptions | None = None,
        **settings: Any,
    ) -> None:
        # Here too, not only for the group: click keeps the option of the first context that asks for it.
        settings.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        settings["params"] = [*(settings.get("params") or ()), _quiet_option()]
        super().__init__(*args, **settings)
        self._target_options = target_options

    def invoke(self, ctx: click.Context) -> Any:
        """Check what the verb will write, then run it.

        Raises:
            UsageError: an output would replace an input, another output or a file of the user.
        """
        check_paths(ctx)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; who gives a bundle as to another verb is told how this one takes it."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if hint := self._other_way(ctx, error, typed):
                raise HintedUsageError(error.message, ctx, hint) from error
            raise

    def _other_way(self, ctx: click.Context, error: click.UsageError, typed: list[str]) -> str:
        """How a bundle or checkpoint is given to this verb, if it was given as to another; else ""."""
        if isinstance(error, click.NoSuchOption):
            takes = {
                kind for parameter in self.params for kind in getattr(parameter.type, "kinds", ())
            }
            for kind, option in OPTIONS.items():
                if error.option_name == option and kind in takes:
                    after = typed[typed.index(option) + 1 :] if option in typed else []
                    value = shlex.quote(after[0]) if after else str(kind).upper()
                    return f"whisperport {ctx.info_name} {value}"
        elif "unexpected extra argument" in error.message:
            options = [option for parameter in self.params for option in parameter.opts]
            for word in typed:
                kind_option = OPTIONS.get(kind_of(word)[0])
                if kind_option in options and kind_option not in typed:
                    return f"give it with `{kind_option} {shlex.quote(word)}`"
        return ""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                groups.setdefault(getattr(param, "group", "Help"), []).append(record)
        groups = self._with_flags(ctx, groups)
        rows = [row for group in groups.values() for row in group]
        if len(rows) < FEW:
            groups = {"Options": rows}
        width = min(MAX_COLUMN, max(len(name) for name, _ in rows))
        for heading, group in (groups | self._target_groups()).items():
            with formatter.section(heading):
                formatter.write_dl([_row(*row, width, formatter) for row in group], width)

    def _with_flags(
        self, ctx: click.Context, groups: dict[str, list[tuple[str, str]]]
    ) -> dict[str, list[tuple[str, str]]]:
        """The same help, with the API's name of an option, such as `beam_size`, replaced by --beam-size."""
        flags = {param.name: max(param.opts, key=len) for param in self.get_params(ctx)}

        def named(text: str) -> str:
            return re.sub(r"`(\w+)`", lambda name: flags.get(name[1], name[0]), text)

        return {
            heading: [(name, named(text)) for name, text in rows]
            for heading, rows in groups.items()
        }

    def _target_groups(self) -> dict[str, list[tuple[str, str]]]:
        """The options of targets, by heading; targets with the same options class share one."""
        if self._target_options is None:
            return {}
        option, classes = self._target_options.option, self._target_options.classes()
        groups = {}
        for options in dict.fromkeys(classes.values()):
            names = ", ".join(
                name for name, option_class in classes.items() if option_class is options
            )
            if described := describe(options):
                heading = f"Options of {names}, given as {option} TARGET.NAME=VALUE"
                groups[textwrap.fill(heading, WIDTH - 1, break_on_hyphens=False)] = [
                    (entry.name, f"{entry.help}  [{_default(entry.default)}values: {entry.values}]")
                    for entry in described
                ]
        return groups


def option(*names: str, group: str, **settings: Any) -> Decorator:
    """An option that the help shows under the heading `group`."""
    return click.option(*names, cls=_Option, group=group, **settings)


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator; the help shows them in this order."""

    def add(command: Any) -> Any:
        for decorator in reversed(options):
            command = decorator(command)
        return command

    return add


def _row(name: str, text: str, width: int, formatter: click.HelpFormatter) -> tuple[str, str]:
    """One option, wrapped here: click would break lines within names such as `--max-tokens`."""
    lines = textwrap.wrap(text, formatter.width - width - 4, break_on_hyphens=False)
    return name.ljust(width), "\n".join(("\b", *lines))


class _Option(click.Option):
    def __init__(self, *args: Any, group: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """The default and the range, without click's parentheses around a default in words."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        if "range" in extra:
            extra["range"] = f"values: {extra['range']}"
        return extra


class IntRange(click.IntRange):
    """As click's, described as "1 to 64" in place of "1<=x<=64"."""

    name = "integer"

    def _describe_range(self) -> str:
        return _in_words(self)


class FloatRange(click.FloatRange):
    """As click's, described as "0 to 1" in place of "0<=x<=1"."""

    name = "number"

    def _describe_range(self) -> str:
        return _in_words(self)


def _quiet_option() -> click.Option:
    """The option `--quiet` of every verb."""
    return _Option(
        ["--quiet", "-q"],
        group="Output",
        is_flag=True,
        expose_value=False,
        callback=lambda _, __, quiet: be_quiet(quiet),
        help="Print only results, warnings and errors: no progress, no notes and no next command",
    )


def _in_words(type_: click.IntRange | click.FloatRange) -> str:
    if type_.max is None:
        return f"{type_.min:g} or more"
    between = "above {}, up to {}" if type_.min_open else "{} to {}"
    return between.format(*(f"{limit:.6g}" for limit in (type_.min, type_.max)))


def _default(default: str) -> str:
    return f"default: {default}; " if default else ""
