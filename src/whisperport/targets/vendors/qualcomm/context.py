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

from whisperport.program.bundle import onnx_graph
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.protobuf import Field, message_class
from whisperport.targets.compiled_file import expect_signature, not_compiled, read_bytes

PROVIDER = "QNNExecutionProvider"
OPERATOR, DOMAIN = "EPContext", "com.microsoft"
COMPATIBILITY = f"ep_compatibility_info.{PROVIDER}"
TYPES = {1: "float32", 6: "int32", 10: "float16"}  # TensorProto.DataType -> numpy's name

# Fields in addition to those that are read of every ONNX file.
FIELDS: dict[str, tuple[Field, ...]] = {
    "Model": (("metadata_props", 14, "[Entry]"),),
    "Attribute": (("s", 4, "bytes"),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The description of a compiled file.

    Attributes:
        soc_model: the vendor's number of the chip; None: the file does not state it.
        architecture: generation of the HTP, such as 75; None: the file does not state it.
        compiler: version of the vendor's SDK, such as "2.51.0"; "": the file does not state it.
        context_bytes: size of the context binary.
        compatibility: what the compiler states, for the provider to compare with a device; "": nothing.
    """

    soc_model: int | None
    architecture: int | None
    compiler: str
    context_bytes: int
    compatibility: str = ""


def check_context(path: Path, spec: ProgramSpec, *, beside: bool = False) -> Context:
    """Read a compiled file, and compare its inputs and outputs with a program's signature.

    Args:
        path: of the file.
        spec: the signature.
        beside: whether the context binary may be another file of its folder. This one is not loaded then.

    Raises:
        BundleError: it is damaged, has other nodes, names another file, or has another signature.
    """
    model = _parsed(path)
    graph = model.graph
    extras = (graph.initializer, graph.sparse_initializer, model.functions, model.training_info)
    if len(graph.node) != 1 or any(extras):
        raise not_compiled(path, f"it has {len(graph.node)} nodes, or weights; expected one node")
    (node,) = graph.node
    if (node.op_type, node.domain) != (OPERATOR, DOMAIN):
        raise not_compiled(path, f"its node is {node.op_type[:40]!r}; expected `{OPERATOR}`")
    attributes: dict[str, Any] = {attribute.name: attribute for attribute in node.attribute}
    embedded, binary = attributes.get("embed_mode"), attributes.get("ep_cache_context")
    if binary is None or not binary.s:
        raise not_compiled(path, "it has no context binary")
    size = len(binary.s)
    if len(attributes) < len(node.attribute) or embedded is None or embedded.i != 1:
        if not beside:
            raise not_compiled(path, "the context binary is not inside this file")
        size = _size_beside(path, binary.s)
    expected = ProgramSpec(spec.name, _by_name(spec.inputs), _by_name(spec.outputs))
    expect_signature(path, expected, _stated(graph.input), _stated(graph.output), _shown)
    stated = {entry.key: entry.value for entry in model.metadata_props}.get(COMPATIBILITY, "")
    architecture, soc_model = _chip(stated)
    sdk = attributes.get("ep_sdk_version")
    return Context(
        soc_model=soc_model,
        architecture=architecture,
        compiler=_version(sdk.s if sdk is not None else b""),
        context_bytes=size,
        compatibility=stated,
    )


def _size_beside(path: Path, named: bytes) -> int:
    """Return the size of a file that a compiled file names.

    Raises:
        BundleError: it is not a file of the same folder.
    """
    name = named.decode("utf-8", "replace")[:255]
    place = path.parent / name
    if place.parent != path.parent or not place.is_file():
        raise not_compiled(path, f"its context binary {name[:60]!r} is not in its folder")
    return place.stat().st_size


def context_binary(path: Path) -> bytes:
    """Return the vendor's context binary in a compiled file.

    Raises:
        BundleError: the file is damaged, or has none.
    """
    attributes = [attribute for node in _parsed(path).graph.node for attribute in node.attribute]
    binaries = [bytes(a.s) for a in attributes if a.name == "ep_cache_context" and a.s]
    if len(binaries) != 1:
        raise not_compiled(path, f"it has {len(binaries)} context binaries; expected one")
    return binaries[0]


def _parsed(path: Path) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return _model_class().FromString(read_bytes(path, onnx_graph.LARGEST))
    except (DecodeError, ValueError) as error:
        raise not_compiled(path, str(error)) from error


def _by_name(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(sorted(tensors, key=_shown))


def _stated(values: Iterable[Any]) -> list[str]:
    """Describe inputs or outputs, whose order has no meaning. The size of a dynamic axis is 0."""
    tensors = []
    for value in values:
        tensor = value.type.tensor_type
        shape = tuple(dim.dim_value for dim in tensor.shape.dim)
        tensors.append(TensorSpec(value.name, shape, TYPES.get(tensor.elem_type, "another type")))
    return [_shown(tensor) for tensor in _by_name(tensors)]


def _shown(tensor: TensorSpec) -> str:
    return f"{tensor.name!r} {list(tensor.shape)} {tensor.dtype}"


def _chip(stated: str) -> tuple[int | None, int | None]:
    """Read generation and number of the chip from what onnxruntime-qnn 2.7.0 writes.

    It writes VERSION:BACKEND:SDK:BACKEND_API:ARCHITECTURE:SOC_MODEL:…, such as
    "v2:6:2.51.0:5.51.0:75:57:0:0", where the names of the parts are inferred from files for several chips.
    """
    match = re.fullmatch(r"v2:\d+:[\d.]+:[\d.]+:(\d{1,4}):(\d{1,6})(:\d+)*", stated, re.ASCII)
    return (int(match[1]), int(match[2])) if match else (None, None)


def _version(text: bytes) -> str:
    match = re.match(rb"v?(\d{1,4}\.\d{1,4}\.\d{1,4})(?!\d)", text)
    return match[1].decode("ascii") if match else ""


@cache
def _model_class() -> Any:
    """Return the protobuf class of `ModelProto`."""
    known = onnx_graph.SCHEMA
    schema = {name: (*fields, *FIELDS.get(name, ())) for name, fields in known.items()}
    return message_class(schema, "Model")
