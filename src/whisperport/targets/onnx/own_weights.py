"""Load a program when it is first used, with weights of its own that ONNX Runtime packs.

A multiplication of several rows by shared weights copies them in every run. That is once per window for a
prompt, but once per token for `step_B`: with packed weights it takes 0.65 of the time for tiny, base and
small. So it has a packed copy, which is made only if several texts are decoded together. Without packing,
ONNX Runtime expands weights of 8 bits in every run, so their programs have packed copies too, of a quarter
of the bytes.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import BundleError
from whisperport.targets.onnx.attention import join_attention
from whisperport.targets.onnx.short_caches import free_cache_length
from whisperport.targets.onnx.weights import HALF

# Bytes of weights for which a copy is made; Whisper small has 0.6 GB in float32, 0.16 GB in 8 bits.
LARGEST = 2**30


class OwnWeights:
    """A program's graph and the files of its weights, open until its session is made.

    The files are mapped, so that a bundle which is replaced meanwhile does not matter.
    """

    def __init__(self, graph: OnnxGraph) -> None:
        """Read the graph.

        Raises:
            BundleError: it or a file of weights cannot be read, or is not part of its program.
        """
        self._files: dict[str, NDArray[np.uint8]] = {}
        self.packed_bytes = 0  # of all weights as the session has them
        for tensor in graph.external_tensors():
            entries = {entry.key: entry.value for entry in tensor.external_data}
            widening = 2 if tensor.data_type == HALF else 1
            self.packed_bytes += widening * int(entries.get("length", "0"))
            if entries["location"] not in self._files:
                self._files[entries["location"]] = _mapped(graph, entries["location"])
        model = graph.detach()
        join_attention(model)
        self._free = free_cache_length(model)
        self._model: bytes = model.SerializeToString()

    def allows_short_caches(self, _graph: OnnxGraph) -> bool:
        """Whether the model that `session_model` returns allows caches of any length."""
        return self._free

    def session_model(self, _graph: OnnxGraph, settings: Any) -> bytes:
        """Return what a session loads.

        Args:
            settings: an `onnxruntime.SessionOptions`, which is changed.
        """
        if self._files:
            arrays = list(self._files.values())
            settings.add_external_initializers_from_files_in_memory(
                list(self._files), arrays, [array.nbytes for array in arrays]
            )
        return self._model


def _mapped(graph: OnnxGraph, location: str) -> NDArray[np.uint8]:
    """Map a file of weights to memory.

    Raises:
        BundleError: it cannot be read, or is empty.
    """
    try:
        with graph.external_file(location).open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:  # an empty file is a ValueError
        raise BundleError(
            f"cannot read the weights of {graph.name}",
            why=str(error),
            hint="export the bundle again",
        ) from error
