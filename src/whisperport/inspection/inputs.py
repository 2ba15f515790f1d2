"""What a program is run with where nobody says: random numbers of the right shapes and dtypes."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import ProgramError
from whisperport.inspection.graph import Value
from whisperport.regular_file import other_kind
from whisperport.runner import Array
from whisperport.unpacking import check_unpacked_size

HIGHEST_TOKEN = 99  # integers are taken for token ids or positions: few tables are shorter
SEED = 0
GIVE = "--inputs FILE.npz gives every input by its name"


def inputs_for(wanted: Sequence[Value], given: Mapping[str, Array] | None) -> list[Array]:
    """One array for each of `wanted`, in their order.

    Args:
        given: arrays by name; None: floats normally distributed, integers from 0 to 99, booleans
            either way, the same each time.

    Raises:
        ProgramError: `given` does not fit, or nothing was given and a shape is not static.
    """
    if given is not None:
        return _fitting(wanted, given)
    random = np.random.default_rng(SEED)
    return [_random(value, random) for value in wanted]


def hint_for(given: Sequence[Array]) -> str:
    """What to try where a program refuses what it was given."""
    if not any(array.dtype.kind in "iu" for array in given):
        return ""
    return f"integers given are 0 to {HIGHEST_TOKEN}; where the program wants others, use --inputs"


def read_inputs(path: Path) -> dict[str, Array]:
    """Arrays by name, from an `.npz` file.

    Raises:
        ProgramError: there is no such file, or it is no archive of plain arrays.
    """
    try:
        if kind := other_kind(path):
            raise ValueError(f"it is {kind}, not a file")
        with zipfile.ZipFile(path) as members:
            check_unpacked_size(members, path.stat().st_size)
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy and zipfile raise nine kinds on a damaged file
        raise ProgramError(
            f"cannot read inputs from {path}", why=f"{type(error).__name__}: {error}"[:200]
        ) from error


def _random(value: Value, random: np.random.Generator) -> Array:
    shape = _static(value)
    dtype = _dtype(value)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return random.integers(0, HIGHEST_TOKEN + 1, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _static(value: Value) -> tuple[int, ...]:
    if value.shape is None or any(isinstance(axis, str) or axis < 0 for axis in value.shape):
        shown = "(?)" if value.shape is None else f"({', '.join(map(str, value.shape))})"
        raise ProgramError(
            f"input `{value.name}` has no static shape", why=f"it is {shown}", hint=GIVE
        )
    return tuple(int(axis) for axis in value.shape)


def _dtype(value: Value) -> np.dtype[Any]:
    try:
        dtype = np.dtype(value.dtype)
    except TypeError:
        dtype = np.dtype("O")
    if not value.dtype or dtype.kind not in "biuf":
        raise ProgramError(
            f"input `{value.name}` is of dtype {value.dtype or 'unknown'}",
            why="numpy has no numbers of it",
        )
    return dtype


def _fitting(wanted: Sequence[Value], given: Mapping[str, Array]) -> list[Array]:
    names = [value.name for value in wanted]
    if set(names) != set(given):
        raise ProgramError(
            "the inputs given are not those of the program",
            why=f"expected {', '.join(names) or 'none'}; got {', '.join(given) or 'none'}",
        )
    for value in wanted:
        array = given[value.name]
        fits = value.shape is None or (
            array.ndim == len(value.shape)
            and all(
                size == axis
                for size, axis in zip(array.shape, value.shape, strict=True)
                if isinstance(axis, int) and axis >= 0
            )
        )
        if not fits or array.dtype != _dtype(value):
            raise ProgramError(
                f"input `{value.name}` does not fit",
                why=f"expected {value.shape} {value.dtype}, got {array.shape} {array.dtype}",
            )
    return [np.ascontiguousarray(given[name]) for name in names]
