"""Do without tensors of more than 4 axes: fold the axes that a node keeps together, and unfold behind it.

    before   x(1,T,3d) ─ view (1,T,3,H,D) ─ permute (3,1,H,T,D) ─ select ─────────────► q(1,H,T,D)
    after    x(1,T,3d) ─ reshape (T,3,H,D) ─ permute (3,H,T,D) ─ reshape (1,3,HTD) ─ select ─ reshape ─► q

Why: most neural processors have four registers for sizes. Queries, keys and values out of one product,
keys repeated for several heads, and windows of an image make tensors of rank 5 and 6, most often with
a batch of 1. As `fold-axes=N` for another highest rank.
Exact: the same numbers in the same order; axes are only counted otherwise.
"""

from collections.abc import Sequence
from itertools import groupby
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import arguments, aten, replace, shape
from whisperport.spec import Rejection

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
    """A node needs more axes than there may be; says how many."""


@rewrite("fold-axes", exact=True, number=4)
def fold_axes(module: GraphModule, number: int) -> tuple[list[str], list[Rejection]]:
    """Fold around every node of a higher rank; decline operators whose axes are not known here."""
    changed: list[str] = []
    rejected: dict[str, str] = {}
    for node in [n for n in module.graph.nodes if n.op == "call_function"]:
        if node.target is getitem:
            continue  # of the pieces of a node that was folded, or refused
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
    return changed, [*_left(module, number, rejected)]


def _left(module: GraphModule, number: int, rejected: dict[str, str]) -> list[Rejection]:
    """What still has too many axes: inputs, outputs, and nodes that were not folded."""
    reasons = []
    for node in module.graph.nodes:
        if node.name in rejected:
            reasons.append(Rejection(node.name, rejected[node.name]))
        elif node.op == "placeholder" and _rank(node) > number:
            reasons.append(Rejection(node.name, f"an input of rank {_rank(node)}, above {number}"))
        elif node.op == "output":
            reasons += [
                Rejection(given.name, f"an output of rank {_rank(given)}, above {number}")
                for given in node.all_input_nodes
                if _rank(given) > number and given.op != "placeholder"
            ]
    return reasons


def _fold(node: Node, number: int) -> None:
    """Put the folded form of one node in its place."""
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
        _put(node, _joined(node, number))
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
            f"rank {max(map(_rank, (node, *node.all_input_nodes)))}; {target} is not folded"
        )


def _is_elementwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target.overloadpacket is aten.where
    )


def _put(node: Node, folded: Node) -> None:
    replace(node, node.graph.call_function(aten.reshape.default, (folded, shape(node))))


def _reshape(source: Any, sizes: Sequence[int], number: int) -> Node:
    """`source` in another shape; a reshape of too high a rank before it is passed over."""
    found = source if _rank(source) <= number else _origin(source, number)
    return found.graph.call_function(aten.reshape.default, (found, list(sizes)))


def _origin(node: Node, number: int) -> Node:
    """What a chain of reshapes of too high a rank begins with."""
    while node.target in RESHAPES:
        before = node.args[0]
        assert isinstance(before, Node)
        node = before
        if _rank(node) <= number:
            break
    return node


def _rank(node: Any) -> int:
    """0 for what is no tensor."""
    recorded = node.meta.get("val") if isinstance(node, Node) else None
    return recorded.dim() if isinstance(recorded, Tensor) else 0


def _permuted(node: Node, number: int) -> Node:
    """Axes of length 1 do not count, and axes that stay neighbours move as one."""
    given = arguments(node)
    source, sizes = given["self"], shape(given["self"])
    order = [axis % len(sizes) for axis in given.get("dims", range(len(sizes)))]
    if node.target == aten.transpose.int:
        first, second = given["dim0"] % len(sizes), given["dim1"] % len(sizes)
        order[first], order[second] = second, first
    sizes, order = _neighbours_joined(sizes, order)
    while len(sizes) > number:
        source, sizes, order = _first_moved(source, sizes, order, number)
    return _reordered(source, sizes, order, number)


def _neighbours_joined(sizes: Sizes, order: Sizes) -> tuple[Sizes, Sizes]:
    long = [axis for axis in range(len(sizes)) if sizes[axis] != 1]
    places = [long.index(axis) for axis in order if axis in long]
    runs = [
        [place for _, place in run]
        for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    ]
    ordered = sorted(runs)
    joined = [prod(sizes[long[place]] for place in run) for run in ordered]
    return joined, [ordered.index(run) for run in runs]


def _first_moved(
    source: Node, sizes: Sizes, order: Sizes, number: int
) -> tuple[Node, Sizes, Sizes]:
    """Move one axis to its place, and see how many are left to move."""
    _check(4, number)
    to = next(place for place, axis in enumerate(order) if place != axis)
    at = order[to]
    in_four = [prod(sizes[:to]), prod(sizes[to:at]), sizes[at], prod(sizes[at + 1 :])]
    moved = _reordered(source, in_four, [0, 2, 1, 3], number)
    now = [*range(to), at, *range(to, at), *range(at + 1, len(sizes))]
    return moved, *_neighbours_joined([sizes[axis] for axis in now], [now.index(a) for a in order])


