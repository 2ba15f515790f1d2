"""What a .pte does, instruction by instruction, in the vocabulary of the other readers.

Source: executorch/schema/program.fbs; the arguments' names are those of torch's own schemas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from whisperport.errors import MissingPackageError, ProgramError
from whisperport.inspection.graph import Graph, Node, Value
from whisperport.inspection.read_xnnpack import BACKEND, read_xnnpack
from whisperport.inspection.torch_nodes import Argument, torch_node

# By the numbers of c10::ScalarType.
DTYPES = {0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32"}
DTYPES |= {7: "float64", 9: "complex64", 11: "bool", 15: "bfloat16"}

# ExecuTorch's forms of torch's own operators.
OWN = {
    "dim_order_ops::_to_dim_order_copy": "aten::_to_copy",
    "dim_order_ops::_clone_dim_order": "aten::clone",
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call, of an operator outside any delegate or of a delegate."""

    operator: str  # "aten::mm.out"; empty for a delegate
    node: Node | None = None  # of an operator that computes a tensor
    backend: str = ""  # of a delegate
    inner: tuple[Node, ...] = ()  # what the delegate computes, where that can be read (XNNPACK)


@dataclass(frozen=True, slots=True)
class Method:
    """One entry point. Instructions have the numbers that ETDump gives them."""

    name: str
    inputs: tuple[Value | None, ...]  # None: not a tensor
    instructions: dict[tuple[int, int], Instruction]  # (chain, place) -> call
    graph: Graph  # the operators outside delegates, and what XNNPACK's compute


def read_pte(pte: bytes, name: str, methods: Sequence[str] = ()) -> dict[str, Method]:
    """Methods of an ExecuTorch program; all, unless `methods` names some.

    Raises:
        ProgramError: it is damaged, or of a version this ExecuTorch does not read.
        MissingPackageError: ExecuTorch is not installed.
    """
    try:
        from executorch.exir._serialize._program import deserialize_pte_binary
    except ImportError as error:
        raise missing_executorch(error) from error
    try:
        program = deserialize_pte_binary(pte).program
        blobs = [bytes(entry.data) for entry in program.backend_delegate_data]
        plans = [plan for plan in program.execution_plan if not methods or plan.name in methods]
        return {plan.name: _Reader(plan, blobs).method() for plan in plans}
    except Exception as error:  # struct.error, IndexError, TypeError where a table is missing, ...
        raise ProgramError(
            f"{name} is damaged, or no ExecuTorch program",
            why=f"{type(error).__name__}: {error}"[:200],
        ) from error


def missing_executorch(error: ImportError) -> MissingPackageError:
    return MissingPackageError(
        "cannot inspect a .pte: ExecuTorch is not installed",
        why=str(error),
        hint='pip install "whisperport[xnnpack]"',
    )


class _Reader:
    """One execution plan on its way."""

    def __init__(self, plan: Any, blobs: Sequence[bytes]) -> None:
        self._plan, self._blobs = plan, blobs
        self._nodes: list[Node] = []
        self._delegates = 0

    def method(self) -> Method:
        instructions = {
            (chain, place): self._instruction(instruction.instr_args, f"{chain}.{place}")
            for chain, entry in enumerate(self._plan.chains)
            for place, instruction in enumerate(entry.instructions)
        }
        inputs = tuple(self._tensor(number) for number in self._plan.inputs)
        values = tuple(value for value in inputs if value is not None)
        graph = Graph(self._plan.name, "torch", tuple(self._nodes), values, ())
        return Method(self._plan.name, inputs, instructions, graph)

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
        namespace, _, short = OWN.get(operator.name, operator.name).partition("::")
        if short != "_to_copy":
            short = short.removesuffix("_copy")
        arguments, outputs = self._arguments(operator, args)
        node = torch_node(place, f"{namespace}.{short}", arguments, outputs)
        written = f"{operator.name}.{operator.overload}".replace("::", ".")
        return node and replace(node, written=written)

    def _arguments(self, operator: Any, args: Sequence[int]) -> tuple[list[Argument], list[Value]]:
        """By the operator's schema; without one, tensors are inputs and the last is the output."""
        values = [self._value(number) for number in args]
        schema = _schema(operator.name, operator.overload)
        if schema is None:
            tensors = [value for value in values if isinstance(value, Value)]
            named = [(str(place), value) for place, value in enumerate(values[:-2])]
            return named, tensors[-1:]
        # What is returned follows the arguments, and is the `out` among them once more.
        pairs = list(zip(schema.arguments, values, strict=False))
        given = [(argument.name, value) for argument, value in pairs if not argument.is_out]
        outputs = [v for argument, v in pairs if argument.is_out and isinstance(v, Value)]
        return given, outputs

    def _value(self, number: int) -> Any:
        if number < 0:
            return None
        value = self._plan.values[number].val
        kind = type(value).__name__
        if kind == "Tensor":
            return self._tensor(number)
        if kind in ("TensorList", "OptionalTensorList"):
            return [self._tensor(item) if item >= 0 else None for item in value.items]
        if kind == "IntList":  # of the numbers of values
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
    """torch's schema of an operator; None where torch has none."""
    import torch

    namespace, _, short = name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), short)
        return getattr(packet, overload or "default")._schema
    except (AttributeError, RuntimeError):
        return None
