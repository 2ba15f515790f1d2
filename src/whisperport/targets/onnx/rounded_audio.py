"""Read the keys and values of the audio in 8 bits, where ONNX Runtime multiplies 8-bit integers.

    q (H, P, D) ─ MatMul ─ Softmax ─ MatMul ─ (H, P, D)      every number of both is read for each token:
       cross_k (H, D, T) ─┘   cross_v (H, T, D) ─┘           18 MB in Whisper tiny, 110 MB in small

In programs whose weights have 8 bits, these are most of the bytes that a token reads. Here both become
8-bit integers once per window: keys with a scale for each number of a head, values with one for each head.
Queries and probabilities are rounded in every run, with one scale for each head of a text. Softmax and all
sums between the multiplications stay in float32. The stored file and its signature keep float32, so that
any other program may compute the keys and values, and align reads them as they are.

Some CPUs add 8-bit multiplications in 16 bits, and lose large sums. ONNX Runtime therefore computes such a
sum first; where it is wrong, nothing is changed. So the form of the graph depends on the machine that loads
it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import numpy as np

from whisperport.program.bundle.onnx_graph import new_model
from whisperport.program.runner import Array, Part
from whisperport.program.spec import ProgramSpec
from whisperport.targets.onnx.graph import (
    FLOAT,
    INT8,
    INT32,
    INT_ATTRIBUTE,
    UINT8,
    add_integers,
    stated_shapes,
    uses_of,
)

KEYS, VALUES = "cross_k_", "cross_v_"
LEVELS, SCALE, OFFSET = "/levels", "/scale", "/offset"  # what is read in place of keys or values
MIDDLE = 128  # what is added to the levels of queries, which are stored without a sign
HIGHEST, HIGHEST_UNSIGNED = 127, 255
OLDEST = 18  # opset in which ReduceMax has its axes as an input

Session = Callable[[bytes], Any]
"""Makes a session of a model."""


def read_in_8_bits(model: Any, spec: ProgramSpec) -> tuple[str, ...]:
    """Let a graph read keys and values of the audio as 8-bit integers and scales.

    Args:
        model: a parsed ONNX model, which is changed if there are names in the result.
        spec: the program's signature.

    Returns:
        The inputs that are replaced; empty if the graph uses them in another way.
    """
    shapes = {t.name: t.shape for t in spec.inputs if t.name.startswith((KEYS, VALUES))}
    uses = uses_of(model)
    users = {name: node for node in model.graph.node for name in node.input if name in shapes}
    opset = max(
        (opset_id.version for opset_id in model.opset_import if not opset_id.domain), default=0
    )
    fits = stated_shapes(model, shapes) == shapes and opset >= OLDEST
    if not fits or not all(
        len(shape) == 3
        and uses[name] == 1
        and (users[name].op_type, users[name].input[1]) == ("MatMul", name)
        for name, shape in shapes.items()
    ):
        return ()
    graph = _Graph(model)
    nodes = [type(node).FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:]
    for node in nodes:
        name = node.input[1] if len(node.input) > 1 else ""
        if name not in shapes:
            model.graph.node.append(node)
        elif name.startswith(KEYS):
            _multiply_keys(graph, node.input[0], name, node.output[0])
        else:
            _multiply_values(graph, node.input[0], name, node.output[0])
    for index in reversed(range(len(model.graph.input))):
        if model.graph.input[index].name in shapes:
            del model.graph.input[index]
    for name, shape in shapes.items():
        graph.add_value(model.graph.input, name + LEVELS, INT8, shape)
        graph.add_value(model.graph.input, name + SCALE, FLOAT, (shape[0], 1, _scales(name, shape)))
        if name.startswith(KEYS):
            graph.add_value(model.graph.input, name + OFFSET, INT32, (shape[0], 1, shape[2]))
    return tuple(shapes)


def _scales(name: str, shape: Sequence[int]) -> int:
    """Return the number of scales of a head: D for keys (H, D, T), 1 for values."""
    return shape[1] if name.startswith(KEYS) else 1


def _multiply_keys(graph: "_Graph", q: str, name: str, scores: str) -> None:
    """Add nodes for scores (H, P, T) of queries (H, P, D) and rounded keys.

    What the middle of the queries adds to each sum is known before. With a zero point in its place, ONNX
    Runtime would copy all keys in the run of one token, in twice the time of the multiplication.
    """
    scaled = graph.add("Mul", q, name + SCALE)
    largest = graph.add("ReduceMax", graph.add("Abs", scaled), graph.axes(1, 2))
    step = graph.add("Mul", largest, graph.number(1 / HIGHEST))
    middle = graph.number(MIDDLE, np.uint8)
    levels = graph.add("QuantizeLinear", graph.add("Div", scaled, step), graph.number(1), middle)
    sums = graph.add("Sub", graph.add("MatMulInteger", levels, name + LEVELS), name + OFFSET)
    graph.add("Mul", graph.add("Cast", sums, to=FLOAT), step, into=scores)


def _multiply_values(graph: "_Graph", probabilities: str, name: str, output: str) -> None:
    """Add nodes for probabilities (H, P, T) times rounded values: (H, P, D)."""
    largest = graph.add("ReduceMax", probabilities, graph.axes(-1))
    part = graph.add("Div", probabilities, largest)
    zero = graph.number(0, np.uint8)
    levels = graph.add("QuantizeLinear", part, graph.number(1 / HIGHEST_UNSIGNED), zero)
    sums = graph.add("MatMulInteger", levels, name + LEVELS)
    unit = graph.add("Mul", largest, graph.number(1 / HIGHEST_UNSIGNED))
    scale = graph.add("Mul", unit, name + SCALE)
    graph.add("Mul", graph.add("Cast", sums, to=FLOAT), scale, into=output)


class Rounding:
    """Rounds keys and values to 8 bits; those that do not change are rounded once for all programs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sessions: dict[tuple[int, ...], Any] = {}
        self._known: dict[int, tuple[ref[Array], Mapping[str, Array]]] = {}

    def __call__(self, name: str, array: Array) -> Mapping[str, Array]:
        """Return levels and scales of keys or values that nobody changes, by the inputs that read them."""
        known = self._known.get(id(array))
        if known is None or known[0]() is not array:
            key = id(array)
            known = ref(array, lambda _: self._known.pop(key, None)), self.rounded(name, array)
            self._known[key] = known
        return known[1]

    def rounded(self, name: str, array: Array) -> Mapping[str, Array]:
        """Return levels and scales of an array, which may change afterwards."""
        heads, per_head = len(array), _scales(name, array.shape)
        rows = array.reshape(heads * per_head, -1)  # numbers with one scale; the same memory
        is_keys = name.startswith(KEYS)
        size = per_head * is_keys, rows.shape[1]
        if size not in self._sessions:
            self._sessions[size] = self._session(_rounding(*size).SerializeToString())
        outputs = ["levels", "scale", *["offset"][:is_keys]]
        levels, scale, *offset = self._sessions[size].run(outputs, {"rows": rows})
        rounded = {
            name + LEVELS: levels.reshape(array.shape),
            name + SCALE: scale.reshape(heads, 1, per_head),
        }
        return rounded | ({name + OFFSET: offset[0]} if offset else {})


