"""Generate the page of the command line from the declarations of its verbs.

    python docs/cli_page.py

An option that several verbs declare with the same words is explained once. A test compares the page with
the output of this script.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

from whisperport.apps.cli.main import cli

PAGE = Path(__file__).parent / "reference" / "cli.md"

HEAD = """\
# Command line

Results are printed to standard output; progress, warnings and errors to standard error. With `--json`
the result is one JSON document. If `NO_COLOR` is set, the output has no colors. `whisperport COMMAND
--help` prints what this page says, with examples and the options of all targets, which are also on the
[pages of the targets](../README.md#chips-and-runtimes). In brackets: the default and the allowed values.

| Exit code | Meaning |
|---|---|
| 0 | the command succeeded, and every comparison passed |
| 1 | the command failed, or a comparison did not pass |
| 2 | the command line is wrong |
| 128 + N | the command was interrupted by signal N, such as 130 for Ctrl-C |
| 141 | the program that read standard output has ended |
"""

LONG = 20  # shared options

Record = tuple[str, str]  # an option with its value, and its description
Groups = dict[str, list[Record]]  # heading in the help -> its options


def cli_page() -> str:
    """Return the page: the options that several commands have, and each command."""
    groups = {name: _groups(verb, name) for name, verb in cli.commands.items()}
    counts = Counter(one for given in groups.values() for group in given.values() for one in group)
    shared = sorted((one for one, count in counts.items() if count > 1), key=_name)
    links = ", ".join(f"[{name}](#{name})" for name in cli.commands)
    parts = [HEAD, f"Commands: {links}.\n", "## Shared options\n", _list({"": shared})]
    others: dict[str, set[str]] = {}  # verb -> its shared options
    for name, verb in cli.commands.items():
        own = {
            heading: [one for one in group if one not in shared]
            for heading, group in groups[name].items()
        }
        others[name] = {
            _name(one) for group in groups[name].values() for one in group if one in shared
        }
        parts += [f"## {name}\n", f"`{_usage(verb, name)}`\n", _description(verb), _list(own)]
        if others[name]:
            parts.append(f"[Shared options](#shared-options): {_shared(name, others)}.\n")
    return "\n".join(filter(None, parts))


def _shared(name: str, others: dict[str, set[str]]) -> str:
    """Return the shared options of a verb; of many, those of an earlier verb that this one has not."""
    for earlier, more in others.items():
        if len(others[name]) > LONG and others[name] < more:
            return f"those of [{earlier}](#{earlier}) without {_code(more - others[name])}"
    return _code(others[name])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _context(verb: click.Command, name: str) -> click.Context:
    return click.Context(verb, info_name=f"whisperport {name}", **cli.context_settings)


def _usage(verb: click.Command, name: str) -> str:
    context = _context(verb, name)
    return " ".join([context.command_path, *verb.collect_usage_pieces(context)])


def _groups(verb: click.Command, name: str) -> Groups:
    """Return the options of a verb as its help shows them, without --help."""
    context = _context(verb, name)
    groups: Groups = {}
    for param in verb.get_params(context):
        if isinstance(param, click.Option) and "--help" not in param.opts:
            option, text = param.get_help_record(context) or ("", "")
            heading = getattr(param, "group", "")
            text = " ".join(text.split()).replace("values: ", "")
            groups.setdefault(heading, []).append((option, text))
    return groups


def options_of(verb: click.Command, name: str) -> list[str]:
    """Return the long names of a verb's options."""
    return [_name(record) for group in _groups(verb, name).values() for record in group]


def _name(record: Record) -> str:
    """Return the long name of an option, such as `--threads`."""
    names = re.findall(r"--[\w-]+", record[0])
    return names[0] if names else record[0]


def _list(groups: Groups) -> str:
    """Return the options as a list, with the heading of each group; "" without options."""
    filled = {heading: group for heading, group in groups.items() if group}
    parts = []
    for heading, group in filled.items():
        parts += [f"{heading}:\n"] if len(filled) > 1 else []
        parts.append("".join(f"- `{option}`: {text}\n" for option, text in group))
    return "\n".join(parts)


def _description(verb: click.Command) -> str:
    """Return the help of a verb without its examples."""
    parts = []
    for paragraph in inspect.cleandoc(verb.help or "").split("\n\n"):
        title, _, lines = paragraph.removeprefix("\b\n").partition("\n")
        if not paragraph.startswith("\b"):
            parts.append(paragraph.strip() + "\n")
        elif title != "Examples:":
            parts.append(f"{title}\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")
    print(PAGE.relative_to(PAGE.parents[2]))
