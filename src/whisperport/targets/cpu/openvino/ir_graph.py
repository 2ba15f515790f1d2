"""The graph of an OpenVINO model in the form that the graphs of all formats have.

A state is a ReadValue, which computes its first value, and an Assign; both are custom operators here.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import ProgramError
from whisperport.targets.cpu.openvino.ir import DTYPES, HINT, IrGraph, IrNode, read_ir

if TYPE_CHECKING:  # the build layer needs torch
    from whisperport.model.inspection.graph import Graph, Shape, Value

OF_TORCH = re.compile("/(?:aten|prim)::")
READ, ASSIGN = "ReadValue", "Assign"
STATE = "state"  # domain of these two
NEW = ".new"  # after the name of a state: what is assigned to it
OPERATORS = {  # OpenVINO's name -> aten's
    **{
        name: name.lower() for name in ("Abs", "Add", "Cos", "CumSum", "Elu", "Erf", "Exp", "Floor")
    },
    **{name: name.lower() for name in ("Gather", "Gelu", "Log", "MatMul", "Maximum", "Minimum")},
    **{name: name.lower() for name in ("Relu", "Reshape", "Sigmoid", "Sin", "Slice", "SoftMax")},
    **{name: name.lower() for name in ("Softmax", "Split", "Sqrt", "Squeeze", "Tanh", "Transpose")},
    **dict.fromkeys(["Convolution", "GroupConvolution"], "conv"),
    **dict.fromkeys(["Convert", "ConvertLike"], "to"),
    "Broadcast": "expand",
    "Ceiling": "ceil",
    "Clamp": "clamp",
    "Concat": "cat",
    "Divide": "div",
    "Equal": "eq",
    "Greater": "gt",
    "GreaterEqual": "ge",
    "Less": "lt",
    "LessEqual": "le",
    "LogSoftmax": "log_softmax",
    "LogicalAnd": "logical_and",
    "LogicalNot": "logical_not",
    "LogicalOr": "logical_or",
    "Multiply": "mul",
    "Negative": "neg",
    "NotEqual": "ne",
    "Pad": "constant_pad_nd",
    "Power": "pow",
    "Range": "arange",
    "ReduceMax": "amax",
    "ReduceMean": "mean",
    "ReduceSum": "sum",
    "ScaledDotProductAttention": "scaled_dot_product_attention",
    "Select": "where",
    "ShapeOf": "shape",
    "SquaredDifference": "squared_difference",
    "StridedSlice": "slice",
    "Subtract": "sub",
    "Swish": "silu",
    "Tile": "repeat",
    "Unsqueeze": "unsqueeze",
    "VariadicSplit": "split",
}


def graph_of(name: str, ir: IrGraph) -> "Graph":
    """Return the graph of a model.

    Args:
        name: of the program.

    Raises:
        ProgramError: nodes depend on each other in a circle, or an attribute is no number.
    """
    from whisperport.model.inspection.graph import Node, build, without_arguments

    values = {(i, place): value for i, node in ir.nodes.items() for place, value in _values(node)}
    inputs, outputs, nodes = [], [], []
    names: set[str] = set()
    for index in _in_order(ir):
        node = ir.nodes[index]
        read = [values[source] for source in node.inputs]
        if node.type == "Parameter":
            inputs.append(values[index, 0])
        elif node.type == "Result":
            outputs += read
        elif node.type != "Const":
            custom = node.type in (READ, ASSIGN) or not node.opset.startswith("opset")
            domain = STATE if node.type in (READ, ASSIGN) else node.opset
            operator = f"{domain}.{node.type}" if custom else node.type
            op = operator if custom else OPERATORS.get(node.type, node.type)
            if op == "gather" and read and read[0].constant and len(read[0].shape or ()) == 2:
                op = "embedding"
            unique = node.name if node.name not in names else f"{node.name}_{index}"
            names.add(unique)
            results = [values[index, place] for place in range(len(node.sizes))]
            results = [] if node.type == ASSIGN else results
            nodes.append(
                Node(
                    unique,
                    op,
                    operator,
                    without_arguments(op, read),
                    tuple(results),
                    _arguments(op, node.attributes),
                    custom,
                    module=_module(node.name),
                )
            )
    return build(name, "ir", nodes, inputs, outputs)


def ports_of(ir: IrGraph) -> dict[str, tuple[str, int]]:
    """Return the values of a graph: name -> the node that computes it, and which of its outputs it is."""
    return {
        value.name: (node.name, place)
        for node in ir.nodes.values()
        for place, value in _values(node)
    }


def without_states(path: Path, folder: Path) -> Path:
    """Return a copy of a model in which each state is an input, and what is assigned to it is an output.

    Both are called as the state; its first value is not computed. The copy reads the same .bin file.

    Args:
        path: of the .xml file.
        folder: where the copy is written.

    Returns:
        The path of the copy; `path` itself if the model has no states.

    Raises:
        ProgramError: the file cannot be read, or is damaged.
    """
    ir = read_ir(path)  # allows no entities
    if not any(ir.of_type(READ)):
        return path
    tree = ET.parse(path)
    parts = {part.tag: part for part in tree.getroot()}
    layers = {layer.get("id"): layer for layer in parts["layers"]}
    sources = {edge.get("to-layer"): edge for edge in parts["edges"]}  # of nodes with one input
    for index, node in ir.of_type(READ, ASSIGN):
        layer, edge = layers[str(index)], sources[str(index)]
        is_input = node.type == READ
        for part in layer.findall("data") + layer.findall("input" if is_input else "output"):
            layer.remove(part)
        name = node.attributes.get("variable_id", "")
        layer.attrib |= {"type": "Parameter" if is_input else "Result", "version": "opset1"}
        if is_input:
            sizes = ("?" if size < 0 else str(size) for size in node.sizes[0])
            kind = node.precisions[0].lower().replace("fp", "f")
            layer.insert(0, ET.Element("data", {"shape": ",".join(sizes), "element_type": kind}))
            layer.set("name", name)
            layer.findall("output/port")[0].set("names", name)
            parts["edges"].remove(edge)
        else:
            ports = layers[edge.get("from-layer")].findall("output/port")
            port = next(port for port in ports if port.get("id") == edge.get("from-port"))
            port.set("names", ",".join(filter(None, (port.get("names"), name + NEW))))
    copy = folder / path.name
    tree.write(copy, encoding="utf-8", xml_declaration=True)
    copy.with_suffix(".bin").symlink_to(path.with_suffix(".bin").absolute())
    return copy


def _values(node: IrNode) -> Iterator[tuple[int, "Value"]]:
    """Yield the place and value of each output."""
    from whisperport.model.inspection.graph import Value

    for place, (sizes, precision) in enumerate(zip(node.sizes, node.precisions, strict=True)):
        # torch's front end numbers most tensors.
        own = f"{node.name}:{place}" if place else node.name
        name = max((n for n in node.tensors[place] if not n.isdigit()), key=len, default=own)
        kind = precision.lower().replace("fp", "f")
        dtype = {"boolean": "bool", "bool": "bool", "bf16": "bfloat16"}.get(
            kind, DTYPES.get(kind, kind)
        )
        shape: Shape = tuple(size if size >= 0 else "?" for size in sizes)
        yield place, Value(name, shape, dtype, constant=node.type == "Const")


def _in_order(ir: IrGraph) -> Iterator[int]:
    """Yield the nodes in the file's order, but each after those that compute its inputs.

    Raises:
        ProgramError: there is no such order.
    """
    waiting: dict[int, Iterator[tuple[int, int]]] = {}
    passed: set[int] = set()
    for first in ir.nodes:
        current = [] if first in passed else [first]
        while current:
            index = current[-1]
            sources = waiting.setdefault(index, iter(ir.nodes[index].inputs))
            source = next((i for i, _ in sources if i not in passed), None)
            if source is None:
                passed.add(current.pop())
                yield index
            elif source in waiting:
                raise _damaged(f"`{ir.nodes[source].name[:80]}` is computed from itself")
            else:
                current.append(source)


def _arguments(op: str, attributes: Mapping[str, str]) -> dict[str, Any]:
    """Return attributes with aten's names; those that are constants of the .bin file are not read."""
    if op in ("softmax", "log_softmax", "cat") and "axis" in attributes:
        try:
            return {"dim": int(attributes["axis"])}
        except ValueError as error:
            raise _damaged(f"an axis is {attributes['axis'][:40]!r}") from error
    if op == "matmul":
        return {"transposed_left": attributes.get("transpose_a") == "true"}
    if op == "gelu":
        form = attributes.get("approximation_mode", "erf").lower()
        return {"approximate": "none" if form == "erf" else form}
    return {}


def _damaged(why: str) -> ProgramError:
    return ProgramError("the OpenVINO model is damaged", why=why, hint=HINT)


def _module(name: str) -> str:
    """Return the path of a node's module, as torch's front end and the exporters of ONNX write it."""
    path, *operator = OF_TORCH.split(name, maxsplit=1)
    return path.removeprefix("__module.") if operator else path.rpartition("/")[0]
