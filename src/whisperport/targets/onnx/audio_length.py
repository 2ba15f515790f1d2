"""Let `encoder` and `cross_kv` read audio of any length up to their window.

    mel (1, n_mels, 2T) ─ Conv ─ Conv ─ Transpose ─ Add ─ … ─ features (1, T, d)
                                 positions (T, d) ─ Slice ─┘  the first rows of the table

The files have a window of one length, which other execution providers need. When ONNX Runtime's CPU loads
them, T becomes an axis of any size: a window of 5 s takes 0.12 of the time of 30 s, without a further file
and without further weights in memory.

That nothing else depends on T is shown, not assumed: the axis is followed from the input through every node
that reads it. A graph with another node, or with a constant of T values in another place than the table of
positions, stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from whisperport.targets.onnx.attention import DOMAIN
from whisperport.targets.onnx.graph import (
    INT_ATTRIBUTE,
    add_integers,
    forget,
    has_inner_graphs,
    integers,
)

OLDEST = 15  # opset in which Shape has `start` and `end`


class _Time(NamedTuple):
    """The size of an axis that follows from the length of the audio."""

    stated: int  # in the file
    per_position: int  # 2 for frames of 10 ms, 1 for positions of 20 ms


Size = int | _Time
Shape = tuple[Size, ...]
INPUTS = {"mel": (2, 2), "features": (1, 1)}  # name -> axis of time, its size per position


def free_audio(model: Any) -> dict[str, int]:
    """Let a graph read and return arrays for fewer positions of audio than its signature states.

    Args:
        model: a parsed ONNX model; it is changed if the result is not empty.

    Returns:
        Its inputs and outputs with an axis of time, which may be shorter now: name -> axis.
    """
    graph = model.graph
    opset = max((entry.version for entry in model.opset_import if not entry.domain), default=0)
    if opset < OLDEST or len(graph.input) != 1 or has_inner_graphs(model):
        return {}
    try:
        walk = _Walk(model)
        for index, node in enumerate(graph.node):
            walk.follow(index, node)
        ends = {value.name: walk.axis_of(value.name) for value in (*graph.input, *graph.output)}
    except _OtherFormError:
        return {}
    _change(model, walk)
    for value in (*graph.input, *graph.output):
        size = value.type.tensor_type.shape.dim[ends[value.name]]
        size.dim_value, size.dim_param = 0, f"{value.name}/time"
    forget(model, {name for name, shape in walk.shapes.items() if _is_timed(shape)})
    return ends


class _OtherFormError(Exception):
    """A graph is not known to be independent of the length of its audio."""


class _Walk:
    """Follows shapes from node to node.

    Attributes:
        shapes: tensor -> its shape, as far as it is known.
        reshapes: index of a node Reshape -> the sizes to read.
        tables: index of a node and of its input -> the tensor, and its axis, whose length a constant of T
            rows has to have.

    Raises:
        _OtherFormError: the input is not audio.
    """

    def __init__(self, model: Any) -> None:
        (value,) = model.graph.input
        shape = _stated(value)
        axis, per_position = INPUTS.get(value.name, (0, 0))
        if len(shape) != 3 or not per_position or shape[axis] % per_position or not min(shape) > 0:
            raise _OtherFormError
        time = _Time(shape[axis], per_position)
        self._positions = _Time(shape[axis] // per_position, 1)
        self.shapes: dict[str, Shape] = {t.name: tuple(t.dims) for t in model.graph.initializer}
        self.shapes[value.name] = (*shape[:axis], time, *shape[axis + 1 :])
        self.reshapes: dict[int, list[int]] = {}
        self.tables: dict[tuple[int, int], tuple[str, int]] = {}
        self._integers = integers(model)

    def follow(self, index: int, node: Any) -> None:
        """Add the shape of what a node computes.

        Raises:
            _OtherFormError: it reads audio in a way that is not known here.
        """
        shapes = [self.shapes.get(name, ()) for name in node.input]
        timed = any(map(_is_timed, shapes))
        if timed and (len(node.output) != 1 or any(name not in self.shapes for name in node.input)):
            raise _OtherFormError
        if timed and node.op_type == "Reshape":
            shape = self._reshaped(index, shapes[0], self._integers.get(node.input[1], []))
        elif timed and node.op_type in BROADCAST:
            shape = self._broadcast(index, node, shapes)
        elif timed:
            rule = RULES.get((node.domain, node.op_type))
            if rule is None:
                raise _OtherFormError
            shape = rule(shapes, _attributes(node))
        elif node.op_type in SAME and node.input[0] in self.shapes:
            shape = shapes[0]
        else:
            return  # made of constants; an error only where audio is read with it
        self.shapes[node.output[0]] = shape

    def axis_of(self, name: str) -> int:
        """Return the only axis of time of an input, or of an output that has a row per position.

        Raises:
            _OtherFormError: it has none, or several.
        """
        shape = self.shapes.get(name, ())
        axes = [axis for axis, size in enumerate(shape) if isinstance(size, _Time)]
        if len(axes) != 1 or (name not in INPUTS and shape[axes[0]] != self._positions):
            raise _OtherFormError
        return axes[0]

    def _reshaped(self, index: int, shape: Shape, sizes: Sequence[int]) -> Shape:
        """Return the shape after a Reshape that splits or joins other axes than that of time."""
        axes = [axis for axis, size in enumerate(shape) if isinstance(size, _Time)]
        if len(axes) != 1:
            raise _OtherFormError
        time = shape[axes[0]]
        before, after = _product(shape[: axes[0]]), _product(shape[axes[0] + 1 :])
        for axis, size in enumerate(sizes):
            leading, trailing = tuple(sizes[:axis]), tuple(sizes[axis + 1 :])
            kept = (_product(leading), _product(trailing)) == (before, after)
            if kept and min((*leading, *trailing, 1)) > 0 and size in (-1, _number(time)):
                self.reshapes[index] = [*leading, -1, *trailing]
                return (*leading, time, *trailing)
        raise _OtherFormError

    def _broadcast(self, index: int, node: Any, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of an elementwise operator; a table with a row per position is cut."""
        rank = max(map(len, shapes))
        result: list[Size] = []
        for axis in range(-rank, 0):
            sizes = [shape[axis] if len(shape) >= -axis else 1 for shape in shapes]
            timed = [i for i, size in enumerate(sizes) if isinstance(size, _Time)]
            for i, size in enumerate(sizes):
                if timed and i not in timed and size != 1:
                    source, is_table = timed[0], axis == -len(shapes[i])
                    if size != _number(sizes[source]) or not is_table or _is_timed(shapes[i]):
                        raise _OtherFormError
                    self.tables[index, i] = node.input[source], len(shapes[source]) + axis
            largest = {sizes[i] for i in timed} or set(sizes) - {1} or {1}
            if len(largest) > 1:
                raise _OtherFormError
            result += largest
        return tuple(result)