def _reordered(source: Node, sizes: Sizes, order: Sizes, number: int) -> Node:
    folded = _reshape(source, sizes, number)
    if order == sorted(order):
        return folded
    return folded.graph.call_function(aten.permute.default, (folded, order))


def _expanded(node: Node, number: int) -> Node:
    source, sizes = arguments(node)["self"], shape(node)
    (before,), after = _together(sizes, [shape(source)])
    _check(len(after), number)
    return node.graph.call_function(aten.expand.default, (_reshape(source, before, number), after))


def _along_one_axis(node: Node, number: int) -> Node:
    """(before, n, after), along the middle."""
    given = arguments(node)
    axes = given["dim"] if isinstance(given["dim"], list | tuple) else [given["dim"]]
    if len(axes) != 1 or axes[0] is None:  # None and [] stand for all
        many = len(axes) if len(axes) > 1 else "all"
        raise _RankError(
            f"rank {_rank(given['self'])}; {node.target} over {many} axes is not folded"
        )
    given["dim"] = [1] if isinstance(given["dim"], list | tuple) else 1
    given["self"] = _in_three(given["self"], axes[0], number)
    schema = node.target._schema  # type: ignore[union-attr]  # an OpOverload: it is among `_ALONG`
    named = {a.name: given.pop(a.name) for a in schema.arguments if a.kwarg_only}
    return node.graph.call_function(node.target, tuple(given.values()), named)  # type: ignore[arg-type]


def _in_three(source: Node, axis: int, number: int) -> Node:
    sizes = shape(source)
    axis %= len(sizes)
    return _reshape(source, [prod(sizes[:axis]), sizes[axis], prod(sizes[axis + 1 :])], number)


def _joined(node: Node, number: int) -> Node:
    given = arguments(node)
    pieces = [_in_three(piece, given["dim"], number) for piece in given["tensors"]]
    return node.graph.call_function(aten.cat.default, (pieces, 1))


def _fold_pieces(node: Node, number: int) -> None:
    """Each piece that is used as a select or slice of its own."""
    given = arguments(node)
    source, axis = given["self"], given["dim"]
    whole = _in_three(source, axis, number)
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        length = 1 if node.target == aten.unbind.int else _piece(given, shape(source)[axis])
        sizes = given.get("split_sizes") or [length] * (index + 1)
        start = sum(sizes[:index])
        with node.graph.inserting_before(user):
            end = min(shape(source)[axis], start + sizes[index])
            _put(user, node.graph.call_function(aten.slice.Tensor, (whole, 1, start, end)))


def _piece(given: dict[str, Any], length: int) -> int:
    """The length of every piece but the last."""
    return int(given.get("split_size") or -(-length // given.get("chunks", 1)))


def _by_outer_axes(node: Node, number: int, inner: int, least: int = 0) -> Node:
    """Axes but the last `inner` ones, which broadcast, folded where all operands treat them alike."""
    tensors = [given for given in node.all_input_nodes if _rank(given) > inner]
    outers = [shape(given)[: _rank(given) - inner] for given in tensors]
    folded, together = _together(shape(node)[: _rank(node) - inner], outers)
    _check(max(len(together), least) + inner, number)
    ones = [1] * (least - len(together))
    new = {
        given: _reshape(given, [*ones, *outer, *shape(given)[_rank(given) - inner :]], number)
        for given, outer in zip(tensors, folded, strict=True)
    }
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda given: new.get(given, given))
    return node.graph.call_function(node.target, *arguments)  # type: ignore[arg-type]


def _by_rows(node: Node, number: int, inner: int) -> Node:
    """All axes but the last `inner` ones as one."""
    source = node.args[0]
    sizes = shape(source)  # type: ignore[arg-type]
    split = len(sizes) - inner
    _check(1 + inner, number)
    rows = _reshape(source, [prod(sizes[:split]), *sizes[split:]], number)
    return node.graph.call_function(node.target, (rows, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]


def _together(sizes: Sizes, operands: Sequence[Sizes]) -> tuple[list[Sizes], Sizes]:
    """Shapes of operands, and what they broadcast to, with axes joined that all operands treat alike."""
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
        raise _RankError(f"it needs {axes} axes, even folded; {number} are the most")


_ALONG = frozenset(
    {
        *(aten.select.int, aten.slice.Tensor, aten.softmax.int, aten._softmax.default),
        *(aten.log_softmax.int, aten.mean.dim, aten.sum.dim_IntList, aten.amax.default),
        aten.cumsum.default,
    }
)
