"""What one XNNPACK delegate of a .pte computes: the nodes of the graph inside its blob, with shapes.

Source: executorch/backends/xnnpack/serialization/schema.fbs and xnnpack_graph_serialize.py.
"""

import json
import tempfile
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from whisperport.inspection.graph import Node, Value

BACKEND = "XnnpackBackend"

NONE = 0xFFFFFFFF  # the number of a value that does not cross the delegate's border

# What the blob calls them -> our vocabulary; of the others only the bytes that they move are counted.
OPERATORS = {
    "XNNFullyConnected": "linear",
    "XNNBatchMatrixMultiply": "matmul",
    "XNNConv2d": "conv",
    "XNNDepthwiseConv2d": "conv",
    "XNNStaticTranspose": "transpose",
    "XNNStaticReshape": "reshape",
    "XNNStaticSlice": "slice",
}
INPUTS = ("input_id", *(f"input{number}_id" for number in range(1, 6)), "filter_id", "bias_id")
DTYPES = {
    "xnn_datatype_fp32": "float32",
    "xnn_datatype_fp16": "float16",
    "xnn_datatype_int32": "int32",
}


def read_xnnpack(blob: bytes, name: str, border: Sequence[str]) -> list[Node]:
    """The nodes of a delegate's graph, in its order.

    Args:
        name: of the delegate; a node's is "`name`, node 3".
        border: names outside of the values that the delegate is called with, in their order.

    Raises:
        ValueError, KeyError, and whatever flatc finds: it is no such blob.
    """
    graph = _graph(blob)
    values = {}
    for entry in graph["xvalues"]:
        value = entry["xvalue_union"]
        value = value.get("tensor_value", value)  # a quantized one holds the tensor
        dtype = DTYPES.get(value["datatype"], "int8" if "int8" in value["datatype"] else "")
        outside = value["external_id"]
        own = border[outside] if outside != NONE else f"{name}.{value['id_out']}"
        constant = value["constant_buffer_idx"] > 0
        values[value["id_out"]] = Value(own, tuple(value["dims"]), dtype, constant)
    return [
        _node(f"{name}, node {place}", node, values)
        for place, node in enumerate(graph["xnodes"], start=1)
    ]


def _node(name: str, node: dict[str, Any], values: dict[int, Value]) -> Node:
    kind, fields = node["xnode_union_type"], node["xnode_union"]
    inputs = tuple(values[fields[i]] for i in INPUTS if fields.get(i) in values)
    outputs = tuple(values[i] for i in (fields.get("output_id"),) if i in values)
    return Node(name, OPERATORS.get(kind, kind), kind, inputs, outputs)


def _graph(blob: bytes) -> Any:
    from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader
    from executorch.exir._serialize._flatbuffer import _flatc_decompile

    header = XNNHeader.from_bytes(blob[: XNNHeader.EXPECTED_LENGTH])
    start = header.flatbuffer_offset
    schema = files("executorch.backends.xnnpack.serialization") / "schema.fbs"
    with tempfile.TemporaryDirectory() as folder, as_file(schema) as schema_file:
        binary = Path(folder) / "graph.bin"
        binary.write_bytes(blob[start : start + header.flatbuffer_size])
        _flatc_decompile(folder, str(schema_file), str(binary))
        return json.loads(binary.with_suffix(".json").read_text(encoding="utf-8"))
