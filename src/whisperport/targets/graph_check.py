"""Hold a program's graph against what a target's spec says it takes; needs torch and no SDK."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from whisperport.spec import Refusal, TargetSpec

if TYPE_CHECKING:  # boards have no torch
    from torch.fx import Node

    from whisperport.programs.program import Program


def refusals(program: "Program", spec: TargetSpec) -> list[Refusal]:
    """Every node of `program` that `spec` does not take, with the value met and the limit."""
    found = [
        Refusal(t.name, r, "dtype") for t in program.spec.inputs if (r := _dtype(t.dtype, spec))
    ]
    for node in program.exported.graph.nodes:
        if node.op == "call_function":
            found.extend(_of_node(node, spec))
    return found


def _dtype(dtype: str, spec: TargetSpec) -> str:
    if dtype in spec.dtypes:
        return ""
    return f"input of {dtype}; {spec.name} takes {', '.join(sorted(spec.dtypes))}"


def _of_node(node: "Node", spec: TargetSpec) -> Iterator[Refusal]:
    operator = str(node.target).removeprefix("aten.")
    name = operator.split(".")[0]
    if spec.operators is not None and name not in spec.operators and not _plumbing(operator):
        yield Refusal(node.name, f"{name} is not among the operators of {spec.name}", "operator")
    for value in _values(node.meta.get("val")):
        if value.dim() > spec.max_rank:
            reason = f"rank {value.dim()} is above {spec.max_rank}"
            yield Refusal(node.name, reason, "rank")
        if not all(isinstance(size, int) for size in value.shape):
            yield Refusal(node.name, f"dynamic shape {tuple(value.shape)}", "static")


def _plumbing(operator: str) -> bool:
    return "getitem" in operator or operator.startswith("_assert")


def _values(value: Any) -> list[Any]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if hasattr(v, "dim") and hasattr(v, "dtype")]
