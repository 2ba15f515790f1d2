"""Read the instructions of a .pte as nodes with the operator names of the other readers.

Source: executorch/schema/program.fbs; argument names are those of torch's operator schemas. The nodes of an
XNNPACK delegate, with their shapes, are read from the graph in its blob: backends/xnnpack/serialization,
schema.fbs and xnnpack_graph_serialize.py.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError, needs
from whisperport.model.inspection.graph import Graph, Node, Value
from whisperport.model.inspection.partitions import border
from whisperport.model.inspection.quiet import quiet
from whisperport.model.inspection.torch_nodes import Argument, torch_node
from whisperport.program.profiling import Subgraph

# c10::ScalarType -> numpy's name.
DTYPES = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32"}
DTYPES |= {7: "float64", 9: "complex64", 11: "bool", 15: "bfloat16"}

# ExecuTorch's variants of torch's operators.
VARIANTS = {
    "dim_order_ops::_to_dim_order_copy": "aten::_to_copy",
    "dim_order_ops::_clone_dim_order": "aten::clone",
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call: of an undelegated operator, or of a delegate."""

    operator: str  # "aten::mm.out"; empty for a delegate
    node: Node | None = None  # None: a delegate, or an operator that computes no tensor
    backend: str = ""  # of a delegate; empty: an undelegated operator
    inner: tuple[Node, ...] = ()  # nodes of the delegate; known for XNNPACK only


@dataclass(frozen=True, slots=True)
class Method:
    """One entry point of a .pte."""

    name: str
    inputs: tuple[Value | None, ...]  # None: not a tensor
    instructions: dict[tuple[int, int], Instruction]  # (chain, instruction), numbered as in ETDump
    graph: Graph  # undelegated nodes, and the nodes in XNNPACK delegates
    texts: tuple[str, ...] = ()  # that it returns beside tensors, as a method without instructions

    @property
    def borders(self) -> tuple[Subgraph, ...]:
        """What enters and leaves each XNNPACK delegate."""
        inner = [
            instruction.inner for instruction in self.instructions.values() if instruction.inner
        ]
        return tuple(border(nodes, self.graph.nodes, self.graph.outputs) for nodes in inner)


def read_pte(pte: bytes, name: str, methods: Sequence[str] = ()) -> dict[str, Method]:
    """Read the methods of an ExecuTorch program.

    Args:
        name: of the file, for error messages.
        methods: names of the methods to read; empty: all.

    Raises:
        ProgramError: the program is damaged, or this ExecuTorch version cannot read it.
        MissingPackageError: ExecuTorch is not installed.
    """
    with needs_executorch(), quiet():
        from executorch.exir._serialize._program import deserialize_pte_binary
    try:
        program = deserialize_pte_binary(pte).program
        blobs = [bytes(entry.data) for entry in program.backend_delegate_data]
        plans = [plan for plan in program.execution_plan if not methods or plan.name in methods]
        return {plan.name: _Reader(plan, blobs).method() for plan in plans}
    except Exception as error:  # struct.error, IndexError, TypeError where a table is missing, ...
        raise ProgramError(
            f"{name} is damaged, or is not an ExecuTorch program",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="lower the program again with the installed ExecuTorch version",
        ) from error


def needs_executorch() -> AbstractContextManager[None]:
    """Raise MissingPackageError if ExecuTorch, which the block imports, is not installed."""
    return needs("cannot inspect a .pte: ExecuTorch is not installed", extra="xnnpack")


