"""A written graph, opened by ONNX Runtime on the CPU with one thread."""

from pathlib import Path
from typing import Any

from whisperport.errors import needs


def open_session(path: Path) -> Any:
    """Return the session of an ONNX file.

    Raises:
        MissingPackageError: ONNX Runtime is not installed.
    """
    with needs("cannot run ONNX files: onnxruntime is not installed", extra="onnxruntime"):
        import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
