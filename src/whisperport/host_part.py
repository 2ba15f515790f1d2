"""The steps of a program that the host computes: token lookup before it, joining its outputs after it.

A compiler without a lookup gets a program that begins at the embeddings, and one that cannot place a
product as wide as a vocabulary gets a program that returns the logits in pieces. What was cut off is
written beside the program, as `NAME.host.json` and `.npy` files, and computed by `HostPart`.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import ProgramError
from whisperport.regular_file import other_kind
from whisperport.runner import Array
from whisperport.spec import TensorSpec

LARGEST_JSON = 2**20  # bytes; those written here have about 800


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """One input of token ids, and the embeddings that replace it."""

    tokens: TensorSpec  # (1, S) integers, the input of the original program
    embeddings: TensorSpec  # (1, d, S, 1) float32, the input of the program without the lookup
    table: Array  # (V, d) float32
    positions: (
        Array | None
    )  # (S, d) float32, added to the rows; None: the program adds them, if any

    def embed(self, tokens: Array) -> Array:
        """Embeddings of token ids, (1, S) -> (1, d, S, 1).

        Raises:
            ProgramError: the shape differs, or an id is not in the table.
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
    """One output of the original program, and the outputs that it is joined from."""

    output: TensorSpec
    pieces: tuple[str, ...]  # names of outputs, in order along the last axis


@dataclass(frozen=True, slots=True, eq=False)
class HostPart:
    """What the host computes before and after a program; false if that is nothing."""

    lookups: tuple[Lookup, ...] = ()
    joins: tuple[Join, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lookups or self.joins)

    def __add__(self, other: "HostPart") -> "HostPart":
        return HostPart((*self.lookups, *other.lookups), (*self.joins, *other.joins))

    def inputs(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """The program's inputs, made of those of the original program.

        Raises:
            ProgramError: token ids are missing, of another shape, or not in the table.
        """
        made = dict(given)
        for lookup in self.lookups:
            if lookup.tokens.name not in made:
                raise ProgramError(f"the input `{lookup.tokens.name}` is missing")
            made[lookup.embeddings.name] = lookup.embed(made.pop(lookup.tokens.name))
        return made

    def outputs(self, returned: Mapping[str, Array]) -> dict[str, Array]:
        """The original program's outputs, made of those of the program."""
        made = dict(returned)
        for join in self.joins:
            made[join.output.name] = np.concatenate([made.pop(n) for n in join.pieces], axis=-1)
        return made

    def to_json(self) -> dict[str, Any]:
        """Without the arrays."""
        return {
            "lookups": [
                {
                    "tokens": lookup.tokens.to_json(),
                    "embeddings": lookup.embeddings.to_json(),
                    "table_shape": list(lookup.table.shape),
                    "adds_positions": lookup.positions is not None,
                }
                for lookup in self.lookups
            ],
            "joins": [
                {"output": join.output.to_json(), "pieces": list(join.pieces), "axis": -1}
                for join in self.joins
            ],
        }

    def files(self, name: str) -> dict[str, bytes]:
        """File name -> content, of everything that `read` needs; none where nothing is computed."""
        if not self:
            return {}
        told, files = self.to_json(), {}
        for lookup, one in zip(self.lookups, told["lookups"], strict=True):
            arrays = {"table": lookup.table, "positions": lookup.positions}
            for kind, array in arrays.items():
                if array is not None:
                    one[kind] = f"{name}.{lookup.tokens.name}.{kind}.npy"
                    files[one[kind]] = _npy(array)
        return {f"{name}.host.json": (json.dumps(told, indent=2) + "\n").encode(), **files}

    @classmethod
    def read(cls, path: Path) -> "HostPart":
        """What `files` wrote, from the `.host.json` file.

        Raises:
            ProgramError: a file is missing or damaged.
        """
        try:
            _check_kind(path)
            if path.stat().st_size > LARGEST_JSON:
                raise ValueError(f"it has more than {LARGEST_JSON} bytes")
            told = json.loads(path.read_bytes())
            lookups = tuple(_lookup(path.parent, one) for one in told["lookups"])
            joins = tuple(
                Join(TensorSpec.from_json(one["output"]), tuple(map(str, one["pieces"])))
                for one in told["joins"]
            )
        except Exception as error:  # numpy raises nine kinds on a damaged file
            raise ProgramError(
                f"cannot read the host part {path}",
                why=f"{type(error).__name__}: {error}"[:200],
                hint="`whisperport check --fix` and `whisperport lower` write it beside the program",
            ) from error
        return cls(lookups, joins)


def _npy(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def _check_kind(path: Path) -> None:
    if kind := other_kind(path):
        raise ValueError(f"it is {kind}, not a file")


def _lookup(folder: Path, told: Any) -> Lookup:
    tokens, embeddings = (TensorSpec.from_json(told[name]) for name in ("tokens", "embeddings"))
    rows, width = (int(size) for size in told["table_shape"])
    table = _array(folder, str(told["table"]), (rows, width))
    count = int(np.prod(tokens.shape))
    positions = None
    if told["adds_positions"]:
        positions = _array(folder, str(told["positions"]), (count, width))
    if embeddings.shape != (1, width, count, 1):
        raise ValueError(f"embeddings of shape {embeddings.shape}")
    return Lookup(tokens, embeddings, table, positions)


def _array(folder: Path, name: str, shape: tuple[int, int]) -> Array:
    """A float32 array of a file beside the JSON, and nowhere else."""
    if Path(name).name != name:
        raise ValueError(f"`{name[:80]}` is not the name of a file in the same folder")
    _check_kind(folder / name)
    # Mapped, a file that states more numbers than it holds is an error, and takes no memory.
    array: Array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
    if array.shape != shape or array.dtype != np.float32:
        raise ValueError(f"`{name}` holds {array.dtype} of shape {array.shape}; expected {shape}")
    return np.array(array)
