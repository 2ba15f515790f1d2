"""Take an ONNX graph of opset 20 down to an older one, as far as 13, without changing what it computes.

torch's exporter writes opset 18 where 13 to 16 is asked for, and says so only in a log; onnx's own
version converter has no way down for LayerNormalization, Add or Div. Here each node is

    kept       its operator is the same in the older opset, or its newer versions only took more
               types and attributes, and the node needs none of these
    converted  it is spelled in older operators (onnx_converters.py)
    refused    by name, with the opset that introduced what it needs
"""

from typing import Any

import onnx.defs
import onnx.helper
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from whisperport.errors import LoweringError
from whisperport.programs.onnx_converters import CONVERTERS, CannotError, Scribe

OLDEST, NEWEST = 13, 20
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

# Between opsets 13 and 20 these gained types and attributes only. Source: onnx docs/Changelog.md.
_WIDENED = frozenset(
    {
        *("Add", "AveragePool", "BatchNormalization", "Cast", "CastLike", "Constant"),
        *("ConstantOfShape", "CumSum", "Div", "Equal", "GreaterOrEqual", "Identity", "IsInf"),
        *("IsNaN", "LeakyRelu", "LessOrEqual", "Mul", "PRelu", "Pad", "Pow", "ReduceMax"),
        *("ReduceMin", "Relu", "Reshape", "ScatterElements", "ScatterND", "Shape", "Size"),
        *("Sub", "Where"),
    }
)


def downgrade(model: ir.Model, opset: int, program: str) -> None:
    """Make `model`, of opset 20 and static shapes, one of `opset`, in place.

    Raises:
        LoweringError: a node has no equal in `opset`, or is of an operator set other than ONNX's.
    """
    refused = [reason for node in list(model.graph) if (reason := _downgrade(node, opset))]
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise LoweringError(
            f"`{program}` cannot be written as ONNX opset {opset}",
            why=refused[0] + more,
            hint="ask for a newer opset, or rewrite the program without this operator",
        )
    RemoveUnusedNodesPass()(model)  # such as the axes that became an attribute
    model.opset_imports.clear()
    model.opset_imports[""] = opset
    model.ir_version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])


def _downgrade(node: ir.Node, opset: int) -> str:
    """Keep or convert one node; else why not."""
    if node.domain:
        return f"`{node.op_type}` is of the operator set `{node.domain}`, which is not ONNX's own"
    if any(a.type in _GRAPHS for a in node.attributes.values()):
        return f"`{node.op_type}` holds a graph of its own"
    new = onnx.defs.get_schema(node.op_type, NEWEST, "")
    old = _schema(node.op_type, opset)
    if old is not None and old.since_version == new.since_version:
        return ""
    lacking = f"`{node.op_type}` is new in opset {_introduced(node.op_type)}"
    if old is not None:
        lacking = _lacking(node, old, new)
        if not lacking:
            _drop_defaults(node, old)
            return ""
    converter = CONVERTERS.get(node.op_type)
    if converter is None:
        return lacking
    scribe = Scribe(node)
    try:
        result = converter(scribe)
    except CannotError as error:
        return f"{lacking}, and {error}"
    scribe.replace_by(result)
    return ""


def _schema(operator: str, opset: int) -> Any:
    try:
        return onnx.defs.get_schema(operator, opset, "")
    except onnx.defs.SchemaError:
        return None


def _introduced(operator: str) -> int:
    """The first opset that has the operator."""
    return next(n for n in range(OLDEST, NEWEST + 1) if _schema(operator, n) is not None)


def _lacking(node: ir.Node, old: Any, new: Any) -> str:
    """What the older version of an operator lacks for this node; empty if nothing."""
    what = f"`{node.op_type}` as of opset {new.since_version}"
    if node.op_type not in _WIDENED:
        return f"{what} differs from that of opset {old.since_version}"
    if len(node.inputs) > old.max_input:
        return f"{what} takes an input that opset {old.since_version} lacks"
    for name, attribute in node.attributes.items():
        if name not in old.attributes and not _is_default(attribute, new.attributes[name]):
            return f"{what} has `{name}`, which opset {old.since_version} lacks"
    for index, value in enumerate(node.inputs):
        types = old.inputs[min(index, len(old.inputs) - 1)].types
        if value is not None and value.type is not None and _type_name(value) not in types:
            return f"{what} takes {_type_name(value)}, which opset {old.since_version} does not"
    return ""


def _type_name(value: ir.Value) -> str:
    assert value.dtype is not None
    return f"tensor({value.dtype.name.lower()})"


def _is_default(attribute: ir.Attr, schema: Any) -> bool:
    default = onnx.helper.get_attribute_value(schema.default_value)
    given = attribute.value
    return bool((given.encode() if isinstance(given, str) else given) == default)


def _drop_defaults(node: ir.Node, old: Any) -> None:
    for name in [name for name in node.attributes if name not in old.attributes]:
        node.attributes.pop(name)
