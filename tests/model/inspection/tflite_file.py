"""Small TFLite files, written field by field: converters are large, and none writes what is wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import flatbuffers
import tflite
from tflite.BuiltinOperator import BuiltinOperator

FLOAT32, INT32, INT64 = 0, 2, 4


@dataclass(frozen=True)
class T:
    """A tensor; `data` makes it a constant."""

    shape: Sequence[int]
    kind: int = FLOAT32
    data: bytes = b""


@dataclass(frozen=True)
class Op:
    """An operator of TFLite's own, or with `custom` a vendor's, over tensors by index."""

    name: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    custom: bool = False


def tflite_file(
    tensors: Sequence[T],
    operators: Sequence[Op],
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    outside: Mapping[int, tuple[int, int]] | None = None,
    signature: tuple[str, Sequence[str], Sequence[str]] | None = None,
) -> bytes:
    """Write a .tflite; `outside` maps tensors stored after the tables to offset and size in the file.

    `signature` is a name, and a name for each input and each output.
    """
    b = flatbuffers.Builder(1024)
    places = outside or {}
    buffers = [_buffer(b, b"")]
    buffers += [_buffer(b, t.data, places.get(index)) for index, t in enumerate(tensors)]
    made = [_tensor(b, t, index + 1) for index, t in enumerate(tensors)]
    codes = [_code(b, op) for op in operators]
    ops = [_operator(b, op, index) for index, op in enumerate(operators)]
    graph = _graph(b, made, ops, inputs, outputs)
    codes_at = _offsets(b, codes)
    graphs_at = _offsets(b, [graph])
    buffers_at = _offsets(b, buffers)
    signatures_at = _offsets(b, [_signature(b, signature, inputs, outputs)]) if signature else None
    tflite.ModelStart(b)
    tflite.ModelAddVersion(b, 3)
    tflite.ModelAddOperatorCodes(b, codes_at)
    tflite.ModelAddSubgraphs(b, graphs_at)
    tflite.ModelAddBuffers(b, buffers_at)
    if signatures_at is not None:
        tflite.ModelAddSignatureDefs(b, signatures_at)
    b.Finish(tflite.ModelEnd(b), file_identifier=b"TFL3")
    return bytes(b.Output())


def linear_file(rows: int = 2, inner: int = 3, columns: int = 4) -> bytes:
    """x (rows, inner) to a FULLY_CONNECTED of `columns`, and a SOFTMAX."""
    weight = T((columns, inner), data=bytes(4 * columns * inner))
    bias = T((columns,), data=bytes(4 * columns))
    return tflite_file(
        [T((rows, inner)), weight, bias, T((rows, columns)), T((rows, columns))],
        [Op("FULLY_CONNECTED", [0, 1, 2], [3]), Op("SOFTMAX", [3], [4])],
        [0],
        [4],
    )


def outside_file(offset: int, size: int) -> bytes:
    """As `linear_file`, with a weight that is stored from byte `offset` on, after the tables."""
    tensors = [T((2, 3)), T((4, 3)), T((2, 4))]
    operators = [Op("FULLY_CONNECTED", [0, 1], [2])]
    return tflite_file(tensors, operators, [0], [2], outside={1: (offset, size)})


def _signature(
    b: flatbuffers.Builder,
    signature: tuple[str, Sequence[str], Sequence[str]],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> int:
    key, *names = signature
    name = b.CreateString(key)
    sides = [
        _offsets(b, [_tensor_map(b, *pair) for pair in zip(side, places, strict=True)])
        for side, places in zip(names, (inputs, outputs), strict=True)
    ]
    tflite.SignatureDefStart(b)
    tflite.SignatureDefAddInputs(b, sides[0])
    tflite.SignatureDefAddOutputs(b, sides[1])
    tflite.SignatureDefAddSignatureKey(b, name)
    return tflite.SignatureDefEnd(b)


def _tensor_map(b: flatbuffers.Builder, name: str, tensor: int) -> int:
    at = b.CreateString(name)
    tflite.TensorMapStart(b)
    tflite.TensorMapAddName(b, at)
    tflite.TensorMapAddTensorIndex(b, tensor)
    return tflite.TensorMapEnd(b)


def _offsets(b: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    b.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        b.PrependUOffsetTRelative(offset)
    return b.EndVector()


def _ints(b: flatbuffers.Builder, numbers: Sequence[int]) -> int:
    b.StartVector(4, len(numbers), 4)
    for number in reversed(numbers):
        b.PrependInt32(number)
    return b.EndVector()


def _buffer(b: flatbuffers.Builder, data: bytes, place: tuple[int, int] | None = None) -> int:
    at = b.CreateByteVector(data) if data else None
    tflite.BufferStart(b)
    if place is not None:
        tflite.BufferAddOffset(b, place[0])
        tflite.BufferAddSize(b, place[1])
    if at is not None:
        tflite.BufferAddData(b, at)
    return tflite.BufferEnd(b)


def _tensor(b: flatbuffers.Builder, tensor: T, buffer: int) -> int:
    name = b.CreateString(f"t{buffer - 1}")
    dynamic = any(axis < 0 for axis in tensor.shape)
    signature = _ints(b, tensor.shape) if dynamic else None
    shape = _ints(b, [max(axis, 1) for axis in tensor.shape])
    tflite.TensorStart(b)
    tflite.TensorAddShape(b, shape)
    tflite.TensorAddType(b, tensor.kind)
    tflite.TensorAddBuffer(b, buffer)
    tflite.TensorAddName(b, name)
    if signature is not None:
        tflite.TensorAddShapeSignature(b, signature)
    return tflite.TensorEnd(b)


def _code(b: flatbuffers.Builder, op: Op) -> int:
    custom = b.CreateString(op.name) if op.custom else None
    number = BuiltinOperator.CUSTOM if op.custom else getattr(BuiltinOperator, op.name)
    tflite.OperatorCodeStart(b)
    tflite.OperatorCodeAddDeprecatedBuiltinCode(b, min(number, 127))
    if custom is not None:
        tflite.OperatorCodeAddCustomCode(b, custom)
    tflite.OperatorCodeAddVersion(b, 1)
    tflite.OperatorCodeAddBuiltinCode(b, number)
    return tflite.OperatorCodeEnd(b)


def _operator(b: flatbuffers.Builder, op: Op, code: int) -> int:
    inputs, outputs = _ints(b, op.inputs), _ints(b, op.outputs)
    tflite.OperatorStart(b)
    tflite.OperatorAddOpcodeIndex(b, code)
    tflite.OperatorAddInputs(b, inputs)
    tflite.OperatorAddOutputs(b, outputs)
    return tflite.OperatorEnd(b)


def _graph(
    b: flatbuffers.Builder,
    tensors: Sequence[int],
    operators: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> int:
    tensors_at, operators_at = _offsets(b, tensors), _offsets(b, operators)
    inputs_at, outputs_at = _ints(b, inputs), _ints(b, outputs)
    tflite.SubGraphStart(b)
    tflite.SubGraphAddTensors(b, tensors_at)
    tflite.SubGraphAddInputs(b, inputs_at)
    tflite.SubGraphAddOutputs(b, outputs_at)
    tflite.SubGraphAddOperators(b, operators_at)
    return tflite.SubGraphEnd(b)
