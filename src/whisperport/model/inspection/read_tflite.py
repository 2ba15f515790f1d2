"""Read the graphs of a `.tflite` file through its flatbuffer schema, without weights.

This reads the first subgraph, which the interpreter runs, and every other subgraph that a signature names.
The remaining subgraphs belong to control flow.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError, needs
from whisperport.model.inspection.graph import (
    Graph,
    Node,
    Quantization,
    Shape,
    Value,
    build,
    without_arguments,
)
from whisperport.model.inspection.vocabulary import TFLITE

CUSTOM = 32  # BuiltinOperator.CUSTOM: an operator with a name, which a vendor's delegate runs

# Source: tensorflow/compiler/mlir/lite/schema/schema.fbs, TensorType.
DTYPES = dict(
    enumerate(
        [
            "float32",
            "float16",
            "int32",
            "uint8",
            "int64",
            "string",
            "bool",
            "int16",
            "complex64",
            "int8",
            "float64",
            "complex128",
            "uint64",
            "resource",
            "variant",
            "uint32",
            "uint16",
            "int4",
            "bfloat16",
        ]
    )
)


def read_tflite(path: Path) -> list[Graph]:
    """Read the graph of each entry point of a TFLite model; the one that the interpreter runs is first.

    Raises:
        ProgramError: the file is damaged or not a TFLite model.
        MissingPackageError: the package tflite is not installed.
    """
    with opened_tflite(path) as (model, data):
        return _graphs(path.stem, model, len(data))


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a TFLite file.

    Attributes:
        name: name in the schema, such as "CONV_2D"; of a custom operator, its own name.
        tensor: name of its first output; empty if it has none.
        dtypes: dtypes of its inputs and outputs, each once.
    """

    name: str
    tensor: str
    dtypes: tuple[str, ...]


def list_operators(path: Path) -> list[list[Operator]]:
    """Return every operator of each subgraph, in the order of the file.

    `read_tflite` leaves out operators that a compiler would fold. This list has them, to compare it with
    what another tool counted.

    Raises:
        ProgramError: the file is damaged or not a TFLite model.
        MissingPackageError: the package tflite is not installed.
    """
    with opened_tflite(path) as (model, data):
        size = len(data)
        codes = [
            _code(model.OperatorCodes(index))[0]
            for index in range(_count(model.OperatorCodesLength(), size))
        ]
        subgraphs = range(_count(model.SubgraphsLength(), size))
        return [list(_operators(model.Subgraphs(index), codes, size)) for index in subgraphs]


def _operators(graph: Any, codes: list[str], size: int) -> Iterator[Operator]:
    tensors = [graph.Tensors(index) for index in range(_count(graph.TensorsLength(), size))]
    for index in range(_count(graph.OperatorsLength(), size)):
        operator = graph.Operators(index)
        read = _indices(operator.Inputs, operator.InputsLength(), size)
        written = list(_indices(operator.Outputs, operator.OutputsLength(), size))
        dtypes = (DTYPES.get(tensors[place].Type(), "unknown") for place in (*read, *written))
        name = tensors[written[0]].Name() if written else b""
        yield Operator(
            codes[operator.OpcodeIndex()],
            (name or b"").decode("utf-8", "replace"),
            tuple(dict.fromkeys(dtypes)),
        )


def _graphs(name: str, model: Any, size: int) -> list[Graph]:
    count = _count(model.SubgraphsLength(), size)
    if count == 0:
        raise ValueError("the model has no subgraph")
    _check_outside(model, size)
    codes = [
        _code(model.OperatorCodes(index))
        for index in range(_count(model.OperatorCodesLength(), size))
    ]
    keys = {0: ""}  # subgraph -> the first signature that names it
    for index in range(_count(model.SignatureDefsLength(), size)):
        signature = model.SignatureDefs(index)
        if not 0 <= signature.SubgraphIndex() < count:
            raise ValueError(
                f"signature {index} names subgraph {signature.SubgraphIndex()}, which does not exist"
            )
        key = (signature.SignatureKey() or b"").decode("utf-8", "replace")
        if not keys.get(signature.SubgraphIndex()):
            keys[signature.SubgraphIndex()] = key
    alone = len(keys) == 1
    return [
        _graph(name if alone else f"{name} {key}".strip(), model, index, codes, size)
        for index, key in keys.items()
    ]


