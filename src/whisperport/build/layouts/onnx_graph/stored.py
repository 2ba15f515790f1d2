"""Yield the arrays of an ONNX file, one at a time."""

from collections.abc import Iterable, Iterator
from typing import Any

from whisperport.build.layouts.reading import Files, StoredArray
from whisperport.errors import ProgramError, needs


def stored_arrays(files: Files, names: Iterable[str]) -> Iterator[StoredArray]:
    """Yield each tensor of ONNX files, those of inner graphs included.

    Raises:
        ProgramError: the file cannot be read, is no ONNX model, or its external data is missing.
        MissingPackageError: onnx is not installed.
    """
    with needs("cannot read an ONNX file: the package onnx is not installed", extra="export"):
        import onnx
        from google.protobuf.message import DecodeError
        from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

        from whisperport.model.inspection.read_onnx import damaged
    for name in names:
        path = files.path / name
        try:
            model = onnx.load(path, load_external_data=False)
            for tensor in _tensors(model.graph):
                if uses_external_data(tensor):
                    load_external_data_for_tensor(tensor, str(path.parent))
                yield StoredArray(name, tensor.name, onnx.numpy_helper.to_array(tensor))
                tensor.Clear()
        except OSError as error:
            raise ProgramError(f"cannot read {path}", why=error.strerror or str(error)) from error
        except (
            ValueError,
            TypeError,
            RuntimeError,
            DecodeError,
            onnx.checker.ValidationError,
        ) as error:
            raise damaged(path, error) from error


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _tensors(inner)
