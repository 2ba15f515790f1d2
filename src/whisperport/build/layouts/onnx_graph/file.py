"""Write an ONNX file piece by piece, with one tensor in memory at a time, and open it.

A message of protobuf is its fields, in any order; a field that holds a message or bytes is a key, a length
and the contents. So the file begins with the fields of `ModelProto`, then comes its graph without tensors,
and then one field for each tensor. Numbers of fields: onnx/onnx.proto.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from whisperport.build.layouts.onnx_graph.graph import Graph, Initializer
from whisperport.errors import needs

IR_VERSIONS = {17: 8, 20: 9}  # the oldest with these operators
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # fields of ModelProto, GraphProto, TensorProto
LONGEST = (
    2**31 - 2**24
)  # bytes of tensors: protobuf reads 2 GiB, of which nodes and names take little
SMALLEST_OUTSIDE = (
    1024  # bytes: runtimes read smaller tensors, such as shapes, while they load the graph
)
PAGE = (
    4096  # bytes: tensors in a file of their own begin at its multiples, so that they can be mapped
)

Value = tuple[str, DTypeLike, list[Any]]
"""An input or output: name, dtype, and its sizes; a text is a symbol."""


def write_graph(
    path: Path,
    graph: Graph,
    inputs: Iterable[Value],
    outputs: Iterable[Value],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a graph with its tensors.

    If the file would be longer than protobuf reads, its tensors are in a second one: its name and "_data".

    Args:
        metadata: texts that the file holds.
    """
    model, tensors = _model(graph, inputs, outputs, metadata or {}), graph.initializers
    is_split = sum(tensor.n_bytes for tensor in tensors.values()) > LONGEST
    outside = _written_outside(path, tensors) if is_split else {}
    nodes = model.graph.SerializeToString()
    model.ClearField("graph")
    heads = {name: _head(name, tensor, outside.get(name)) for name, tensor in tensors.items()}
    inside = sum(tensor.n_bytes for name, tensor in tensors.items() if name not in outside)
    with path.open("wb") as file:
        file.write(model.SerializeToString())
        file.write(_key(GRAPH, len(nodes) + sum(map(len, heads.values())) + inside))
        file.write(nodes)
        for name, head in heads.items():
            file.write(head)
            if name not in outside:
                _write_values(file, tensors[name])


def _model(
    graph: Graph, inputs: Iterable[Value], outputs: Iterable[Value], metadata: Mapping[str, str]
) -> Any:
    from onnx import helper

    body = helper.make_graph(graph.nodes, "whisper", _values(inputs), _values(outputs))
    model = helper.make_model(
        body,
        opset_imports=[helper.make_opsetid("", graph.opset)],
        ir_version=IR_VERSIONS[graph.opset],
        producer_name="whisperport",
    )
    helper.set_model_props(model, dict(metadata))
    return model


def _values(values: Iterable[Value]) -> list[Any]:
    from onnx import helper

    return [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), sizes)
        for name, dtype, sizes in values
    ]


def _written_outside(path: Path, tensors: Mapping[str, Initializer]) -> dict[str, dict[str, str]]:
    """Write all but small tensors to the second file; return where each is."""
    places = {}
    outside = path.with_name(f"{path.name}_data")
    with outside.open("wb") as file:
        for name, tensor in tensors.items():
            if tensor.n_bytes >= SMALLEST_OUTSIDE:
                start = file.seek(-file.tell() % PAGE, os.SEEK_CUR)
                _write_values(file, tensor)
                places[name] = {
                    "location": outside.name,
                    "offset": str(start),
                    "length": str(tensor.n_bytes),
                }
    return places


def _write_values(file: BinaryIO, tensor: Initializer) -> None:
    array = np.asarray(tensor.values(), order="C")
    if array.shape != tensor.shape or array.dtype != tensor.dtype:
        raise ValueError(f"{array.dtype} {array.shape}, and not {tensor.dtype} {tensor.shape}")
    file.write(array.data)


def _head(name: str, tensor: Initializer, place: Mapping[str, str] | None) -> bytes:
    """Return all of a tensor's field in its graph, except its values."""
    from onnx import TensorProto, helper

    proto = TensorProto(
        name=name, dims=tensor.shape, data_type=helper.np_dtype_to_tensor_dtype(tensor.dtype)
    )
    if place:
        proto.data_location = TensorProto.EXTERNAL
        for key, value in place.items():
            proto.external_data.add(key=key, value=value)
        description: bytes = proto.SerializeToString()
        return _key(INITIALIZER, len(description)) + description
    description = bytes(proto.SerializeToString()) + _key(RAW_DATA, tensor.n_bytes)
    return _key(INITIALIZER, len(description) + tensor.n_bytes) + description


def _key(field: int, length: int) -> bytes:
    """Return the key of a field of bytes, and their number in groups of 7 bits, the lowest first."""
    groups = [length & 0x7F]
    while length := length >> 7:
        groups[-1] |= 0x80
        groups.append(length & 0x7F)
    return bytes([field << 3 | 2, *groups])


def open_session(path: Path) -> Any:
    """Return the session of a file in ONNX Runtime, on the CPU with one thread.

    Raises:
        MissingPackageError: ONNX Runtime is not installed.
    """
    with needs("cannot run ONNX files: onnxruntime is not installed", extra="onnxruntime"):
        import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_session(session: Any, arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Run a session; what it takes in float16 is converted to it.

    Args:
        session: of `open_session`.
        arrays: input -> what it takes.
    """
    halves = {value.name for value in session.get_inputs() if value.type == "tensor(float16)"}
    inputs = {k: v.astype(np.float16) if k in halves else v for k, v in arrays.items()}
    outputs: list[NDArray[Any]] = session.run(None, inputs)
    return outputs