def _rounding(per_head: int, size: int) -> Any:
    """Return a model that rounds rows of so many numbers, each with a scale of its own.

    With rows per head, those of keys, it also returns the sums that the middle of a query has; values: 0.
    """
    model = new_model(OLDEST)
    graph, inner = _Graph(model), model.graph
    graph.add_value(inner.input, "rows", FLOAT, (0, size))
    graph.add_value(inner.output, "levels", INT8, (0, size))
    graph.add_value(inner.output, "scale", FLOAT, (0,))
    high = graph.add("ReduceMax", "rows", graph.axes(1), keepdims=0)
    low = graph.add("Neg", graph.add("ReduceMin", "rows", graph.axes(1), keepdims=0))
    largest = graph.add("Max", high, low)
    graph.add("Mul", largest, graph.number(1 / HIGHEST), into="scale")
    zeros = graph.add("Cast", graph.add("Mul", largest, graph.number(0)), to=INT8)
    graph.add("QuantizeLinear", "rows", "scale", zeros, into="levels", axis=0)
    if per_head:
        graph.add_value(inner.output, "offset", INT32, (0, 1, size))
        keys = graph.add("Reshape", "levels", graph.axes(-1, per_head, size))
        middle = graph.add("Expand", graph.number(MIDDLE, np.uint8), graph.axes(1, per_head))
        graph.add("MatMulInteger", middle, keys, into="offset")
    return model


