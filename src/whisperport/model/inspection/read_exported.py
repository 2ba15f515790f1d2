"""Read the graph of an `ExportedProgram`, which `torch.export.export` returns."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whisperport.model.inspection.graph import Graph, Node, Value, build
from whisperport.model.inspection.torch_nodes import Argument, torch_node
from whisperport.model.inspection.written_views import follow_writes

if TYPE_CHECKING:
    from torch import fx
    from torch.export import ExportedProgram


def read_exported(name: str, exported: "ExportedProgram") -> Graph:
    """Read the graph of `exported`, without weights.

    Args:
        name: of the graph.
    """
    import torch

    signature = exported.graph_signature
    stored = {
        *signature.inputs_to_parameters,
        *signature.inputs_to_buffers,
        *signature.inputs_to_lifted_tensor_constants,
    }
    written_to = set(signature.buffers_to_mutate.values())
    constants = {n for n in stored if signature.inputs_to_buffers.get(n) not in written_to}
    values: dict[str, Value] = {}
    nodes: list[Node | None] = []
    inputs: list[Value] = []
    for node in exported.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            value = _value(node.name, node.meta["val"], node.name in constants)
            values[node.name] = value
            if node.name not in stored:
                inputs.append(value)
        elif node.op == "call_function" and "getitem" not in str(node.target):
            outputs = _outputs(node)
            values |= dict(outputs)
            results = [value for _, value in outputs]
            arguments, trace = _arguments(node, values), str(node.meta.get("stack_trace") or "")
            nodes.append(
                torch_node(node.name, _target(node), arguments, results, _module(node), trace)
            )
    specs = signature.output_specs  # results, and tensors written back to buffers and inputs
    returned = [values[spec.arg.name] for spec in specs if spec.arg.name in values]
    newest_nodes, newest = follow_writes([node for node in nodes if node], returned)
    return build(name, "torch", newest_nodes, inputs, newest)


def _target(node: "fx.Node") -> str:
    """Return the name of the called operator, such as `aten.linear.default` or `higher_order.cond`."""
    namespace = str(getattr(node.target, "namespace", ""))
    text = str(node.target)
    return text if "." in text else f"{namespace or 'python'}.{text}"


def _module(node: "fx.Node") -> tuple[str, str]:
    """Return path and class of the innermost module."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    return str(path), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _value(name: str, tensor: Any, constant: bool = False) -> Value:
    shape = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    return Value(name, shape, str(tensor.dtype).removeprefix("torch."), constant)


def _outputs(node: "fx.Node") -> list[tuple[str, Value]]:
    """Return outputs with the names that other nodes use: the node's name, or those of its `getitem`s."""
    result = node.meta.get("val")
    if hasattr(result, "dtype"):
        return [(node.name, _value(node.name, result))]
    if not isinstance(result, list | tuple):
        return []
    names_by_index = {
        user.args[1]: user.name for user in node.users if "getitem" in str(user.target)
    }
    names = [names_by_index.get(index, f"{node.name}_{index}") for index in range(len(result))]
    return [
        (name, _value(name, tensor))
        for name, tensor in zip(names, result, strict=True)
        if hasattr(tensor, "dtype")
    ]


def _arguments(node: "fx.Node", values: Mapping[str, Value]) -> list[Argument]:
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    names += [f"argument_{index}" for index in range(len(names), len(node.args))]
    pairs = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    return [(name, _plain(argument, values)) for name, argument in pairs]


def _plain(argument: Any, values: Mapping[str, Value]) -> Any:
    """Replace each node in an argument by the value that it computes; keep everything else."""
    if isinstance(argument, Sequence) and not isinstance(argument, str):
        return [_plain(member, values) for member in argument]
    return values.get(argument.name) if type(argument).__name__ == "Node" else argument