def _graph(name: str, model: Any, subgraph: int, codes: list[Any], size: int) -> Graph:
    graph = model.Subgraphs(subgraph)
    values = [
        _value(model, graph.Tensors(index), index, size)
        for index in range(_count(graph.TensorsLength(), size))
    ]
    operators = (graph.Operators(i) for i in range(_count(graph.OperatorsLength(), size)))
    reader = _Constants(model, graph)
    nodes = [_node(reader, op, index, codes, values, size) for index, op in enumerate(operators)]
    inputs = [values[i] for i in _indices(graph.Inputs, graph.InputsLength(), size)]
    outputs = [values[i] for i in _indices(graph.Outputs, graph.OutputsLength(), size)]
    return build(name, "tflite", nodes, inputs, outputs)


def _check_outside(model: Any, size: int) -> None:
    """Check that weights stored after the tables, as in models above 2 GB, are complete."""
    for index in range(_count(model.BuffersLength(), size)):
        buffer = model.Buffers(index)
        end = buffer.Offset() + buffer.Size()
        if buffer.Size() > 1 and end > size:
            raise ValueError(
                f"buffer {index} ends at byte {end}, but the file has {size} bytes: it is incomplete"
            )


def _count(length: int, size: int) -> int:
    """Return a vector's length, after a check that the file is large enough for it (4 bytes per entry)."""
    if not 0 <= length <= size // 4:
        raise ValueError(f"a list has {length} entries, but the file has {size} bytes")
    return length


def _indices(read: Any, length: int, size: int) -> Iterator[int]:
    for place in range(_count(length, size)):
        index = read(place)
        if index >= 0:  # -1: an optional input that is not given
            yield index


def _value(model: Any, tensor: Any, index: int, size: int) -> Value:
    buffer = tensor.Buffer()
    stored = 0 < buffer < model.BuffersLength() and _has_data(model.Buffers(buffer))
    name = tensor.Name()
    return Value(
        f"{index}:{(name or b'').decode('utf-8', 'replace')}",
        _shape(tensor),
        DTYPES.get(tensor.Type(), "unknown"),
        stored and not tensor.IsVariable(),
        _quantization(tensor, size),
    )


def _quantization(tensor: Any, size: int) -> Quantization | None:
    """Return the quantization of a tensor; None if it has no scale."""
    stated = tensor.Quantization()
    scales = _count(stated.ScaleLength(), size) if stated else 0
    if not scales:
        return None
    zero_points = [stated.ZeroPoint(i) for i in range(_count(stated.ZeroPointLength(), size))]
    first = zero_points[0] if zero_points else 0
    return Quantization(scales, not any(zero_points), float(stated.Scale(0)), int(first))


def _has_data(buffer: Any) -> bool:
    return bool(buffer.DataLength() > 0 or buffer.Size() > 1)  # Size: data stored after the tables


def _shape(tensor: Any) -> Shape:
    rank, signed = tensor.ShapeLength(), tensor.ShapeSignatureLength()
    if not 0 <= rank <= 64:
        raise ValueError(f"a tensor has rank {rank}; expected 0 to 64")
    shape = [tensor.Shape(axis) for axis in range(rank)]
    if signed == rank:  # -1 in the signature: a dynamic axis
        return tuple("?" if tensor.ShapeSignature(a) < 0 else shape[a] for a in range(rank))
    return tuple(shape)


