"""Options: each is a field of a frozen dataclass, declared once with its help text and its range."""

import math
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from whisperport.errors import UsageError

# ONNX Runtime and XNNPACK ran with 1024 threads, in 0.6 GB and 0.4 GB of memory; 100,000 crash both.
MAX_THREADS = 1024
MAX_REPEAT = 10_000  # runs of a measurement; more are taken as a mistake


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Check that `value` is None or lies within `low` to `high`, both included. NaN is out of range.

    Raises:
        UsageError: `value` is out of range; the message names `name`.
    """
    if value is not None and not low <= value <= high:
        raise UsageError(
            f"`{name}` is {value}",
            why=f"expected {low} or more" if high == math.inf else f"expected {low} to {high}",
            hint="give a number in this range",
        )


@dataclass(frozen=True, slots=True)
class Option:
    """Help text and range of an option; the second argument of `Annotated` for its field.

    Attributes:
        help: one line without a full stop at its end. Other options are named as fields, in backticks.
        low: smallest allowed number. None: no limit.
        high: largest allowed number. None: no limit.
        metavar: what the command line shows in place of a value, such as "SECONDS"; empty: N for a whole
            number, NUMBER for another one, TEXT for a text.
        default: the default in words, where the value does not tell it.
        flag: name on the command line, if it is not that of the field; a short one may follow it.
        choices: the allowed texts, where the type does not state them.
        repeat: whether a tuple is given by repeating the option; if not, with commas between its values.
        or_none: whether the command line accepts `none` for None.
        is_output: whether a path is that of a folder to write to, and not of something to read.
        exists: whether the value is the path of a file or folder that must exist.
    """

    help: str
    low: float | None = None
    high: float | None = None
    _: KW_ONLY
    metavar: str = ""
    default: str = ""
    flag: str = ""
    choices: tuple[str, ...] = ()
    repeat: bool = False
    or_none: bool = False
    is_output: bool = False
    exists: bool = False


def declared(options: type[Any]) -> dict[str, tuple[Any, Option]]:
    """Return the fields of an options class that have an `Option`: name -> type and `Option`."""
    return _declared(cast(Hashable, options))


@cache
def _declared(options: Any) -> dict[str, tuple[Any, Option]]:
    hints = get_type_hints(options, include_extras=True)
    return {
        name: (get_args(hint)[0], get_args(hint)[1])
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    }


def check_ranges(options: Any) -> None:
    """Check that all numbers of an options object are in their ranges; for use in its `__post_init__`.

    Raises:
        UsageError: a number is out of the range of its field.
    """
    for name, (_, about) in declared(type(options)).items():
        if about.low is not None or about.high is not None:
            low = -math.inf if about.low is None else about.low
            high = math.inf if about.high is None else about.high
            value = getattr(options, name)
            for number in value if isinstance(value, tuple) else (value,):
                check_range(name, number, low, high)
