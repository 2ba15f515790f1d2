"""Find the operators whose outputs static quantization ruins: run a .tflite file on samples."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.program.program_kind import ENCODER
from whisperport.program.spec import ProgramSpec
from whisperport.targets.activations import MIN_SQNR_DB, Activation
from whisperport.targets.tflite.quantization import STATIC_BITS

SAMPLES = 4  # that are run: massive activations are in every clip
CONVOLUTIONS = ("conv1", "conv2")
PROJECTION = "attn.query, key or value"  # the converter orders them as it likes
PER_BLOCK = (PROJECTION, PROJECTION, PROJECTION, "attn.out", "mlp.0", "mlp.2")


@dataclass(frozen=True, slots=True)
class SensitiveOperator:
    """An operator whose output is not to be quantized statically.

    Attributes:
        operator: its name in TFLite.
        tensor: name of its output in the file.
        activation: the values of its output.
    """

    operator: str
    tensor: str
    activation: Activation


def sensitive_operators(
    path: Path,
    spec: ProgramSpec,
    precision: str,
    operators: Sequence[str],
    arrays: Mapping[str, Path],
) -> list[SensitiveOperator]:
    """Run a float32 file on a few samples, and return the operators whose outputs lose too much.

    All intermediate tensors of a run are in memory.

    Args:
        path: a file that holds this program alone.
        spec: of the program. An encoder's operators are named by their place in it.
        precision: a static precision.
        operators: names of TFLite's operators that are quantized.
        arrays: name of an input -> `.npy` file of its samples, (samples, ...).
    """
    from ai_edge_litert.interpreter import Interpreter

    from whisperport.inspection.litert_run import listed_ops

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that keeping all tensors is meant for debugging
        running = Interpreter(str(path), experimental_preserve_all_tensors=True, num_threads=1)
    run = running.get_signature_runner(spec.name)
    ops = [op for op in listed_ops(running) if op.name in operators]
    outputs = [op.outputs[0] for op in ops]
    tensors = {one["index"]: one["name"] for one in running.get_tensor_details()}
    places = _places(spec, [tensors[index] for index in outputs])
    activations = [Activation(place) for place in places]
    mapped = {name: np.load(file, mmap_mode="r") for name, file in arrays.items()}
    for sample in range(min(SAMPLES, *map(len, mapped.values()))):
        run(**{name: _as_stored(run, name, array[sample]) for name, array in mapped.items()})
        for index, activation in zip(outputs, activations, strict=True):
            activation.add(running.get_tensor(index))
    return [
        SensitiveOperator(op.name, tensors[index], activation)
        for op, index, activation in zip(ops, outputs, activations, strict=True)
        if activation.sqnr_db(STATIC_BITS[precision]) < MIN_SQNR_DB
    ]


def _as_stored(run: Any, name: str, values: Any) -> Any:
    """Return an input in the dtype of the file, which has no int64."""
    return np.ascontiguousarray(values, run.get_input_details()[name]["dtype"])


def _places(spec: ProgramSpec, tensors: Sequence[str]) -> list[str]:
    """Return names of operators for people: an encoder's by their place, others' by their tensors."""
    blocks, rest = divmod(len(tensors) - len(CONVOLUTIONS), len(PER_BLOCK))
    if spec.kind.name != ENCODER or rest:
        return list(tensors)
    parts = [f"blocks.{block}.{part}" for block in range(blocks) for part in PER_BLOCK]
    return [*CONVOLUTIONS, *parts]
