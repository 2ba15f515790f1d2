"""Which options of a verb name what it reads and what it writes, and the check of the two before the work.

An option whose type is `OutputPath` names an output. Every other value that is a path of something that
exists counts as an input, also a text such as a checkpoint's folder, and what follows the `=` of
`NAME=PATH`, and the bundle that the environment names where `--bundle` is not given.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from whisperport.build.export.bundle_cache import VARIABLE
from whisperport.system.outputs import Kind, Output, check_outputs


class OutputPath(click.Path):
    """The type of an option that names what the verb writes.

    Args:
        kind: see `Output`; None: the verb itself declares the files that it writes there.
    """

    def __init__(self, kind: Kind | None) -> None:
        super().__init__(path_type=Path)
        self.kind = kind


def check_paths(context: click.Context) -> None:
    """Compare all outputs of a command line with its inputs, with each other and with what is there.

    Raises:
        UsageError: see `check_outputs`.
    """
    outputs = [
        Output(context.params[option.name], max(option.opts, key=len), option.type.kind)
        for option in _outputs(context)
        if option.type.kind and context.params.get(option.name) is not None
    ]
    check_outputs(outputs, input_paths(context))


def input_paths(context: click.Context, *without: str) -> list[Path]:
    """Return every existing path that the command line names as an input.

    Args:
        without: names of parameters to leave out.
    """
    written = {option.name for option in _outputs(context)}
    values = [value for name, value in context.params.items() if name not in {*written, *without}]
    if "bundle" in context.params and context.params["bundle"] is None:
        values.append(os.environ.get(VARIABLE))
    return list(dict.fromkeys(_existing(values)))


def _outputs(context: click.Context) -> Iterator[Any]:
    return (option for option in context.command.params if isinstance(option.type, OutputPath))


def _existing(value: Any) -> Iterator[Path]:
    """The paths of what exists in the value of a parameter."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _existing(item)
    elif isinstance(value, Path) and os.path.exists(value):
        yield value
    elif isinstance(value, str):
        yield from (Path(text) for text in _path_texts(value) if os.path.exists(text))


def _path_texts(text: str) -> tuple[str, ...]:
    """The texts that may be paths: the whole, and what follows the first `=`."""
    return tuple(part for part in (text, text.partition("=")[2]) if part)