def _code(code: Any) -> tuple[str, bool]:
    """Return the operator's name, and whether it is custom."""
    from tflite.BuiltinOperator import BuiltinOperator

    # Codes from 127 on are in `BuiltinCode`, which is 0 in older files.
    number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    if number == CUSTOM:
        return (code.CustomCode() or b"unnamed").decode("utf-8", "replace"), True
    names = {v: n for n, v in vars(BuiltinOperator).items() if isinstance(v, int)}
    return names.get(number, f"operator {number}"), False


def _node(
    constants: "_Constants",
    operator: Any,
    index: int,
    codes: list[Any],
    values: list[Value],
    size: int,
) -> Node:
    name, custom = codes[operator.OpcodeIndex()]
    places = [operator.Inputs(i) for i in range(_count(operator.InputsLength(), size))]
    inputs = [values[place] if place >= 0 else None for place in places]
    outputs = [values[i] for i in _indices(operator.Outputs, operator.OutputsLength(), size)]
    op = f"tflite.{name}" if custom else TFLITE.get(name, name)
    if op == "embedding":  # TFLite passes the ids first, aten the table
        inputs.reverse()
    attributes = {} if custom else _attributes(constants, op, operator, inputs)
    tensors = without_arguments(op, inputs)
    return Node(f"{name}_{index}", op, name, tensors, tuple(outputs), attributes, custom)


def _attributes(
    constants: "_Constants", op: str, operator: Any, inputs: list[Value | None]
) -> dict[str, Any]:
    if op in ("softmax", "log_softmax"):
        return {"dim": -1}  # the only axis that TFLite supports
    if op in ("mean", "sum", "amax"):
        return {"dim": constants.integers(inputs, 1), "keepdim": _flag(operator, "ReducerOptions")}
    if op == "unsqueeze":
        return {"dim": constants.integers(inputs, 1)}
    if op == "slice" and len(inputs) == 4:  # STRIDED_SLICE
        return {"step": max(constants.integers(inputs, 3) or [1])}
    if op == "matmul":
        return {"transposed_left": _flag(operator, "BatchMatMulOptions")}
    if op == "gelu":
        return {"approximate": "tanh" if _flag(operator, "GeluOptions") else "none"}
    return {}


def _flag(operator: Any, kind: str) -> bool:
    """Return one boolean field of the operator's options."""
    import importlib

    options = getattr(importlib.import_module(f"tflite.{kind}"), kind)()
    table = operator.BuiltinOptions()
    if table is None:
        return False
    options.Init(table.Bytes, table.Pos)
    names = {
        "ReducerOptions": "KeepDims",
        "BatchMatMulOptions": "AdjX",
        "GeluOptions": "Approximate",
    }
    return bool(getattr(options, names[kind])())


class _Constants:
    """Reads the values of small constants of a subgraph."""

    def __init__(self, model: Any, graph: Any) -> None:
        self._model, self._graph = model, graph

    def integers(self, inputs: list[Value | None], place: int) -> list[int] | None:
        """Return the values of a small int32 constant; None if the input is not such a constant."""
        value = inputs[place] if place < len(inputs) else None
        if value is None or not value.constant or value.dtype != "int32" or (value.size or 0) > 64:
            return None
        index = int(value.name.split(":")[0])
        buffer = self._model.Buffers(self._graph.Tensors(index).Buffer())
        size = min(buffer.DataLength(), 4 * (value.size or 0)) // 4 * 4
        data = bytes(buffer.Data(i) for i in range(size))
        return list(struct.unpack(f"<{size // 4}i", data))


@contextmanager
def opened_tflite(path: Path) -> Iterator[tuple[Any, mmap.mmap]]:
    """Open a TFLite model: its root table, and the bytes of the file. Damage raises errors inside.

    Raises:
        ProgramError: the file is damaged or not a TFLite model; also when it is read in the block.
        MissingPackageError: the package tflite is not installed.
    """
    with needs("cannot read a .tflite file: the package tflite is not installed", extra="export"):
        from tflite.Model import Model
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield Model.GetRootAs(data), data
    except (struct.error, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ProgramError(
            f"{path.name} is damaged, or is not a TFLite model",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="convert the model again",
        ) from error
