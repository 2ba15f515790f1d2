"""Write the decode programs so that no constant depends on N, the tokens in the cache.

    q ─ MatMul, self_k (H, D, N) ─┐                                   ┌ Slice ─ MatMul, self_v (H, N, D)
                                  Concat ─ (Reshape) ─ Add, mask ─ Softmax ─ (Reshape)
    q ─ MatMul, new_k (H, D, P) ──┘                                   └ Slice ─ MatMul, new_v (H, P, D)

torch writes N = 448 into the slices, and N + P into the reshapes. Here the slices count from the end, and
the reshapes leave the size open. The file stays static, which compilers and most execution providers need.
Each axis of N or of N + P tokens has a denotation. ONNX Runtime's CPU makes these axes free when it loads
the graph, and then reads caches with room for fewer tokens.

That nothing else depends on N is shown, not assumed: the axes are followed from the inputs through every
node that reads them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from whisperport.program.bundle.onnx_graph import CACHED, CACHED_AND_NEW


class _Axis(NamedTuple):
    """The only axis of a tensor that depends on N."""

    position: int
    denotation: str


SCORES, VALUES, ALL_SCORES = _Axis(2, CACHED), _Axis(1, CACHED), _Axis(2, CACHED_AND_NEW)
INPUTS = {"self_k_": SCORES, "self_v_": VALUES, "mask": ALL_SCORES}  # start of a name -> axis
READS: dict[tuple[str, tuple[tuple[int, _Axis], ...]], _Axis | None] = {
    # operator, (index of an input, its axis), … -> axis of the output; None: it has none
    ("MatMul", ((1, SCORES),)): SCORES,
    ("Concat", ((0, SCORES),)): ALL_SCORES,
    ("Reshape", ((0, ALL_SCORES),)): ALL_SCORES,
    ("Add", ((0, ALL_SCORES), (1, ALL_SCORES))): ALL_SCORES,
    ("Softmax", ((0, ALL_SCORES),)): ALL_SCORES,
    ("Slice", ((0, ALL_SCORES),)): SCORES,  # or None, if it is of the P new tokens
    ("MatMul", ((0, SCORES), (1, VALUES))): None,  # a sum over N
}
INNER = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def free_cache_length(graph: ir.Graph) -> bool:
    """Let no constant depend on N, and give the axes that do a denotation.

    Args:
        graph: is changed if the result is True.

    Returns:
        Whether the graph has caches, and reads all of them as above.
    """
    try:
        walk = _Walk(graph.inputs)
        for node in graph:
            walk.follow(node)
    except _OtherFormError:
        return False
    if not walk.axes.keys().isdisjoint(graph.outputs):
        return False
    for (node, index), integers in walk.constants.items():
        _replace(graph, node, index, integers)
    for value, axis in walk.axes.items():
        assert value.shape is not None
        value.shape = value.shape.copy()  # several values may have one shape object
        value.shape.set_denotation(*axis)
    return True


class _OtherFormError(Exception):
    """An axis is read in a way that may depend on its size."""


class _Walk:
    """Follows the axes that depend on N from node to node.

    Attributes:
        axes: tensor -> its axis.
        constants: node and index of an input -> the integers to read there.

    Raises:
        _OtherFormError: the inputs have no such axes, or different sizes of them.
    """

    def __init__(self, inputs: Iterable[ir.Value]) -> None:
        self.axes: dict[ir.Value, _Axis] = {}
        self.constants: dict[tuple[ir.Node, int], Sequence[int]] = {}
        self._sizes: dict[str, int] = {}  # denotation -> size
        for value in inputs:
            for start, axis in INPUTS.items():
                if str(value.name).startswith(start):
                    self._add(value, axis)
        if len(self._sizes) < len({axis.denotation for axis in INPUTS.values()}):
            raise _OtherFormError

    def follow(self, node: ir.Node) -> None:
        """Add what a node computes.

        Raises:
            _OtherFormError: it reads an axis in another way than those above.
        """
        if any(attribute.type in INNER for attribute in node.attributes.values()):
            raise _OtherFormError  # an inner graph may read any tensor
        read = tuple((i, self.axes[x]) for i, x in enumerate(node.inputs) if x in self.axes)
        if not read:
            return
        if (node.op_type, read) not in READS or not _is_last(node.attributes.get("axis")):
            raise _OtherFormError
        axis, output = READS[node.op_type, read], node.outputs[0]
        if node.op_type == "Slice":
            axis = self._part(node)
        elif node.op_type == "Reshape":
            self.constants[node, 1] = [*_shape(output)[:2], -1]
        if axis is not None:
            self._add(output, axis)

    def _part(self, node: ir.Node) -> _Axis | None:
        """Return the axis of a slice of the cached tokens; None: it is one of the new tokens."""
        start, end, position, step = [*map(_integer, node.inputs[1:]), *[None] * 4][:4]
        cached, total = self._sizes[CACHED], self._sizes[CACHED_AND_NEW]
        if position not in (2, -1) or step != 1 or end is None:
            raise _OtherFormError
        if (start, end) == (0, cached):
            self.constants[node, 2] = [cached - total]
            return SCORES
        if start == cached and end >= total:
            self.constants[node, 1] = [cached - total]
            return None
        raise _OtherFormError

    def _add(self, value: ir.Value, axis: _Axis) -> None:
        size = _shape(value)[axis.position]
        if self._sizes.setdefault(axis.denotation, size) != size:
            raise _OtherFormError
        self.axes[value] = axis


def _shape(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of a tensor with three axes."""
    if value.shape is None or len(value.shape) != 3 or not value.shape.is_static():
        raise _OtherFormError
    return value.shape.numpy()


def _integer(value: ir.Value | None) -> int | None:
    """Return the only value of a constant."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return int(value.const_value.numpy().item())


def _is_last(axis: ir.Attr | None) -> bool:
    """Whether an operator's attribute `axis` is the last of three, as it is by default."""
    return axis is None or axis.value in (2, -1)


def _replace(graph: ir.Graph, node: ir.Node, index: int, integers: Sequence[int]) -> None:
    """Let a node read other integers; nodes that read the same ones have one constant."""
    former, name = node.inputs[index], f"cache_length/{'_'.join(map(str, integers))}"
    if name not in graph.initializers:
        array = np.array(integers, np.int64)
        graph.initializers[name] = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.INT64),
            const_value=ir.tensor(array, name=name),
        )
    node.replace_input_with(index, graph.initializers[name])
    if former is not None and not former.uses():
        graph.initializers.pop(str(former.name), None)
