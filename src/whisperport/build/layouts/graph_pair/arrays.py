"""Yield the arrays of a graph's file, whatever its format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.layouts.graph_pair.pair import Part
from whisperport.build.layouts.onnx_graph.stored import stored_arrays
from whisperport.build.layouts.reading import Files, StoredArray, in_steps

NOT_OF_NUMPY = ("string", "resource", "variant", "int4", "bfloat16", "unknown")


def part_arrays(files: Files, part: Part) -> Iterator[StoredArray]:
    """Yield the arrays of a part's file, one at a time.

    Raises:
        ProgramError: the file is damaged.
        MissingPackageError: the reader of its format is not installed.
    """
    suffix = (files.path / part.file).suffix
    if suffix == ".onnx":
        yield from stored_arrays(files, [part.file])
    elif suffix == ".tflite":
        yield from _of_tflite(files.path / part.file, part.file)


def _of_tflite(path: Path, file: str) -> Iterator[StoredArray]:
    from whisperport.model.inspection.read_tflite import DTYPES, opened_tflite

    with opened_tflite(path) as (model, data):
        for place in range(model.SubgraphsLength()):
            graph = model.Subgraphs(place)
            for index in range(graph.TensorsLength()):
                tensor = graph.Tensors(index)
                dtype = DTYPES.get(tensor.Type(), "unknown")
                values = None if dtype in NOT_OF_NUMPY else _values(model, tensor, dtype, data)
                if values is None:
                    continue
                name = (tensor.Name() or b"").decode("utf-8", "replace")
                step, stated = None, tensor.Quantization()
                if (
                    dtype in ("int8", "uint8")
                    and values.ndim == 2
                    and stated
                    and stated.ScaleLength()
                ):
                    zero = stated.ZeroPointAsNumpy() if stated.ZeroPointLength() else np.zeros(1)
                    axis = min(max(stated.QuantizedDimension(), 0), 1)
                    values, step = in_steps(values, stated.ScaleAsNumpy(), zero, axis=axis)
                yield StoredArray(file, name, values, step=step)


def _values(model: Any, tensor: Any, dtype: str, data: Any) -> Any:
    """Return the values of a constant; None: the tensor is computed."""
    if not 0 < tensor.Buffer() < model.BuffersLength():
        return None
    buffer = model.Buffers(tensor.Buffer())
    if buffer.Size() > 1:  # stored after the tables
        raw = np.frombuffer(data, np.uint8, buffer.Size(), buffer.Offset()).copy()
    elif buffer.DataLength():
        raw = buffer.DataAsNumpy()
    else:
        return None
    shape = [tensor.Shape(axis) for axis in range(tensor.ShapeLength())]
    if raw.size != np.dtype(dtype).itemsize * int(np.prod(shape)):
        raise ValueError(f"a buffer of {raw.size} bytes is of a tensor of the shape {shape}")
    return raw.view(dtype).reshape(shape)
