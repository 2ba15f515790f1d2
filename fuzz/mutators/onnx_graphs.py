"""Make hostile ONNX graphs that can be parsed: endless loops, huge constants, external data outside."""

from collections.abc import Callable
from random import Random
from typing import Any

import onnx
from onnx import TensorProto, helper

from fuzz.mutators import number, text

OPERATORS: tuple[str, ...] = (
    "Add",
    "MatMul",
    "Softmax",
    "Gather",
    "Reshape",
    "Loop",
    "If",
    "Scan",
    "Einsum",
    "Resize",
)
OPERATORS += (
    "Conv",
    "ConstantOfShape",
    "Expand",
    "Tile",
    "NonZero",
    "StringNormalizer",
    "Unknown",
    "",
)


def mutated(data: bytes, random: Random, outside: str) -> bytes:
    """Return a model with one or two changes that ONNX's library can write."""
    model = onnx.load_model_from_string(data)
    for _ in range(random.choice((1, 1, 2))):
        random.choice(CHANGES)(model, random, outside)
    return bytes(model.SerializeToString())


def _external(model: Any, random: Random, outside: str) -> None:
    """Store the data of a tensor in a file that does not belong to the model."""
    tensor = random.choice(list(model.graph.initializer) or [model.graph.initializer.add()])
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    entries = {
        "location": text(random, outside),
        "offset": str(number(random)),
        "length": str(number(random)),
    }
    for key in random.sample(list(entries), random.choice((1, 2, 3, 3))):
        tensor.external_data.add(key=key, value=entries[key].replace("\ud800", "?"))


def _endless(model: Any, random: Random, _: str) -> None:
    """Insert a loop that never ends before all other nodes."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["v", "v"], ["w"])],
        "body",
        [
            _info("n", TensorProto.INT64),
            _info("go", TensorProto.BOOL),
            _info("v", TensorProto.FLOAT),
        ],
        [_info("on", TensorProto.BOOL), _info("w", TensorProto.FLOAT)],
    )
    model.graph.initializer.append(helper.make_tensor("fuzz_most", TensorProto.INT64, [], [2**62]))
    model.graph.initializer.append(helper.make_tensor("fuzz_go", TensorProto.BOOL, [], [True]))
    model.graph.initializer.append(helper.make_tensor("fuzz_v", TensorProto.FLOAT, [], [1.0]))
    inputs = ["fuzz_most", "fuzz_go", "fuzz_v"]
    model.graph.node.insert(0, helper.make_node("Loop", inputs, ["fuzz_end"], body=body))
    _lead_to_output(model, "fuzz_end")


def _huge(model: Any, random: Random, _: str) -> None:
    """Insert a constant of several gigabytes, made from a shape of a few bytes."""
    size = random.choice((2 * 10**9, 20 * 10**9, 2**40, 2**62))
    model.graph.initializer.append(helper.make_tensor("fuzz_shape", TensorProto.INT64, [1], [size]))
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["fuzz_shape"], ["fuzz_big"]))
    model.graph.node.insert(
        1, helper.make_node("ReduceMax", ["fuzz_big"], ["fuzz_end"], keepdims=0)
    )
    _lead_to_output(model, "fuzz_end")


def _lead_to_output(model: Any, name: str) -> None:
    """Make the first output depend on a value, since the value would be optimized away otherwise."""
    output = model.graph.output[0].name
    for node in model.graph.node:
        for place, made in enumerate(node.output):
            if made == output:
                node.output[place] = "fuzz_before"
    model.graph.node.append(helper.make_node("Add", ["fuzz_before", name], [output]))


def _operator(model: Any, random: Random, outside: str) -> None:
    node = random.choice(model.graph.node)
    node.op_type = random.choice(OPERATORS)
    if random.random() < 0.2:
        node.domain = text(random, outside).replace("\ud800", "?")


def _attribute(model: Any, random: Random, outside: str) -> None:
    node = random.choice(model.graph.node)
    if not node.attribute:
        node.attribute.append(helper.make_attribute("axis", number(random) % 2**63))
        return
    attribute = random.choice(node.attribute)
    if random.random() < 0.5:
        attribute.i = max(-(2**63), min(2**63 - 1, number(random)))
    attribute.type = random.randrange(0, 15) if random.random() < 0.3 else attribute.type
    attribute.ints[:] = [max(-(2**63), min(2**63 - 1, number(random))) for _ in attribute.ints]


def _edge(model: Any, random: Random, _: str) -> None:
    """Change an input or output of a node; this may make cycles and repeated names."""
    node, other = random.choice(model.graph.node), random.choice(model.graph.node)
    names = [*other.input, *other.output, "nowhere", ""]
    side = node.input if random.random() < 0.7 else node.output
    if side:
        side[random.randrange(len(side))] = random.choice(names)


def _shape(model: Any, random: Random, _: str) -> None:
    """Change the type or shape of a tensor, an input or an output."""
    if random.random() < 0.5 and model.graph.initializer:
        tensor = random.choice(model.graph.initializer)
        tensor.dims[:] = [number(random) % 2**62 for _ in range(random.randrange(5))]
        return
    info = random.choice([*model.graph.input, *model.graph.output])
    kind = info.type.tensor_type
    kind.elem_type = random.randrange(0, 24) if random.random() < 0.4 else kind.elem_type
    for axis in kind.shape.dim:
        if random.random() < 0.5:
            axis.dim_value = number(random) % 2**62


def _function(model: Any, random: Random, _: str) -> None:
    """Add local functions that call themselves, or each other twice."""
    from onnx import FunctionProto

    count = random.choice((1, 40))
    for number_ in range(count):
        called = f"f{(number_ + 1) % count}" if random.random() < 0.3 else f"f{number_ + 1}"
        nodes = [helper.make_node(called, ["x"], [name], domain="fuzz") for name in ("a", "y")]
        function: FunctionProto = helper.make_function(
            "fuzz", f"f{number_}", ["x"], ["y"], nodes, [helper.make_opsetid("", 18)]
        )
        model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("fuzz", 1))
    first = model.graph.node[0]
    model.graph.node.append(helper.make_node("f0", [first.output[0]], ["fuzz_y"], domain="fuzz"))


def _opset(model: Any, random: Random, _: str) -> None:
    model.opset_import[0].version = number(random) % 2**62
    if random.random() < 0.3:
        model.ir_version = number(random) % 2**62


def _info(name: str, kind: int) -> Any:
    return helper.make_tensor_value_info(name, kind, [])


Change = Callable[[Any, Random, str], None]
CHANGES: tuple[Change, ...] = (
    *(_external, _external, _endless, _huge, _operator, _attribute),
    *(_edge, _shape, _function, _opset),
)
