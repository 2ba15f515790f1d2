"""What ONNX Runtime's quantizer needs: a graph with fused linears, and samples."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def fuse(path: Path, out: Path, *, external: bool = False) -> None:
    """Write the graph as ONNX Runtime simplifies it for any CPU: a MatMul and its bias become a Gemm.

    Args:
        path: the file.
        out: the file to write.
        external: whether its weights are written to a file beside it, which may be larger than 2 GB.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(out)
    if external:
        entry = "session.optimized_model_external_initializers_file_name"
        options.add_session_config_entry(entry, f"{out.stem}.data")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def samples_of(arrays: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield the samples as inputs of a run, name -> array."""
    mapped = {name: np.load(file, mmap_mode="r") for name, file in arrays.items()}
    for index in range(min(map(len, mapped.values()))):
        yield {name: np.ascontiguousarray(array[index]) for name, array in mapped.items()}


class Reader:
    """Samples as ONNX Runtime's quantizer reads them: a `CalibrationDataReader` by its methods."""

    def __init__(self, samples: Iterable[dict[str, Any]]) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next sample; None: there is no more."""
        return next(self._left, None)
