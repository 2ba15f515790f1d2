"""Choose the inputs of a program: arrays from a file, or random numbers of the right shapes and dtypes."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import ProgramError
from whisperport.model.inspection.graph import Graph, Shape, Value
from whisperport.program.runner import Array
from whisperport.system.array_files import check_unpacked_size
from whisperport.system.regular_file import other_kind

HIGHEST_TOKEN = 99  # random integers are valid token ids and positions: few tables are shorter
SEED = 0
TABLES = frozenset({"embedding", "gather"})
MOVES = frozenset({"to", "reshape", "squeeze", "unsqueeze", "expand"})
INPUTS_HINT = "give an array for every input with --inputs FILE.npz"


def inputs_for(
    values: Sequence[Value],
    arrays: Mapping[str, Array] | None,
    *,
    seed: int = SEED,
    rows: Mapping[str, int] | None = None,
) -> list[Array]:
    """Return one array for each input in `values`, in their order.

    Args:
        values: the program's inputs.
        arrays: arrays by input name. None: random arrays from `seed`; floats are normally
            distributed, integers are 0 to 99, booleans are true or false.
        rows: input -> number of rows of the table that its integers index, if fewer than 100.

    Raises:
        ProgramError: the names, shapes or dtypes in `arrays` differ from the inputs; or nothing is given
            and a shape is not static.
    """
    if arrays is not None:
        return _checked(values, arrays)
    random = np.random.default_rng(seed)
    return [_random(value, random, (rows or {}).get(value.name)) for value in values]


def table_rows(graph: Graph) -> dict[str, int]:
    """Return the rows of the stored table that an input indexes, also through reshapes and casts."""
    origin = {value.name: value.name for value in graph.inputs}
    rows: dict[str, int] = {}
    for node in graph.nodes:
        read = [origin[value.name] for value in node.tensors if value.name in origin]
        table = node.tensors[0] if node.tensors else None
        if node.op in TABLES and table and table.constant and table.shape and read:
            rows[read[0]] = min(rows.get(read[0], HIGHEST_TOKEN + 1), int(table.shape[0]))
        elif node.op in MOVES and read:
            origin.update((value.name, read[0]) for value in node.outputs)
    return rows


def hint_for(arrays: Sequence[Array]) -> str:
    """Return a hint for the case that a program fails on these inputs; empty if none is an integer."""
    if not any(array.dtype.kind in "iu" for array in arrays):
        return ""
    return (
        f"random integer inputs are 0 to {HIGHEST_TOKEN}; "
        "if the program needs other integers, give them with --inputs FILE.npz"
    )


def read_inputs(path: Path) -> dict[str, Array]:
    """Read arrays by name from an `.npz` file.

    Raises:
        ProgramError: the file does not exist, or is not an archive of plain arrays.
    """
    try:
        if kind := other_kind(path):
            raise ValueError(f"the path is {kind}, not a file")
        with zipfile.ZipFile(path) as members:
            check_unpacked_size(members, path.stat().st_size)
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy and zipfile raise nine exception classes on a damaged file
        raise ProgramError(
            f"cannot read inputs from {path}",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="write the file with numpy.savez, one array per input name",
        ) from error


def has_shape(array: Array, shape: Shape | None) -> bool:
    """Return whether an array has a shape; a dynamic axis may have any size."""
    return shape is None or (
        array.ndim == len(shape)
        and all(
            size == axis
            for size, axis in zip(array.shape, shape, strict=True)
            if isinstance(axis, int) and axis >= 0
        )
    )


def _random(value: Value, random: np.random.Generator, rows: int | None = None) -> Array:
    shape = _static_shape(value)
    dtype = _dtype(value)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return random.integers(0, rows or HIGHEST_TOKEN + 1, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _static_shape(value: Value) -> tuple[int, ...]:
    if value.shape is None or any(isinstance(axis, str) or axis < 0 for axis in value.shape):
        shown = "(?)" if value.shape is None else f"({', '.join(map(str, value.shape))})"
        raise ProgramError(
            f"input `{value.name}` has no static shape",
            why=f"its shape is {shown}, so random inputs cannot be made",
            hint=INPUTS_HINT,
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
            why="numpy has no arrays of this dtype",
            hint="export the program with float32 or integer inputs",
        )
    return dtype


def _checked(values: Sequence[Value], arrays: Mapping[str, Array]) -> list[Array]:
    names = [value.name for value in values]
    if set(names) != set(arrays):
        raise ProgramError(
            "the arrays given do not match the inputs of the program",
            why=f"expected {', '.join(names) or 'none'}; got {', '.join(arrays) or 'none'}",
            hint=INPUTS_HINT,
        )
    for value in values:
        array = arrays[value.name]
        if not has_shape(array, value.shape) or array.dtype != _dtype(value):
            raise ProgramError(
                f"the array for input `{value.name}` has the wrong shape or dtype",
                why=f"expected {value.shape} {value.dtype}, got {array.shape} {array.dtype}",
            )
    return [np.ascontiguousarray(arrays[name]) for name in names]
