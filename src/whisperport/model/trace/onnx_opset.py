"""Convert an ONNX graph of opset 20 to an older opset, down to 13, without a change of its results.

If opset 13 to 16 is requested, torch's exporter writes opset 18 and reports this only in a log. onnx's
version converter cannot convert LayerNormalization, Add or Div to an older opset. This module handles each
node in one of three ways:

    kept       the operator is the same in the older opset, or newer versions only added dtypes and
               attributes that the node does not use
    converted  the node is written with older operators (onnx_converters.py)
    rejected   the error names the operator and the opset that introduced the missing feature
"""

from typing import Any

import onnx.defs
import onnx.helper
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from whisperport.errors import LoweringError
from whisperport.model.trace.onnx_converters import CONVERTERS, ConversionError, NodeWriter

OLDEST, NEWEST = 13, 20
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

# Between opsets 13 and 20 these gained dtypes and attributes only. Source: onnx docs/Changelog.md.
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
    """Convert a model of opset 20 with static shapes to an older opset, in place.

    Args:
        program: name, for error messages.

    Raises:
        LoweringError: a node cannot be written in `opset`, or has an operator that is not ONNX's own.
    """
    rejected = [reason for node in list(model.graph) if (reason := _downgrade(node, opset))]
    if rejected:
        rest = f" (and {len(rejected) - 1} more)" if len(rejected) > 1 else ""
        raise LoweringError(
            f"`{program}` cannot be written as ONNX opset {opset}",
            why=rejected[0] + rest,
            hint="choose a newer opset, or write the program without this operator",
        )
    RemoveUnusedNodesPass()(model)  # such as constants of axes that became an attribute
    model.opset_imports.clear()
    model.opset_imports[""] = opset
    model.ir_version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])


def _downgrade(node: ir.Node, opset: int) -> str:
    """Keep or convert one node; return an empty string, or the reason why this is not possible."""
    if node.domain:
        return f"`{node.op_type}` belongs to the custom operator set `{node.domain}`"
    if any(a.type in _GRAPHS for a in node.attributes.values()):
        return f"`{node.op_type}` contains a subgraph, which cannot be converted"
    new = onnx.defs.get_schema(node.op_type, NEWEST, "")
    old = _schema(node.op_type, opset)
    if old is not None and old.since_version == new.since_version:
        return ""
    missing = f"`{node.op_type}` is new in opset {_introduced(node.op_type)}"
    if old is not None:
        missing = _missing_feature(node, old, new)
        if not missing:
            _drop_defaults(node, old)
            return ""
    converter = CONVERTERS.get(node.op_type)
    if converter is None:
        return missing
    writer = NodeWriter(node)
    try:
        result = converter(writer)
    except ConversionError as error:
        return f"{missing}, and {error}"
    writer.replace_by(result)
    return ""


def _schema(operator: str, opset: int) -> Any:
    try:
        return onnx.defs.get_schema(operator, opset, "")
    except onnx.defs.SchemaError:
        return None


def _introduced(operator: str) -> int:
    """Return the first opset that has the operator."""
    return next(n for n in range(OLDEST, NEWEST + 1) if _schema(operator, n) is not None)


def _missing_feature(node: ir.Node, old: Any, new: Any) -> str:
    """Return what the older version of the operator does not have for this node; empty if it has all."""
    operator = f"`{node.op_type}` of opset {new.since_version}"
    if node.op_type not in _WIDENED:
        return f"{operator} differs from that of opset {old.since_version}"
    if len(node.inputs) > old.max_input:
        return f"{operator} has an input that opset {old.since_version} does not have"
    for name, attribute in node.attributes.items():
        if name not in old.attributes and not _is_default(attribute, new.attributes[name]):
            return f"{operator} has the attribute `{name}`, which opset {old.since_version} does not have"
    for index, value in enumerate(node.inputs):
        types = old.inputs[min(index, len(old.inputs) - 1)].types
        if value is not None and value.type is not None and _type_name(value) not in types:
            return (
                f"{operator} supports {_type_name(value)}, "
                f"which opset {old.since_version} does not support"
            )
    return ""


def _type_name(value: ir.Value) -> str:
    assert value.dtype is not None
    return f"tensor({value.dtype.name.lower()})"


def _is_default(attribute: ir.Attr, schema: Any) -> bool:
    default = onnx.helper.get_attribute_value(schema.default_value)
    value = attribute.value
    return bool((value.encode() if isinstance(value, str) else value) == default)


def _drop_defaults(node: ir.Node, old: Any) -> None:
    for name in [name for name in node.attributes if name not in old.attributes]:
        node.attributes.pop(name)