class RoundedState:
    """Rounded keys or values of a batch, of which parts change."""

    def __init__(self, rounding: Rounding, name: str, array: Array) -> None:
        self._rounding, self._name, self._array = rounding, name, array
        self.arrays = dict(rounding.rounded(name, array))

    def changed(self, part: Part) -> None:
        """Round the heads of a part again; only its first axis is used."""
        heads = part[:1]
        for name, array in self._rounding.rounded(self._name, self._array[heads]).items():
            self.arrays[name][heads] = array


def multiplies_exactly(session: Session) -> bool:
    """Return whether 8-bit multiplications are added without a loss on this machine."""
    model, columns = new_model(OLDEST), 48
    graph, inner = _Graph(model), model.graph
    graph.add_value(inner.input, "a", UINT8, (1, 0, 64))
    graph.add_value(inner.input, "b", INT8, (1, 64, columns))
    graph.add_value(inner.output, "sums", INT32, (1, 0, columns))
    graph.add("MatMulInteger", "a", "b", into="sums")
    runner = session(model.SerializeToString())
    signs = np.where(np.arange(columns) % 2, HIGHEST, -HIGHEST)
    b = np.full((1, 64, columns), signs, np.int8)
    for rows in (1, 4):
        a = np.full((1, rows, 64), HIGHEST_UNSIGNED, np.uint8)
        (sums,) = runner.run(None, {"a": a, "b": b})
        if not (sums == a.astype(np.int64) @ b.astype(np.int64)).all():
            return False
    return True


class _Graph:
    """Adds nodes, constants and inputs to a parsed model."""

    def __init__(self, model: Any) -> None:
        self._model, self._count = model, 0
        self._constants: dict[tuple[str, float], str] = {}

    def add(self, kind: str, *inputs: str, into: str | None = None, **attributes: int) -> str:
        """Add a node, and return the name of its output."""
        output = into or self._name()
        node = self._model.graph.node.add(op_type=kind, input=inputs, output=[output])
        for name, value in attributes.items():
            node.attribute.add(name=name, i=value, type=INT_ATTRIBUTE)
        return output

    def number(self, value: float, dtype: type[np.generic] = np.float32) -> str:
        """Return the name of a constant, which is added once."""
        key = dtype.__name__, value
        if key not in self._constants:
            self._constants[key] = self._name()
            kind = UINT8 if dtype is np.uint8 else FLOAT
            raw = np.array(value, dtype).tobytes()
            self._model.graph.initializer.add(
                name=self._constants[key], data_type=kind, raw_data=raw
            )
        return self._constants[key]

    def axes(self, *values: int) -> str:
        """Return the name of a row of integers."""
        return add_integers(self._model, self._name(), values)

    def add_value(self, values: Any, name: str, dtype: int, shape: Sequence[int]) -> None:
        """Add an input or an output; a size of 0 is any."""
        tensor = values.add(name=name).type.tensor_type
        tensor.elem_type = dtype
        for size in shape:
            tensor.shape.dim.add(**({"dim_value": size} if size else {"dim_param": "H"}))

    def _name(self) -> str:
        self._count += 1
        return f"rounded_audio/{self._count}"
