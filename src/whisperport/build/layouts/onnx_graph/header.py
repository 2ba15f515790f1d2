"""What an ONNX file says of itself, its inputs, outputs and metadata: read without weights, and changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError, needs


@dataclass(frozen=True, slots=True)
class OnnxHeader:
    """Inputs and outputs by name, in the file's order, each with its sizes; a text is a symbol."""

    inputs: Mapping[str, list[int | str]]
    outputs: Mapping[str, list[int | str]]
    metadata: Mapping[str, str]


def read_header(path: Path) -> OnnxHeader:
    """Read the header of an ONNX file.

    Raises:
        ProgramError: the file cannot be read, or is no ONNX model.
        MissingPackageError: onnx is not installed.
    """
    from whisperport.model.inspection.read_onnx import damaged, read_skeleton

    try:
        model = read_skeleton(path)
    except OSError as error:
        raise ProgramError(f"cannot read {path}", why=error.strerror or str(error)) from error
    if not model.graph.node:
        raise damaged(path, ValueError("it has no nodes"))
    stored = {tensor.name for tensor in model.graph.initializer}
    return OnnxHeader(
        {
            text(value.name): _sizes(value)
            for value in model.graph.input
            if value.name not in stored
        },
        {text(value.name): _sizes(value) for value in model.graph.output},
        {text(entry.key): text(entry.value) for entry in model.metadata_props},
    )


def change_model(path: Path, change: Callable[[Any], None]) -> None:
    """Change a model in a file. It is read completely; what it stores in other files stays there.

    Raises:
        ProgramError: the file cannot be read, or is no ONNX model.
        MissingPackageError: onnx is not installed.
    """
    with needs("cannot change an ONNX file: the package onnx is not installed", extra="export"):
        import onnx
        from google.protobuf.message import DecodeError

        from whisperport.model.inspection.read_onnx import damaged
    try:
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())
    except (ValueError, DecodeError) as error:
        raise damaged(path, error) from error


def text(value: str | bytes) -> str:
    """Return a text of a file; protobuf returns one that is not UTF-8 as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _sizes(value: Any) -> list[int | str]:
    axes = value.type.tensor_type.shape.dim
    return [axis.dim_value if axis.HasField("dim_value") else text(axis.dim_param) for axis in axes]
