"""The steps of a program that the host computes: token lookup before it, joining its outputs after it.

Some compilers do not support a lookup: their program begins at the embeddings. Some do not support a matrix
multiplication as wide as a vocabulary: their program returns the logits in pieces. `HostPart` computes the
removed steps. They are stored beside the program, as `NAME.host.json` and `.npy` files.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import ProgramError
from whisperport.program.json_records import from_json, to_json
from whisperport.program.runner import Array
from whisperport.program.spec import TensorSpec
from whisperport.program.strict_json import plain
from whisperport.system.array_files import open_array
from whisperport.system.regular_file import other_kind

LARGEST_JSON = 2**20  # bytes; a file written by this module has about 800


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """A token lookup that the host computes, in place of an input of token ids.

    Attributes:
        tokens: (1, S) integers, the input of the original program.
        embeddings: (1, d, S, 1) float32, the input of the program without the lookup.
        table: (V, d) float32, the token embeddings.
        positions: (S, d) float32, the positional embeddings that the host adds; None if the host adds none.
    """

    tokens: TensorSpec
    embeddings: TensorSpec
    table: Array
    positions: Array | None

    def embed(self, tokens: Array) -> Array:
        """Return the embeddings (1, d, S, 1) of token ids (1, S).

        Raises:
            ProgramError: `tokens` has another shape or dtype, or an id is not in the table.
        """
        if tokens.shape != self.tokens.shape or tokens.dtype.kind not in "iu":
            raise ProgramError(
                f"`{self.tokens.name}` does not fit",
                why=f"expected integers of shape {self.tokens.shape}, "
                f"got {tokens.dtype} of shape {tokens.shape}",
            )
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < len(self.table):
            raise ProgramError(
                f"`{self.tokens.name}` holds an id that the embedding table does not have",
                why=f"ids are {tokens.min()} to {tokens.max()}; the table has {len(self.table)} rows",
            )
        rows = self.table[tokens.reshape(-1)]
        if self.positions is not None:
            rows = rows + self.positions
        return np.ascontiguousarray(rows.T).reshape(self.embeddings.shape)


@dataclass(frozen=True, slots=True)
class Join:
    """An output of the original program that the host joins from several outputs.

    Attributes:
        output: the output of the original program.
        pieces: names of the outputs to join, in their order along the last axis.
    """

    output: TensorSpec
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HostPart:
    """The steps that the host computes before and after a program; false if there are none."""

    lookups: tuple[Lookup, ...] = ()
    joins: tuple[Join, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lookups or self.joins)

    def __add__(self, other: "HostPart") -> "HostPart":
        return HostPart((*self.lookups, *other.lookups), (*self.joins, *other.joins))

    def inputs(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the program's inputs from the inputs of the original program.

        Args:
            arrays: input name of the original program -> array.

        Returns:
            Input name of the program -> array.

        Raises:
            ProgramError: token ids are missing, have another shape or dtype, or are not in the table.
        """
        inputs = dict(arrays)
        for lookup in self.lookups:
            if lookup.tokens.name not in inputs:
                raise ProgramError(f"the input `{lookup.tokens.name}` is missing")
            inputs[lookup.embeddings.name] = lookup.embed(inputs.pop(lookup.tokens.name))
        return inputs

    def outputs(self, returned: Mapping[str, Array]) -> dict[str, Array]:
        """Compute the original program's outputs, name -> array, from the outputs of the program."""
        outputs = dict(returned)
        for join in self.joins:
            outputs[join.output.name] = np.concatenate(
                [outputs.pop(n) for n in join.pieces], axis=-1
            )
        return outputs

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that describes the steps, without the arrays."""
        return {
            "lookups": [
                {
                    "tokens": to_json(lookup.tokens),
                    "embeddings": to_json(lookup.embeddings),
                    "table_shape": list(lookup.table.shape),
                    "adds_positions": lookup.positions is not None,
                }
                for lookup in self.lookups
            ],
            "joins": [
                {"output": to_json(join.output), "pieces": list(join.pieces), "axis": -1}
                for join in self.joins
            ],
        }

    def files(self, name: str) -> dict[str, bytes]:
        """Return file name -> content of all files that `read` needs; none if there are no steps.

        Args:
            name: stem of the program's file name.
        """
        if not self:
            return {}
        description, files = self.to_json(), {}
        for lookup, entry in zip(self.lookups, description["lookups"], strict=True):
            arrays = {"table": lookup.table, "positions": lookup.positions}
            for kind, array in arrays.items():
                if array is not None:
                    entry[kind] = f"{name}.{lookup.tokens.name}.{kind}.npy"
                    files[entry[kind]] = _npy(array)
        return {f"{name}.host.json": (json.dumps(description, indent=2) + "\n").encode(), **files}

    @classmethod
    def read(cls, path: Path) -> "HostPart":
        """Read the files that `files` describes.

        Args:
            path: the `.host.json` file.

        Raises:
            ProgramError: a file is missing or damaged.
        """
        try:
            if kind := other_kind(path):
                raise ValueError(f"it is {kind}, not a file")
            if path.stat().st_size > LARGEST_JSON:
                raise ValueError(f"it has more than {LARGEST_JSON} bytes")
            description = json.loads(path.read_bytes())
            lookups = tuple(_lookup(path.parent, entry) for entry in description["lookups"])
            joins = tuple(
                Join(_tensor(entry["output"]), tuple(map(str, entry["pieces"])))
                for entry in description["joins"]
            )
        except Exception as error:  # numpy raises nine types of exceptions for damaged files
            raise ProgramError(
                f"cannot read the host part {path}",
                why=f"{type(error).__name__}: {error}"[:200],
                hint="create it again with `whisperport fix` or `whisperport lower`",
            ) from error
        return cls(lookups, joins)


def _npy(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def _tensor(entry: Any) -> TensorSpec:
    return from_json(TensorSpec, plain(entry, "the host part"))


def _lookup(folder: Path, entry: Any) -> Lookup:
    tokens, embeddings = (_tensor(entry[name]) for name in ("tokens", "embeddings"))
    rows, width = (int(size) for size in entry["table_shape"])
    table = _array(folder, str(entry["table"]), (rows, width))
    count = int(np.prod(tokens.shape))
    positions = None
    if entry["adds_positions"]:
        positions = _array(folder, str(entry["positions"]), (count, width))
    if embeddings.shape != (1, width, count, 1):
        raise ValueError(
            f"the embeddings have shape {embeddings.shape}; expected {(1, width, count, 1)}"
        )
    return Lookup(tokens, embeddings, table, positions)


def _array(folder: Path, name: str, shape: tuple[int, int]) -> Array:
    """Read a float32 array from a file in the folder of the JSON file."""
    if Path(name).name != name:
        raise ValueError(f"`{name[:80]}` is not the name of a file in the same folder")
    array = open_array(folder / name)
    if array.shape != shape or array.dtype != np.float32:
        raise ValueError(f"`{name}` holds {array.dtype} of shape {array.shape}; expected {shape}")
    return np.array(array)
