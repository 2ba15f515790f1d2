"""Run a .tflite file once, and keep the value of every tensor. LiteRT's own kernels run, no delegate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whisperport.program.runner import Array
from whisperport.targets.tflite.runner import dequantized, import_litert, quantized

RUNTIME = "LiteRT"


def run_keeping(
    path: Path, inputs: Sequence[Array], indices: Mapping[str, int]
) -> tuple[dict[str, Array], list[Array]]:
    """Run the first subgraph of a file. Quantized tensors are real numbers for the caller.

    Args:
        path: of the file.
        inputs: in the order of the file.
        indices: name -> index of a tensor.

    Returns:
        The values of the wanted tensors that the file has, and the outputs.

    Raises:
        MissingPackageError: ai-edge-litert is not installed.
        RuntimeError, ValueError: LiteRT cannot load or run the file.
    """
    litert = import_litert("litert", path.name)
    interpreter = litert.Interpreter(
        str(path),
        experimental_op_resolver_type=litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,
    )
    interpreter.allocate_tensors()
    for detail, array in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(detail["index"], _stored(array, detail))
    interpreter.invoke()
    details = {detail["index"]: detail for detail in interpreter.get_tensor_details()}
    values = {
        name: _real(interpreter, details[index])
        for name, index in indices.items()
        if index in details
    }
    return values, [_real(interpreter, detail) for detail in interpreter.get_output_details()]


def _stored(array: Array, detail: Mapping[str, Any]) -> Array:
    scale, zero_point = detail["quantization"]
    if scale and array.dtype.kind == "f":
        return quantized(array, detail["dtype"], scale, zero_point)
    return array.astype(detail["dtype"])


def _real(interpreter: Any, detail: Mapping[str, Any]) -> Array:
    stored: Array = interpreter.get_tensor(detail["index"])
    scale, zero_point = detail["quantization"]
    is_quantized = scale and stored.dtype.kind in "iu"
    return dequantized(stored, scale, zero_point) if is_quantized else stored
