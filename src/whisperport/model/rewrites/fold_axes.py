"""Remove tensors of more than 4 axes: fold axes that stay together before a node, and unfold them after it.

    before   x(1,T,3d) ─ view (1,T,3,H,D) ─ permute (3,1,H,T,D) ─ select ─────────────► q(1,H,T,D)
    after    x(1,T,3d) ─ reshape (T,3,H,D) ─ permute (3,H,T,D) ─ reshape (1,3,HTD) ─ select ─ reshape ─► q

Why: most neural processors have four registers for sizes. Ranks 5 and 6 occur if one matmul computes
queries, keys and values, if keys are repeated for several heads, and if an image is split into windows.
Exact: all numbers stay in the same order.
"""

from collections.abc import Sequence
from itertools import groupby
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import arguments, aten, replace, shape
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.program.spec import Rejection

RESHAPES = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
        *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
        *(aten.flatten.using_ints, aten.unflatten.int, aten.clone.default),
        aten.contiguous.default,
    }
)
PIECES = (aten.unbind.int, aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
Sizes = list[int]


class _RankError(Exception):
    """A node needs more axes than the maximum rank; the message is the reason."""


@rewrite("fold-axes", exact=True, number=4)
def fold_axes(module: GraphModule, number: int) -> tuple[list[str], list[Rejection]]:
    """Fold the axes of every node of a rank above `number`, except operators that are not handled here."""
    changed: list[str] = []
    rejected: dict[str, str] = {}
    for node in [n for n in module.graph.nodes if n.op == "call_function"]:
        if node.target is getitem:
            continue  # one output of a node in PIECES, which is handled with that node
        if node.target in RESHAPES:
            if (
                _rank(node) <= number < _rank(node.args[0])
                and _origin(node, number) != node.args[0]
            ):
                with module.graph.inserting_before(node):
                    replace(node, _reshape(node.args[0], shape(node), number))
                changed.append(node.name)
        elif max(map(_rank, (node, *node.all_input_nodes))) > number:
            try:
                with module.graph.inserting_before(node):
                    _fold(node, number)
                changed.append(node.name)
            except _RankError as error:
                rejected[node.name] = str(error)
    module.graph.eliminate_dead_code()
    return changed, [*_remaining(module, number, rejected)]


def _remaining(module: GraphModule, number: int, rejected: dict[str, str]) -> list[Rejection]:
    """Return everything that still has too many axes: inputs, outputs, and nodes that were not folded."""
    reasons = []
    for node in module.graph.nodes:
        if node.name in rejected:
            reasons.append(Rejection(node.name, rejected[node.name]))
        elif node.op == "placeholder" and _rank(node) > number:
            reasons.append(
                Rejection(
                    node.name,
                    f"an input of rank {_rank(node)}; the limit is {number}: fold it on the host",
                )
            )
        elif node.op == "output":
            reasons += [
                Rejection(
                    result.name,
                    f"an output of rank {_rank(result)}; the limit is {number}: fold it on the host",
                )
                for result in node.all_input_nodes
                if _rank(result) > number and result.op != "placeholder"
            ]
    return reasons


def _fold(node: Node, number: int) -> None:
    """Replace one node by its folded form."""
    target = node.target
    if target in PIECES:
        _fold_pieces(node, number)
    elif target in (aten.permute.default, aten.transpose.int):
        _put(node, _permuted(node, number))
    elif target == aten.expand.default:
        _put(node, _expanded(node, number))
    elif target in _ALONG:
        _put(node, _along_one_axis(node, number))
    elif target == aten.cat.default:
        _put(node, _concatenated(node, number))
    elif target == aten.matmul.default and min(map(_rank, node.all_input_nodes)) > 1:
        _put(node, _by_outer_axes(node, number, inner=2))
    elif target == aten.scaled_dot_product_attention.default:
        _put(node, _by_outer_axes(node, number, inner=2, least=2))
    elif target == aten.linear.default:
        _put(node, _by_rows(node, number, 1))
    elif target == aten.layer_norm.default:
        _put(node, _by_rows(node, number, len(arguments(node)["normalized_shape"])))
    elif _is_elementwise(target):
        _put(node, _by_outer_axes(node, number, inner=0))
    else:
        raise _RankError(
            f"rank {max(map(_rank, (node, *node.all_input_nodes)))}; "
            f"folding the axes of {target} is not supported"
        )


def _is_elementwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target.overloadpacket is aten.where
    )


