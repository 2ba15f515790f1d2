"""A written graph, opened by ONNX Runtime on the CPU with one thread."""

from pathlib import Path
from typing import Any


def open_session(path: Path) -> Any:
    """Return the session of an ONNX file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
