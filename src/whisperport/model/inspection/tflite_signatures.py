"""Read the signatures of a `.tflite` file: inputs, outputs and operators.

`exchange` makes another program the one that LiteRT runs without a signature. LiteRT lists and profiles
the nodes of a file's first subgraph only.
"""

import mmap
import shutil
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError
from whisperport.model.inspection.read_tflite import DTYPES, opened_tflite
from whisperport.program.spec import TensorSpec

MAX_RANK = 64


@dataclass(frozen=True, slots=True)
class TfliteSignature:
    """One signature of a .tflite file.

    Attributes:
        subgraph: index of the subgraph that it runs.
        inputs: in the order of the subgraph, with the signature's names; a tensor without a name in the
            signature has the name "".
        outputs: as `inputs`.
        operators: operator, by its name in TFLite's schema -> number of nodes.
    """

    subgraph: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    operators: Mapping[str, int]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.operators.values())


def read_signatures(path: Path) -> dict[str, TfliteSignature]:
    """Return the signatures of a TFLite model by their keys, in the order of the file.

    Raises:
        ProgramError: the file is damaged or not a TFLite model.
        MissingPackageError: the package tflite is not installed.
    """
    with opened_tflite(path) as (model, data):
        return dict(_signatures(model, len(data)))


def _signatures(model: Any, size: int) -> Iterator[tuple[str, TfliteSignature]]:
    names = _operator_names(model, size)
    for index in range(_count(model.SignatureDefsLength(), size)):
        signature = model.SignatureDefs(index)
        place = signature.SubgraphIndex()
        if not 0 <= place < _count(model.SubgraphsLength(), size):
            raise ValueError(f"signature {index} names subgraph {place}, which does not exist")
        graph = model.Subgraphs(place)
        operators = Counter(
            names[graph.Operators(i).OpcodeIndex()]
            for i in range(_count(graph.OperatorsLength(), size))
        )
        yield (
            _text(signature.SignatureKey()),
            TfliteSignature(
                place,
                _tensors(graph, "Inputs", signature, size),
                _tensors(graph, "Outputs", signature, size),
                dict(operators.most_common()),
            ),
        )


def _operator_names(model: Any, size: int) -> list[str]:
    from tflite.BuiltinOperator import BuiltinOperator

    names = {v: n for n, v in vars(BuiltinOperator).items() if isinstance(v, int)}
    codes = (model.OperatorCodes(i) for i in range(_count(model.OperatorCodesLength(), size)))
    # Codes from 127 on are in `BuiltinCode`, which is 0 in older files.
    numbers = [max(code.BuiltinCode(), code.DeprecatedBuiltinCode()) for code in codes]
    return [names.get(number, f"operator {number}") for number in numbers]


def _tensors(graph: Any, side: str, signature: Any, size: int) -> tuple[TensorSpec, ...]:
    stated = (
        getattr(signature, side)(i)
        for i in range(_count(getattr(signature, f"{side}Length")(), size))
    )
    names = {tensor.TensorIndex(): _text(tensor.Name()) for tensor in stated}
    places = [
        getattr(graph, side)(i) for i in range(_count(getattr(graph, f"{side}Length")(), size))
    ]
    count = _count(graph.TensorsLength(), size)
    if not all(0 <= place < count for place in places):
        raise ValueError("an input or output is a tensor that does not exist")
    return tuple(_tensor(names.get(place, ""), graph.Tensors(place)) for place in places)


def _tensor(name: str, tensor: Any) -> TensorSpec:
    rank = tensor.ShapeLength()
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"a tensor has rank {rank}; expected 0 to {MAX_RANK}")
    shape = tuple(int(tensor.Shape(axis)) for axis in range(rank))
    return TensorSpec(name, shape, DTYPES.get(tensor.Type(), "unknown"))


def _count(length: int, size: int) -> int:
    """Return a vector's length, after a check that the file is large enough for it (4 bytes per entry)."""
    if not 0 <= length <= size // 4:
        raise ValueError(f"a list has {length} entries, but the file has {size} bytes")
    return length


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")


# Offsets of fields in the index of the root table, as flatc generates them for schema.fbs.
SUBGRAPHS, SIGNATURES = 8, 18


def exchange(path: Path, subgraph: int) -> None:
    """Exchange the first subgraph of a file with another one. Signatures then name the wrong subgraphs.

    Args:
        path: a valid .tflite file, which is changed in place.
        subgraph: index of the other subgraph; 0 changes nothing.
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        table = _root(data)
        start = table.Vector(table.Offset(SUBGRAPHS))
        places = (start, start + 4 * subgraph)
        # An entry is the distance from itself to its subgraph.
        first, second = (place + struct.unpack_from("<I", data, place)[0] for place in places)
        struct.pack_into("<I", data, places[0], second - places[0])
        struct.pack_into("<I", data, places[1], first - places[1])


def copy_of_program(path: Path, subgraph: int, out: Path) -> None:
    """Copy a file such that one of its subgraphs is the first, and without signatures.

    Args:
        path: a valid .tflite file.
        subgraph: index of the subgraph.
        out: the copy.

    Raises:
        ProgramError: the file is damaged.
    """
    shutil.copyfile(path, out)
    try:
        _make_first(out, subgraph)
    except (struct.error, ValueError, TypeError, IndexError) as error:
        raise ProgramError(
            f"{path.name} is damaged",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="convert the model again",
        ) from error


def _make_first(out: Path, subgraph: int) -> None:
    exchange(out, subgraph)
    with out.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        root = _root(data).Pos
        index = root - struct.unpack_from("<i", data, root)[0]
        if struct.unpack_from("<H", data, index)[0] > SIGNATURES:
            struct.pack_into("<H", data, index + SIGNATURES, 0)  # the field is absent


def _root(data: mmap.mmap) -> Any:
    from flatbuffers.table import Table

    return Table(data, struct.unpack_from("<I", data)[0])
