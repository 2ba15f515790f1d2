"""Let the decode programs read caches with room for fewer tokens than their signatures state.

    q ─ MatMul, self_k (H, D, N) ─┐                                   ┌ Slice ─ MatMul, self_v (H, N, D)
                                  Concat ─ (Reshape) ─ Add, mask ─ Softmax ─ (Reshape)
    q ─ MatMul, new_k (H, D, P) ──┘                                   └ Slice ─ MatMul, new_v (H, P, D)

A text rarely has as many tokens as the cache has room for, N = 448. A step with a full cache multiplies by
all of its rows, and the mask hides most of them. Here N becomes an axis of any size in a graph for ONNX
Runtime. The stored file keeps its static shapes, which other tools need.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from whisperport.targets.onnx.graph import (
    add_integers,
    forget,
    has_inner_graphs,
    integers,
    stated_shapes,
    uses_of,
)

LENGTH, LENGTH_AND_NEW = "N", "N_and_new"  # names of axes
LONGEST = 7  # nodes from the keys to the probabilities, and one more
MASK, KEYS, VALUES = "mask", "self_k_", "self_v_"


def free_cache_length(model: Any) -> bool:
    """Give the axes of N tokens, and of N + P tokens, any size.

    Args:
        model: a parsed ONNX model, which is changed if the result is True.

    Returns:
        Whether every cache of the graph is read as above, so that this is possible.
    """
    graph = _Graph.of(model)
    layers = [name.removeprefix(KEYS) for name in graph.inputs if name.startswith(KEYS)]
    found = [graph.attention(layer) for layer in layers]
    attentions = [one for one in found if one is not None]
    if not layers or len(attentions) < len(layers) or graph.uses[MASK] != len(layers):
        return False
    _free_inputs(model)
    for attention in attentions:
        attention.free(model, graph)
    inner = frozenset[str]().union(*(attention.inner for attention in attentions))
    forget(model, inner)
    return True


@dataclass(frozen=True, slots=True)
class _Attention:
    """The nodes of one self-attention that depend on N."""

    reshapes: Sequence[Any]
    cached: Any  # Slice of the probabilities of the cached tokens
    new: Any  # Slice of those of the new tokens
    inner: frozenset[str]  # tensors with an axis that depends on N

    def free(self, model: Any, graph: "_Graph") -> None:
        """Remove every constant that depends on N."""
        end = add_integers(model, f"{self.cached.output[0]}/end", [graph.length - graph.width])
        self.cached.input[2] = self.new.input[1] = end
        for node in self.reshapes:
            sizes = [*graph.shapes[node.output[0]][:-1], -1]
            node.input[1] = add_integers(model, f"{node.output[0]}/free_shape", sizes)


@dataclass(frozen=True, slots=True)
class _Graph:
    """What is looked up in a graph."""

    users: Mapping[str, Sequence[Any]]  # nodes that read a tensor
    uses: Counter[str]
    constants: Mapping[str, Sequence[int]]  # small integer initializers
    shapes: Mapping[str, tuple[int, ...]]
    inputs: Sequence[str]
    length: int  # N
    width: int  # N + P

    @classmethod
    def of(cls, model: Any) -> "_Graph":
        users: dict[str, list[Any]] = {}
        for node in model.graph.node:
            for name in dict.fromkeys(node.input):
                users.setdefault(name, []).append(node)
        if has_inner_graphs(model):
            users = {}
        inputs = [value.name for value in model.graph.input]
        names = {*inputs, *(name for node in model.graph.node for name in node.output)}
        shapes = stated_shapes(model, names)
        length = next(
            (max(shapes[name][2:], default=0) for name in inputs if name.startswith(KEYS)), 0
        )
        mask = shapes.get(MASK, ())
        width = mask[2] if len(mask) == 3 else 0
        return cls(users, uses_of(model), integers(model), shapes, inputs, length, width)

    def attention(self, layer: str) -> _Attention | None:
        """Return the nodes of a layer's self-attention; None if they have another form."""
        chain = list(islice(self._chain(KEYS + layer), LONGEST))
        kinds = [node.op_type for node in chain]
        core = [kind for kind in kinds if kind != "Reshape"]
        if core != ["MatMul", "Concat", "Add", "Softmax"] or not self._has_mask(chain):
            return None
        slices = self.users.get(chain[-1].output[0], ())
        values = self.users.get(VALUES + layer, ())
        inner = frozenset(name for node in (*chain, *slices) for name in node.output)
        forms = [(one.op_type, len(one.input), len(one.output)) for one in (*slices, *values)]
        if forms != [("Slice", 5, 1), ("Slice", 5, 1), ("MatMul", 2, 1)]:
            return None
        cached, new = sorted(slices, key=lambda node: list(self.constants.get(node.input[1], [0])))
        if (
            not self._is_slice(cached, 0, self.length)
            or not self._is_slice(new, self.length, None)
            or list(values[0].input) != [cached.output[0], VALUES + layer]
            or [self.uses[node.output[0]] for node in (chain[-1], cached)] != [len(slices), 1]
            or self.shapes.get(VALUES + layer, ())[1:2] != (self.length,)
            or self.shapes.get(KEYS + layer, ())[2:] != (self.length,)
        ):
            return None
        reshapes = [node for node in chain if node.op_type == "Reshape"]
        shapes = [self.shapes.get(node.output[0], ()) for node in reshapes]
        if any(len(node.input) != 2 for node in reshapes) or any(
            len(shape) != 3 or 0 in shape or shape[2] != self.width for shape in shapes
        ):
            return None
        return _Attention(reshapes, cached, new, inner)

    def _chain(self, name: str) -> Iterator[Any]:
        """Yield the nodes from the keys to the probabilities; each but the last has one reader."""
        while len(users := self.users.get(name, ())) == 1 and self.uses[name] == 1:
            if len(users[0].output) != 1:
                return
            yield users[0]
            name = users[0].output[0]

    def _has_mask(self, chain: Sequence[Any]) -> bool:
        """Whether the nodes have the axes and inputs of an attention with the graph's mask."""
        nodes = {node.op_type: node for node in chain}
        concat, add, softmax = nodes["Concat"], nodes["Add"], nodes["Softmax"]
        axes = [(a.name, a.i) for node in (concat, softmax) for a in node.attribute]
        return (
            axes == [("axis", -1)] * 2
            and len(concat.input) == 2
            and concat.input[0] == chain[0].output[0]
            and MASK in add.input
            and self.width > self.length > 0
        )

    def _is_slice(self, node: Any, start: int, end: int | None) -> bool:
        """Whether a node takes `start` to `end` of the last axis; None: to the end of the axis."""
        starts, ends, axes, steps = (self.constants.get(name) for name in node.input[1:])
        if starts != [start] or axes not in ([2], [-1]) or steps != [1] or not ends:
            return False
        return ends == [end] if end else ends[0] >= self.width


def cache_axes(names: Iterable[str]) -> dict[str, int]:
    """Return the axis of N, or of N + P, tokens of those of some inputs that have one."""
    axes = {KEYS: 2, VALUES: 1, MASK: 2}
    return {name: axis for name in names for start, axis in axes.items() if name.startswith(start)}


def _free_inputs(model: Any) -> None:
    """Name the axes of N and of N + P tokens in the inputs, in place of their sizes."""
    axes = cache_axes(value.name for value in model.graph.input)
    for value in model.graph.input:
        if value.name in axes:
            size = value.type.tensor_type.shape.dim[axes[value.name]]
            size.dim_value, size.dim_param = 0, LENGTH_AND_NEW if value.name == MASK else LENGTH