def _put(node: Node, folded: Node) -> None:
    replace(node, node.graph.call_function(aten.reshape.default, (folded, shape(node))))


def _reshape(source: Any, sizes: Sequence[int], number: int) -> Node:
    """Reshape `source`; if its rank is too high, reshape the tensor before the preceding reshapes."""
    origin = source if _rank(source) <= number else _origin(source, number)
    return origin.graph.call_function(aten.reshape.default, (origin, list(sizes)))


def _origin(node: Node, number: int) -> Node:
    """Return the tensor before a chain of reshapes of too high a rank."""
    while node.target in RESHAPES:
        before = node.args[0]
        assert isinstance(before, Node)
        node = before
        if _rank(node) <= number:
            break
    return node


def _rank(node: Any) -> int:
    """Return the rank of a node's value; 0 if it is not a tensor."""
    recorded = node.meta.get("val") if isinstance(node, Node) else None
    return recorded.dim() if isinstance(recorded, Tensor) else 0


def _permuted(node: Node, number: int) -> Node:
    """Permute without axes of length 1, and with adjacent axes joined if they stay adjacent."""
    args = arguments(node)
    source, sizes = args["self"], shape(args["self"])
    order = [axis % len(sizes) for axis in args.get("dims", range(len(sizes)))]
    if node.target == aten.transpose.int:
        first, second = args["dim0"] % len(sizes), args["dim1"] % len(sizes)
        order[first], order[second] = second, first
    sizes, order = _join_adjacent(sizes, order)
    while len(sizes) > number:
        source, sizes, order = _move_first(source, sizes, order, number)
    return _reorder(source, sizes, order, number)


def _join_adjacent(sizes: Sizes, order: Sizes) -> tuple[Sizes, Sizes]:
    long = [axis for axis in range(len(sizes)) if sizes[axis] != 1]
    places = [long.index(axis) for axis in order if axis in long]
    runs = [
        [place for _, place in run]
        for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    ]
    ordered = sorted(runs)
    joined = [prod(sizes[long[place]] for place in run) for run in ordered]
    return joined, [ordered.index(run) for run in runs]


def _move_first(source: Node, sizes: Sizes, order: Sizes, number: int) -> tuple[Node, Sizes, Sizes]:
    """Move the first misplaced axis to its position; return the new tensor, sizes and order."""
    _check(4, number)
    to = next(place for place, axis in enumerate(order) if place != axis)
    at = order[to]
    in_four = [prod(sizes[:to]), prod(sizes[to:at]), sizes[at], prod(sizes[at + 1 :])]
    moved = _reorder(source, in_four, [0, 2, 1, 3], number)
    now = [*range(to), at, *range(to, at), *range(at + 1, len(sizes))]
    return moved, *_join_adjacent([sizes[axis] for axis in now], [now.index(a) for a in order])


def _reorder(source: Node, sizes: Sizes, order: Sizes, number: int) -> Node:
    folded = _reshape(source, sizes, number)
    if order == sorted(order):
        return folded
    return folded.graph.call_function(aten.permute.default, (folded, order))


def _expanded(node: Node, number: int) -> Node:
    source, sizes = arguments(node)["self"], shape(node)
    (before,), after = _merge_axes(sizes, [shape(source)])
    _check(len(after), number)
    return node.graph.call_function(aten.expand.default, (_reshape(source, before, number), after))


def _along_one_axis(node: Node, number: int) -> Node:
    """Fold to (before, n, after), and apply the operator along the middle axis."""
    args = arguments(node)
    axes = args["dim"] if isinstance(args["dim"], list | tuple) else [args["dim"]]
    if len(axes) != 1 or axes[0] is None:  # None and [] mean all axes
        many = len(axes) if len(axes) > 1 else "all"
        raise _RankError(
            f"rank {_rank(args['self'])}; folding {node.target} over {many} axes is not supported"
        )
    args["dim"] = [1] if isinstance(args["dim"], list | tuple) else 1
    args["self"] = _fold_around(args["self"], axes[0], number)
    schema = node.target._schema  # type: ignore[union-attr]  # an OpOverload: it is among `_ALONG`
    named = {a.name: args.pop(a.name) for a in schema.arguments if a.kwarg_only}
    return node.graph.call_function(node.target, tuple(args.values()), named)  # type: ignore[arg-type]