def _same(shapes: Sequence[Shape], _: Mapping[str, Any]) -> Shape:
    """An operator of single values; all further inputs are numbers."""
    if any(_product(shape) != 1 for shape in shapes[1:]):
        raise _OtherFormError
    return shapes[0]


def _normalized(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> Shape:
    """An operator along the last axis, whose further inputs have values for that axis."""
    last = len(shapes[0]) - 1
    if attributes.get("axis", -1) not in (-1, last) or any(map(_is_timed, shapes[1:])):
        raise _OtherFormError
    if any(len(shape) != 1 for shape in shapes[1:]):
        raise _OtherFormError
    return shapes[0]


def _convolved(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> Shape:
    """A convolution along time of which each step of its stride returns one frame."""
    image, kernel = shapes[0], shapes[1]
    if len(image) != 3 or not isinstance(image[2], _Time) or any(map(_is_timed, shapes[1:])):
        raise _OtherFormError
    time, stride = image[2], attributes.get("strides", [1])[0]
    spread = attributes.get("dilations", [1])[0] * (_number(kernel[2]) - 1)
    fits = sum(attributes.get("pads", [0, 0])) == spread
    if _is_timed(image[:2]) or not fits or time.per_position % stride or time.stated % stride:
        raise _OtherFormError
    return image[0], kernel[0], _Time(time.stated // stride, time.per_position // stride)


def _multiplied(shapes: Sequence[Shape], _: Mapping[str, Any]) -> Shape:
    """A matrix multiplication, which may sum over time if both have it."""
    (*batch_a, rows, inner_a), (*batch_b, inner_b, columns) = map(_matrix, shapes)
    longer, shorter = sorted((batch_a, batch_b), key=len, reverse=True)
    if inner_a != inner_b or _is_timed((*batch_a, *batch_b)):
        raise _OtherFormError
    if shorter and shorter != longer[len(longer) - len(shorter) :]:
        raise _OtherFormError
    return (*longer, rows, columns)


def _added(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> Shape:
    """A Gemm: a matrix multiplication of rows by a constant, and a bias."""
    (rows, inner), weight = _matrix(shapes[0])[-2:], shapes[1]
    bias, is_transposed = shapes[2:], attributes.get("transB")
    if attributes.get("transA") or len(shapes[0]) != 2 or any(map(_is_timed, (weight, *bias))):
        raise _OtherFormError
    depth, columns = reversed(weight) if is_transposed else weight
    if inner != depth or any(shape != (columns,) for shape in bias):
        raise _OtherFormError
    return rows, columns


def _multiplied_in_bits(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> Shape:
    """A matrix multiplication by a constant whose shape the attributes state."""
    *rows, inner = _matrix(shapes[0])
    if inner != attributes.get("K") or any(map(_is_timed, shapes[1:])):
        raise _OtherFormError
    return (*rows, attributes["N"])


def _transposed(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> Shape:
    order = attributes.get("perm", [*reversed(range(len(shapes[0])))])
    return tuple(shapes[0][axis] for axis in order)


def _attended(shapes: Sequence[Shape], _: Mapping[str, Any]) -> Shape:
    """The attention of `join_attention`: q (H, P, D), k (H, T, D), v (H, T, D)."""
    q, k, v = shapes
    if len(q) != 3 or q[0] != k[0] or q[2] != k[2] or k != v or _is_timed((q[0], q[2])):
        raise _OtherFormError
    return q


Rule = Callable[[Sequence[Shape], Mapping[str, Any]], Shape]
SAME = {"Cast", "Identity", "Gelu", "Erf", "Tanh", "QuantizeLinear", "DequantizeLinear"}
BROADCAST = {"Add", "Sub", "Mul", "Div"}
RULES: dict[tuple[str, str], Rule] = {
    **{("", name): _same for name in SAME},
    ("", "LayerNormalization"): _normalized,
    ("", "Softmax"): _normalized,
    ("", "Conv"): _convolved,
    ("", "MatMul"): _multiplied,
    ("", "Gemm"): _added,
    (DOMAIN, "MatMulNBits"): _multiplied_in_bits,
    ("", "Transpose"): _transposed,
    (DOMAIN, "MultiHeadAttention"): _attended,
}


def _change(model: Any, walk: _Walk) -> None:
    """Let sizes follow from the audio, and tables have as many rows as it."""
    graph = model.graph
    nodes = []
    for index, node in enumerate(graph.node):
        copy = type(node).FromString(node.SerializeToString())
        if index in walk.reshapes:
            copy.input[1] = add_integers(
                model, f"{node.output[0]}/audio_length", walk.reshapes[index]
            )
        for (user, position), (source, axis) in walk.tables.items():
            if user == index:
                copy.input[position], added = _cut(model, node.input[position], source, axis)
                nodes += added
        nodes.append(copy)
    del graph.node[:]
    graph.node.extend(nodes)


def _cut(model: Any, table: str, source: str, axis: int) -> tuple[str, list[Any]]:
    """Return the name of the first rows of a table, as many as a tensor has, and the nodes for it."""
    make = type(model.graph.node[0])
    first, rows, length = (f"{table}/{part}" for part in ("first", "rows", "length"))
    measuring = make(op_type="Shape", input=[source], output=[length])
    for name, number in (("start", axis), ("end", axis + 1)):
        measuring.attribute.add(name=name, i=number, type=INT_ATTRIBUTE)
    zero = add_integers(model, first, [0])
    return rows, [
        measuring,
        make(op_type="Slice", input=[table, zero, length, zero], output=[rows]),
    ]


def _attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a node that are numbers."""
    return {
        attribute.name: list(attribute.ints) or attribute.i or attribute.f
        for attribute in node.attribute
    }


def _matrix(shape: Shape) -> Shape:
    if len(shape) < 2:
        raise _OtherFormError
    return shape


def _number(size: Size) -> int:
    return size.stated if isinstance(size, _Time) else size


def _product(sizes: Sequence[Size]) -> int:
    product = 1
    for size in sizes:
        product *= _number(size)
    return product


def _is_timed(shape: Sequence[Size]) -> bool:
    return any(isinstance(size, _Time) for size in shape)


def _stated(value: Any) -> tuple[int, ...]:
    return tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
