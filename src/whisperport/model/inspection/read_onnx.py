"""Read the graph of an `.onnx` file: with inferred shapes, without weights.

The subgraphs of If, Loop and Scan are not read, except for custom operators in them, which become separate
nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from whisperport.errors import ProgramError, needs
from whisperport.model.inspection.graph import (
    Graph,
    Node,
    Shape,
    Value,
    build,
    innermost_line,
    without_arguments,
)
from whisperport.model.inspection.protobuf_skeleton import BYTES, VARINT, Walk, skeleton, varint
from whisperport.model.inspection.vocabulary import ONNX

if TYPE_CHECKING:
    import onnx

POINTER = (
    b"version https://git-lfs"  # how the text begins that stands for a file which was not fetched
)
STACK_TRACE = "pkg.torch.onnx.stack_trace"  # key of a node's metadata, as torch 2.13 writes it
OWN_DOMAINS = frozenset({"", "ai.onnx"})
SOFTMAX_AXIS_OPSET = 13  # before this opset, Softmax flattened all axes from `axis` (default 1)

# What is read of a file: all but its large arrays, which are marked as stored elsewhere.
# Source: field numbers from onnx/onnx.proto, IR version 10 and later.
IS_EXTERNAL = bytes([14 << 3, 1])  # data_location: EXTERNAL; the data is not in the message
# float_, int32_, string_, int64_, raw_, double_ and uint64_data
TENSOR = Walk(arrays=frozenset({4, 5, 6, 7, 9, 10, 11}), skipped=IS_EXTERNAL)
ATTRIBUTE = Walk(inner={5: TENSOR})
NODE = Walk(inner={5: ATTRIBUTE})
GRAPH = Walk(inner={1: NODE, 5: TENSOR})
MODEL = Walk(inner={7: GRAPH})
MODEL_FIELDS = {1: VARINT, 5: VARINT, **dict.fromkeys((2, 3, 4, 6, 7, 8, 14, 20, 25), BYTES)}


def read_onnx(path: Path) -> Graph:
    """Read the graph of an ONNX model.

    Raises:
        ProgramError: the file is damaged or not an ONNX model, or its external data is missing.
        MissingPackageError: onnx is not installed.
    """
    model = read_skeleton(path)
    from whisperport.model.inspection.onnx_shapes import with_shapes

    if not model.graph.node or not model.opset_import:
        raise damaged(path, ValueError("the model has no nodes, or states no opset"))
    check_external_data(path, model)
    try:
        model = with_shapes(model)
    except Exception as error:  # onnx raises InferenceError, RuntimeError and others from C++
        raise damaged(path, error) from error
    try:
        return _graph(path.stem, model)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise damaged(path, error) from error


def read_skeleton(path: Path) -> "onnx.ModelProto":
    """Read an ONNX model without its large arrays.

    Raises:
        ProgramError: the file is damaged or not an ONNX model.
        MissingPackageError: onnx is not installed.
    """
    with needs("cannot read an ONNX file: the package onnx is not installed", extra="export"):
        import onnx
        from google.protobuf.message import DecodeError
    try:
        with path.open("rb") as file:
            return onnx.load_model_from_string(skeleton(file, path.stat().st_size, MODEL))
    except (ValueError, DecodeError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ProgramError:
    """Return the error of a file that is damaged, or is of another format."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            return ProgramError(
                f"{path.name} is a pointer of Git LFS, and not the file itself",
                hint="get the file with `git lfs pull`, or download it again",
            )
        file.seek(0)
        size = path.stat().st_size
        length = _stated_length(file, size)
        if length > size:
            return ProgramError(
                f"{path.name} is {'cut off' if size else 'empty'}",
                why=f"it has {size:,} bytes; its graph ends at byte {length:,}" if size else "",
                hint="download it again, or export the model again",
            )
    return ProgramError(
        f"{path.name} is damaged, or is not an ONNX model",
        why=f"{type(error).__name__}: {str(error).strip() or 'unreadable'}".split("\n")[0][:200],
        hint="export the model again",
    )


def _stated_length(file: BinaryIO, size: int) -> int:
    """Return at which byte a model in a file says that it ends, at least 1; 0: it is no model."""
    try:
        while file.tell() < size:
            _, tag = varint(file, size)
            if MODEL_FIELDS.get(tag >> 3) != tag & 7:
                return 0
            _, length = varint(file, size)
            file.seek(length if tag & 7 == BYTES else 0, 1)
    except ValueError:  # it ends inside a number
        return size + 1
    return file.tell() or 1


