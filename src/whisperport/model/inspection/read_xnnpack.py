"""Read the nodes of one XNNPACK delegate of a .pte, with their shapes, from the graph in its blob.

Source: executorch/backends/xnnpack/serialization/schema.fbs and xnnpack_graph_serialize.py.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from whisperport.model.inspection.graph import Node, Value

BACKEND = "XnnpackBackend"

NO_EXTERNAL_ID = 0xFFFFFFFF  # of a value that is neither an input nor an output of the delegate

# XNNPACK's operator -> aten's name. For other operators only the bytes moved are counted.
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
INFINITE = re.compile(r"(:\s*-?)inf\b")  # as flatc writes a limit of an activation
DTYPES = {
    "xnn_datatype_fp32": "float32",
    "xnn_datatype_fp16": "float16",
    "xnn_datatype_int32": "int32",
}


def read_xnnpack(blob: bytes, name: str, border: Sequence[str]) -> list[Node]:
    """Read the nodes of a delegate's graph, in its order.

    Args:
        blob: the delegate's data in the .pte.
        name: of the delegate; its third node is called "`name`, node 3".
        border: names of the delegate's inputs and outputs in the calling graph, in the order of the call.

    Raises:
        Exception: the blob is damaged or not an XNNPACK graph; ValueError, KeyError or an error of flatc.
    """
    graph = _graph(blob)
    values = {}
    for entry in graph["xvalues"]:
        value = entry["xvalue_union"]
        value = value.get("tensor_value", value)  # a quantized value contains the tensor
        dtype = DTYPES.get(value["datatype"], "int8" if "int8" in value["datatype"] else "")
        outside = value["external_id"]
        own = border[outside] if outside != NO_EXTERNAL_ID else f"{name}.{value['id_out']}"
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
        text = binary.with_suffix(".json").read_text(encoding="utf-8")
    return json.loads(INFINITE.sub(r"\1Infinity", text))