def _fold_around(source: Node, axis: int, number: int) -> Node:
    sizes = shape(source)
    axis %= len(sizes)
    return _reshape(source, [prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :])], number)


def _concatenated(node: Node, number: int) -> Node:
    args = arguments(node)
    pieces = [_fold_around(piece, args["dim"], number) for piece in args["tensors"]]
    return node.graph.call_function(aten.cat.default, (pieces, 1))


def _fold_pieces(node: Node, number: int) -> None:
    """Replace each piece that is used by a separate slice."""
    args = arguments(node)
    source, axis = args["self"], args["dim"]
    whole = _fold_around(source, axis, number)
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        length = 1 if node.target == aten.unbind.int else _piece(args, shape(source)[axis])
        sizes = args.get("split_sizes") or [length] * (index + 1)
        start = sum(sizes[:index])
        with node.graph.inserting_before(user):
            end = min(shape(source)[axis], start + sizes[index])
            _put(user, node.graph.call_function(aten.slice.Tensor, (whole, 1, start, end)))


def _piece(args: dict[str, Any], length: int) -> int:
    """Return the length of every piece except the last."""
    return int(args.get("split_size") or -(-length // args.get("chunks", 1)))


def _by_outer_axes(node: Node, number: int, inner: int, least: int = 0) -> Node:
    """Fold the broadcast axes, which are all except the last `inner` ones, where all operands agree.

    Args:
        least: minimum number of broadcast axes that the operator needs.
    """
    tensors = [tensor for tensor in node.all_input_nodes if _rank(tensor) > inner]
    outers = [shape(tensor)[: _rank(tensor) - inner] for tensor in tensors]
    folded, merged = _merge_axes(shape(node)[: _rank(node) - inner], outers)
    _check(max(len(merged), least) + inner, number)
    leading = [1] * (least - len(merged))
    new = {
        tensor: _reshape(
            tensor, [*leading, *outer, *shape(tensor)[_rank(tensor) - inner :]], number
        )
        for tensor, outer in zip(tensors, folded, strict=True)
    }
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda arg: new.get(arg, arg))
    return node.graph.call_function(node.target, *arguments)  # type: ignore[arg-type]


def _by_rows(node: Node, number: int, inner: int) -> Node:
    """Fold all axes except the last `inner` ones into one."""
    source = node.args[0]
    sizes = shape(source)  # type: ignore[arg-type]
    split = len(sizes) - inner
    _check(1 + inner, number)
    rows = _reshape(source, [prod(sizes[:split]), *sizes[split:]], number)
    return node.graph.call_function(node.target, (rows, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]


def _merge_axes(sizes: Sizes, operands: Sequence[Sizes]) -> tuple[list[Sizes], Sizes]:
    """Join adjacent axes that are broadcast by the same operands.

    Returns:
        The new shape of each operand, and the new shape that they broadcast to.
    """
    padded = [[1] * (len(sizes) - len(operand)) + operand for operand in operands]
    long = [axis for axis, size in enumerate(sizes) if size != 1]
    runs = [
        list(run)
        for _, run in groupby(long, key=lambda axis: [operand[axis] == 1 for operand in padded])
    ]
    return (
        [[prod(operand[axis] for axis in run) for run in runs] for operand in padded],
        [prod(sizes[axis] for axis in run) for run in runs],
    )


def _check(axes: int, number: int) -> None:
    if axes > number:
        raise _RankError(f"needs {axes} axes after folding; the limit is {number}")


_ALONG = frozenset(
    {
        *(aten.select.int, aten.slice.Tensor, aten.softmax.int, aten._softmax.default),
        *(aten.log_softmax.int, aten.mean.dim, aten.sum.dim_IntList, aten.amax.default),
        aten.cumsum.default,
    }
)