def check_external_data(path: Path, model: "onnx.ModelProto") -> None:
    """Check that every external data file is in the model's folder and long enough."""
    sizes: dict[str, int] = {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if any(isinstance(text, bytes) for text in (*entries, *entries.values())):
            raise damaged(path, ValueError("the place of a tensor's data is not UTF-8"))
        if "location" not in entries:
            continue
        name = entries["location"]
        if name not in sizes:
            sizes[name] = _external_size(path, name, tensor.name)
        end = _number(entries.get("offset", "0")) + _number(entries.get("length", "0"))
        if end > sizes[name]:
            raise ProgramError(
                f"the external data of {path.name} is incomplete",
                why=f"`{tensor.name}` ends at byte {end} of {name}, which has {sizes[name]} bytes",
                hint="copy the model and its external data again",
            )


def _external_size(path: Path, name: str, tensor: str) -> int:
    file = path.parent / name
    outside = Path(name).is_absolute() or ".." in Path(name).parts
    if outside or not _is_file(file):
        raise ProgramError(
            f"the external data of {path.name} is missing",
            why=f"the tensor `{tensor}` is stored in {name!r}, which is "
            + ("outside the model's folder" if outside else "not in the model's folder"),
            hint=f"put the external data into {path.parent}",
        )
    return file.stat().st_size


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long, or contains a zero byte
        return False


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _graph(name: str, model: "onnx.ModelProto") -> Graph:
    import onnx

    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    small: dict[str, Any] = {}
    values = {key: _stored_value(tensor) for key, tensor in stored.items()}
    values |= {
        sparse.values.name: _sparse_value(sparse) for sparse in model.graph.sparse_initializer
    }
    for info in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        values.setdefault(info.name, _value(info))
    for key, tensor in stored.items():
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            small[key] = tensor
    _check_names(model)
    _check_sources(model, stored)
    opset = next((o.version for o in model.opset_import if o.domain in OWN_DOMAINS), None)
    _check_inputs(model, opset)
    nodes = list(_nodes(model, opset or 0, values, small))
    inputs = [values[info.name] for info in model.graph.input if info.name not in stored]
    outputs = [values[info.name] for info in model.graph.output]
    return build(name, "onnx", nodes, inputs, outputs, opset)


def _check_names(model: "onnx.ModelProto") -> None:
    """Check that all names are UTF-8; protobuf returns other names as bytes."""
    for node in model.graph.node:
        for name in (node.op_type, node.domain, node.name, *node.input, *node.output):
            if not isinstance(name, str):
                raise ValueError(f"the name {name[:80]!r} is not UTF-8")


def _check_sources(model: "onnx.ModelProto", stored: Mapping[str, Any]) -> None:
    """Check that every tensor that is read or returned is an input, a constant or the output of a node."""
    sources = {value.name for value in model.graph.input} | set(stored) | {""}
    sources |= {sparse.values.name for sparse in model.graph.sparse_initializer}
    sources.update(name for node in model.graph.node for name in node.output)
    read = [name for node in model.graph.node for name in node.input]
    for name in (*read, *(value.name for value in model.graph.output)):
        if name not in sources:
            raise ValueError(f"no node, input or initializer provides the tensor `{name}`")


def _check_inputs(model: "onnx.ModelProto", opset: int | None) -> None:
    """Check that no node of ONNX's own operators lacks a required input."""
    from onnx.defs import OpSchema, SchemaError, get_schema, onnx_opset_version

    known = onnx_opset_version() if opset is None else opset
    required: dict[str, list[int]] = {}  # operator -> places of its inputs
    for node in model.graph.node:
        if node.domain not in OWN_DOMAINS:
            continue
        if node.op_type not in required:
            required[node.op_type] = []
            with suppress(SchemaError):  # the installed package does not know the operator
                for place, formal in enumerate(get_schema(node.op_type, known).inputs):
                    if formal.option == OpSchema.FormalParameterOption.Single:
                        required[node.op_type].append(place)
        for place in required[node.op_type]:
            if not any(node.input[place : place + 1]):
                raise ValueError(f"the operator {node.op_type} `{node.name}` lacks input {place}")


def _nodes(
    model: "onnx.ModelProto", opset: int, values: dict[str, Value], small: dict[str, Any]
) -> Iterator[Node]:
    from onnx import helper

    from whisperport.model.inspection.onnx_shapes import inner_nodes, outer_tensors

    names: set[str] = set()
    for index, node in enumerate(model.graph.node):
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.type}
        inputs = [values.get(n, Value(n)) if n else None for n in node.input]
        outputs = [values.get(n, Value(n)) for n in node.output if n]
        custom = node.domain not in OWN_DOMAINS
        op = f"{node.domain}.{node.op_type}" if custom else ONNX.get(node.op_type, node.op_type)
        arguments = _arguments(op, attributes, [small.get(n) for n in node.input], opset)
        if op == "gather" and _is_embedding(inputs, arguments):
            op = "embedding"
        name = node.name or f"{node.op_type}_{index}"
        name = f"{name}_{index}" if name in names else name  # ONNX allows equal names
        names.add(name)
        for place, inner in enumerate(inner_nodes(node)):
            if inner.domain not in OWN_DOMAINS:
                operator = f"{inner.domain}.{inner.op_type}"
                yield Node(f"{name}/{inner.name or place}", operator, operator, (), (), custom=True)
        captured = [values.get(n, Value(n)) for n in dict.fromkeys(outer_tensors(node))]
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        yield Node(
            name,
            op,
            f"{node.domain}.{node.op_type}" if custom else node.op_type,
            (*without_arguments(op, inputs), *captured),
            tuple(outputs),
            arguments,
            custom,
            module=scope(name, metadata.get("namespace", "")),
            source=innermost_line(metadata.get(STACK_TRACE, "")),
        )


