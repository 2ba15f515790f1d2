"""What ONNX Runtime's quantizer needs: a graph with fused linears, and samples."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def calibrated(
    path: Path, operators: Sequence[str] | None, samples: Iterable[dict[str, Any]], folder: Path
) -> Any:
    """Return the smallest and the largest value of each activation, as a `TensorsData` of ONNX Runtime.

    ONNX Runtime's own session for this keeps every activation in memory until the end of a run, and all of
    them again as a pattern: 1.5 GB for the encoder of tiny. By priority each is measured when it is made,
    and freed after its last use: 0.3 GB, in a third of the time.

    Args:
        path: of the ONNX file.
        operators: kinds of those whose activations are measured; None: all that have float activations.
        samples: inputs of the runs, name -> array.
        folder: for temporary files.
    """
    import onnxruntime
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    augmented = os.fspath(folder / "calibrating.onnx")
    calibrator = create_calibrator(
        path,
        operators,
        augmented_model_path=augmented,
        calibrate_method=CalibrationMethod.MinMax,
        use_external_data_format=True,
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_pattern = False
    calibrator.infer_session = onnxruntime.InferenceSession(
        augmented, options, providers=["CPUExecutionProvider"]
    )
    calibrator.collect_data(Reader(samples))
    return calibrator.compute_data()


class Reader:
    """Samples as ONNX Runtime's quantizer reads them: a `CalibrationDataReader` by its methods."""

    def __init__(self, samples: Iterable[dict[str, Any]]) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next sample; None: there is no more."""
        return next(self._left, None)
