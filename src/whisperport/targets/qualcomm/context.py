"""Read a compiled file: an ONNX file whose only node holds the vendor's context binary.

ONNX Runtime writes it and calls it an EP context model. The context binary's format is the vendor's own and
is not read here. The file is checked before it is loaded, because such a node may name any other file to
be read.

Source of the attributes: onnxruntime.ai, EP Context Design. Source of the field numbers: onnx/onnx.proto.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.protobuf import Field, message_class
from whisperport.system.regular_file import other_kind

PROVIDER = "QNNExecutionProvider"
OPERATOR, DOMAIN = "EPContext", "com.microsoft"
COMPATIBILITY = f"ep_compatibility_info.{PROVIDER}"
LARGEST = 2**31 - 1  # bytes; the size limit of a protobuf message
TYPES = {1: "float32", 6: "int32", 10: "float16"}  # TensorProto.DataType -> numpy's name
RECOMPILE = "compile the bundle again with `whisperport compile`"

# The fields that are read; protobuf skips all others.
SCHEMA: dict[str, tuple[Field, ...]] = {
    "Model": (
        ("graph", 7, "Graph"),
        ("metadata_props", 14, "[Property]"),
        ("training_info", 20, "[Other]"),
        ("functions", 25, "[Other]"),
    ),
    "Property": (("key", 1, "string"), ("value", 2, "string")),
    "Graph": (
        ("node", 1, "[Node]"),
        ("initializer", 5, "[Other]"),
        ("input", 11, "[Value]"),
        ("output", 12, "[Value]"),
        ("sparse_initializer", 15, "[Other]"),
    ),
    "Other": (),
    "Node": (
        ("input", 1, "[string]"),
        ("output", 2, "[string]"),
        ("op_type", 4, "string"),
        ("attribute", 5, "[Attribute]"),
        ("domain", 7, "string"),
    ),
    "Attribute": (("name", 1, "string"), ("i", 3, "int64"), ("s", 4, "bytes")),
    "Value": (("name", 1, "string"), ("type", 2, "Type")),
    "Type": (("tensor_type", 1, "Tensor"),),
    "Tensor": (("elem_type", 1, "int32"), ("shape", 2, "Shape")),
    "Shape": (("dim", 1, "[Dim]"),),
    "Dim": (("dim_value", 1, "int64"),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The description of a compiled file.

    Attributes:
        inputs: inputs of the program.
        outputs: outputs of the program.
        soc_model: the vendor's number of the chip; None: the file does not state it.
        architecture: generation of the HTP, such as 75; None: the file does not state it.
        compiler: version of the vendor's SDK, such as "2.51.0"; "": the file does not state it.
        context_bytes: size of the context binary.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    soc_model: int | None
    architecture: int | None
    compiler: str
    context_bytes: int


def read_context(path: Path) -> Context:
    """Read and check a compiled file.

    Raises:
        BundleError: it is damaged, has other nodes, or names another file.
    """
    model = _parsed(path)
    if model.functions or model.training_info:
        raise _error(path, "it contains functions or training graphs")
    if len(model.graph.node) != 1 or model.graph.initializer or model.graph.sparse_initializer:
        raise _error(path, f"it has {len(model.graph.node)} nodes or weights; expected one node")
    (node,) = model.graph.node
    if (node.op_type, node.domain) != (OPERATOR, DOMAIN):
        raise _error(path, f"its node is {node.op_type[:40]!r}; expected `{OPERATOR}`")
    attributes: dict[str, Any] = {one.name: one for one in node.attribute}
    embedded = attributes.get("embed_mode")
    binary = attributes.get("ep_cache_context")
    if len(attributes) < len(node.attribute) or embedded is None or embedded.i != 1:
        raise _error(path, "the context binary is not inside this file")
    if binary is None or not binary.s:
        raise _error(path, "it has no context binary")
    inputs, outputs = _tensors(path, model.graph.input), _tensors(path, model.graph.output)
    if {tensor.name for tensor in inputs} != set(node.input) or {
        tensor.name for tensor in outputs
    } != set(node.output):
        raise _error(path, "its inputs and outputs are not those of its node")
    stated = {one.key: one.value for one in model.metadata_props}.get(COMPATIBILITY, "")
    architecture, soc_model = _chip(stated)
    sdk = attributes.get("ep_sdk_version")
    return Context(
        inputs=inputs,
        outputs=outputs,
        soc_model=soc_model,
        architecture=architecture,
        compiler=_version(sdk.s if sdk is not None else b""),
        context_bytes=len(binary.s),
    )


def check_context(path: Path, spec: ProgramSpec) -> Context:
    """Read a compiled file, and compare its inputs and outputs with a program's signature.

    Raises:
        BundleError: see `read_context`; or it has another signature.
    """
    context = read_context(path)
    for kind, found, expected in (
        ("inputs", context.inputs, spec.inputs),
        ("outputs", context.outputs, spec.outputs),
    ):
        stated = {tensor.name: tensor for tensor in found}
        for tensor in expected:
            if stated.pop(tensor.name, None) != tensor:
                raise _other(path, spec, f"its {kind} have no {_shown(tensor)}")
        if stated:
            raise _other(path, spec, f"its {kind} have {_shown(next(iter(stated.values())))} too")
    return context


def _parsed(path: Path) -> Any:
    from google.protobuf.message import DecodeError

    kind = other_kind(path)
    if kind:
        raise _error(path, f"the path is {kind}")
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"the file has more than {LARGEST} bytes")
        model = _model_class().FromString(path.read_bytes())
    except (DecodeError, OSError, ValueError) as error:
        raise _error(path, str(error)) from error
    if not model.HasField("graph"):
        raise _error(path, "the file has no graph")
    return model


def _tensors(path: Path, values: Iterable[Any]) -> tuple[TensorSpec, ...]:
    found = []
    for value in values:
        tensor = value.type.tensor_type
        shape = tuple(dim.dim_value for dim in tensor.shape.dim)
        if tensor.elem_type not in TYPES or min(shape, default=1) < 1:
            raise _error(
                path, f"{value.name[:80]!r} has no fixed shape, or an unknown type of its values"
            )
        found.append(TensorSpec(value.name, shape, TYPES[tensor.elem_type]))
    if len({tensor.name for tensor in found}) < len(found):
        raise _error(path, "two of its inputs or outputs have the same name")
    return tuple(found)


def _chip(stated: str) -> tuple[int | None, int | None]:
    """Read generation and number of the chip from what onnxruntime-qnn 2.7.0 writes.

    It writes VERSION:BACKEND:SDK:BACKEND_API:ARCHITECTURE:SOC_MODEL:…, such as
    "v2:6:2.51.0:5.51.0:75:57:0:0", where the names of the parts are inferred from files for several chips.
    """
    found = re.fullmatch(r"v2:\d+:[\d.]+:[\d.]+:(\d{1,4}):(\d{1,6})(:\d+)*", stated, re.ASCII)
    return (int(found[1]), int(found[2])) if found else (None, None)


def _version(text: bytes) -> str:
    found = re.match(rb"v?(\d{1,4}\.\d{1,4}\.\d{1,4})(?!\d)", text)
    return found[1].decode("ascii") if found else ""


def _shown(tensor: TensorSpec) -> str:
    return f"{tensor.name[:80]!r} {list(tensor.shape)} {tensor.dtype}"


def _error(path: Path, why: str) -> BundleError:
    return BundleError(
        f"{path.name} is not a compiled file of this target", why=why[:300], hint=RECOMPILE
    )


def _other(path: Path, spec: ProgramSpec, why: str) -> BundleError:
    return BundleError(f"{path.name} does not compute `{spec.name}`", why=why, hint=RECOMPILE)


@cache
def _model_class() -> Any:
    return message_class(SCHEMA, "Model")
