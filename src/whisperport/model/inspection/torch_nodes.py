"""Convert nodes of a torch graph, given by aten's names and arguments, to nodes of a `Graph`."""

from collections.abc import Iterator, Sequence
from typing import Any

from whisperport.model.inspection.graph import Node, Value, innermost_line
from whisperport.model.inspection.vocabulary import TORCH

Argument = tuple[str, Any]
"""A parameter's name, and a `Value`, a list of them, None, or a plain number, string or list."""

_IGNORED = ("_assert", "sym_", "_set_grad_enabled", "_guards", "_functional_assert")


def torch_node(
    name: str,
    target: str,
    arguments: Sequence[Argument],
    outputs: Sequence[Value],
    module: tuple[str, str] = ("", ""),
    stack_trace: str = "",
) -> Node | None:
    """Convert one node.

    Args:
        name: of the node.
        target: `aten.linear.default`, with or without `torch.ops.`.
        arguments: in the order of the operator's schema.
        outputs: tensors that the node computes.
        module: path and class of the innermost module that called the operator.
        stack_trace: of the call, as torch writes it; empty: not stored.

    Returns:
        The node; None if it computes no tensor, such as assertions and arithmetic on sizes.
    """
    original_op = target.removeprefix("torch.ops.")
    namespace, _, rest = original_op.partition(".")
    short = _functional(rest.split(".")[0])
    if not outputs or short.startswith(_IGNORED):
        return None
    aten = namespace == "aten"
    inputs = tuple(value for _, argument in arguments for value in _tensors(argument))
    return Node(
        name,
        TORCH.get(short, short) if aten else ".".join(original_op.split(".")[:2]),
        original_op,
        tuple(_leading(short, inputs)),
        tuple(outputs),
        {key: value for key, value in arguments if not any(True for _ in _tensors(value))},
        custom=not aten and namespace != "higher_order",
        module=module[0],
        module_type=module[1],
        source=innermost_line(stack_trace),
    )


def _functional(short: str) -> str:
    """Return `add` for `add_`, as compilers do first. A copy into a tensor has no functional form."""
    in_place = short.endswith("_") and not short.startswith("_")
    return short[:-1] if in_place and short not in ("copy_", "detach_") else short


def _leading(short: str, inputs: tuple[Value | None, ...]) -> tuple[Value | None, ...]:
    """Move the bias to the end: `addmm` and `baddbmm` have it first, other matmuls last."""
    if short in ("addmm", "baddbmm") and len(inputs) == 3:
        return (inputs[1], inputs[2], inputs[0])
    return inputs


def _tensors(argument: Any) -> Iterator[Value | None]:
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, list | tuple) and any(isinstance(a, Value) for a in argument):
        yield from (a if isinstance(a, Value) else None for a in argument)