class _Reader:
    """Reads one execution plan."""

    def __init__(self, plan: Any, blobs: Sequence[bytes]) -> None:
        self._plan, self._blobs = plan, blobs
        self._nodes: list[Node] = []
        self._delegates = 0

    def method(self) -> Method:
        """Read the method."""
        instructions = {
            (chain, place): self._instruction(instruction.instr_args, f"{chain}.{place}")
            for chain, entry in enumerate(self._plan.chains)
            for place, instruction in enumerate(entry.instructions)
        }
        inputs = tuple(self._tensor(number) for number in self._plan.inputs)
        values = tuple(value for value in inputs if value is not None)
        outputs = tuple(
            v for number in self._plan.outputs if (v := self._tensor(number)) is not None
        )
        graph = Graph(self._plan.name, "torch", tuple(self._nodes), values, outputs)
        returned = [self._plan.values[number].val for number in self._plan.outputs]
        texts = tuple(str(v.string_val) for v in returned if type(v).__name__ == "String")
        return Method(self._plan.name, inputs, instructions, graph, texts)

    def _instruction(self, call: Any, place: str) -> Instruction:
        kind = type(call).__name__
        if kind == "DelegateCall":
            delegate = self._plan.delegates[call.delegate_index]
            return Instruction("", backend=delegate.id, inner=self._inner(delegate, call.args))
        if kind != "KernelCall":
            return Instruction(kind)  # a move, a jump, a free
        operator = self._plan.operators[call.op_index]
        node = self._node(operator, call.args, place)
        if node is not None:
            self._nodes.append(node)
        return Instruction(f"{operator.name}.{operator.overload}".rstrip("."), node)

    def _inner(self, delegate: Any, args: Sequence[int]) -> tuple[Node, ...]:
        self._delegates += 1
        if delegate.id != BACKEND:
            return ()
        border = [f"v{number}" for number in args]
        blob = self._blobs[delegate.processed.index]
        nodes = read_xnnpack(blob, f"subgraph {self._delegates}", border)
        self._nodes += nodes
        return tuple(nodes)

    def _node(self, operator: Any, args: Sequence[int], place: str) -> Node | None:
        namespace, _, short = VARIANTS.get(operator.name, operator.name).partition("::")
        if short != "_to_copy":
            short = short.removesuffix("_copy")
        arguments, outputs = self._arguments(operator, args)
        node = torch_node(place, f"{namespace}.{short}", arguments, outputs)
        original_op = f"{operator.name}.{operator.overload}".replace("::", ".")
        return node and replace(node, original_op=original_op)

    def _arguments(self, operator: Any, args: Sequence[int]) -> tuple[list[Argument], list[Value]]:
        """Return arguments and outputs of a call.

        If torch has no schema for the operator, all tensors are inputs and the last one is the output.
        """
        values = [self._value(number) for number in args]
        schema = _schema(operator.name, operator.overload)
        if schema is None:
            tensors = [value for value in values if isinstance(value, Value)]
            named = [(str(place), value) for place, value in enumerate(values[:-2])]
            return named, tensors[-1:]
        # The returned values follow the arguments; they repeat the `out` arguments.
        pairs = list(zip(schema.arguments, values, strict=False))
        named = [(argument.name, value) for argument, value in pairs if not argument.is_out]
        outputs = [v for argument, v in pairs if argument.is_out and isinstance(v, Value)]
        return named, outputs

    def _value(self, number: int) -> Any:
        if number < 0:
            return None
        value = self._plan.values[number].val
        kind = type(value).__name__
        if kind == "Tensor":
            return self._tensor(number)
        if kind in ("TensorList", "OptionalTensorList"):
            return [self._tensor(item) if item >= 0 else None for item in value.items]
        if kind == "IntList":  # its items are numbers of values
            return [self._value(item) for item in value.items]
        if kind in ("DoubleList", "BoolList"):
            return list(value.items)
        fields = {"Int": "int_val", "Bool": "bool_val", "Double": "double_val"}
        return (
            getattr(value, fields[kind]) if kind in fields else getattr(value, "string_val", None)
        )

    def _tensor(self, number: int) -> Value | None:
        value = self._plan.values[number].val
        if type(value).__name__ != "Tensor":
            return None
        return Value(
            f"v{number}",
            tuple(value.sizes),
            DTYPES.get(int(value.scalar_type), ""),
            constant=value.data_buffer_idx > 0 and value.allocation_info is None,
        )


def _schema(name: str, overload: str) -> Any:
    """Return torch's schema of an operator; None if torch has none."""
    import torch

    namespace, _, short = name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), short)
        return getattr(packet, overload or "default")._schema
    except (AttributeError, RuntimeError):
        return None


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
XNNPACK_DTYPES = {
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
        dtype = XNNPACK_DTYPES.get(value["datatype"], "int8" if "int8" in value["datatype"] else "")
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