def scope(name: str, namespace: str) -> str:
    """Return the path of the node's module, or the part of its name before the last slash.

    Args:
        name: of the node; the TorchScript exporter writes the scope into it: "/blocks.0/mlp/Gemm".
        namespace: as torch.onnx writes it: ": Decoder/blocks.0: Block/linear: aten.linear.default".
    """
    if namespace:
        return namespace.rpartition("/")[0].rpartition("/")[2].partition(":")[0]
    return name.rpartition("/")[0]


def _is_embedding(inputs: Sequence[Value | None], arguments: Mapping[str, Any]) -> bool:
    table = inputs[0] if inputs else None
    return bool(table and table.constant and len(table.shape or ()) == 2 and not arguments["dim"])


def _arguments(
    op: str, attributes: dict[str, Any], small: Sequence[Any], opset: int
) -> dict[str, Any]:
    """Return attributes with aten's names.

    Their values come from the node's attributes or, in later opsets, from its small constant inputs.
    """
    from onnx import numpy_helper

    def constant(place: int) -> Any:
        tensor = small[place] if place < len(small) else None
        return None if tensor is None else numpy_helper.to_array(tensor).tolist()

    if op in ("softmax", "log_softmax"):
        return {"dim": attributes.get("axis", -1 if opset >= SOFTMAX_AXIS_OPSET else 1)}
    if op in ("mean", "sum", "amax"):
        axes = attributes.get("axes", constant(1))
        return {"dim": axes, "keepdim": bool(attributes.get("keepdims", 1))}
    if op in ("unsqueeze", "squeeze"):
        return {"dim": attributes.get("axes", constant(1))}
    if op in ("gather", "cat", "split"):
        return {"dim": attributes.get("axis", 0)}
    if op == "slice":
        steps = constant(4)
        return {"step": max((abs(step) for step in steps), default=1) if steps else 1}
    if op == "pow":
        return {"exponent": constant(1)}
    if op == "gelu":
        return {"approximate": attributes.get("approximate", b"none").decode("utf-8", "replace")}
    if op == "linear":
        return {"transposed_left": bool(attributes.get("transA", 0))}
    if op == "conv":
        return {"groups": attributes.get("group", 1)}
    return {}


def _stored_value(tensor: "onnx.TensorProto") -> Value:
    if any(axis < 0 for axis in tensor.dims):
        raise ValueError(f"`{tensor.name}` has a negative axis in its shape {list(tensor.dims)}")
    return Value(tensor.name, tuple(tensor.dims), _dtype(tensor.data_type), constant=True)


def _sparse_value(sparse: "onnx.SparseTensorProto") -> Value:
    tensor = sparse.values
    return Value(tensor.name, tuple(sparse.dims), _dtype(tensor.data_type), constant=True)


def _value(info: "onnx.ValueInfoProto") -> Value:
    if info.type.WhichOneof("value") not in (None, "tensor_type"):  # a sequence, an optional, a map
        return Value(info.name, (), str(info.type.WhichOneof("value")).removesuffix("_type"))
    kind = info.type.tensor_type
    shape: Shape | None = None
    if kind.HasField("shape"):
        shape = tuple(
            axis.dim_value
            if axis.HasField("dim_value") and axis.dim_value >= 0
            else axis.dim_param or "?"
            for axis in kind.shape.dim
        )
    return Value(info.name, shape, _dtype(kind.elem_type))


def _dtype(number: int) -> str:
    """Return numpy's name of a dtype; for strings and 8-bit floats ONNX's name."""
    import onnx

    name = onnx.TensorProto.DataType.Name(number).lower() if number else ""
    return {"float": "float32", "double": "float64"}.get(name, name)
