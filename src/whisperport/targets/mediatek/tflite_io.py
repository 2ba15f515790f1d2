"""Read the inputs and outputs of a .tflite as the device will have them, for the manifest."""

import struct
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError
from whisperport.spec import ProgramSpec
from whisperport.targets.mediatek.device_io import DeviceIo, DeviceTensor


def read_device_io(path: Path, spec: ProgramSpec) -> DeviceIo:
    """Return the inputs and outputs of the .tflite that will be compiled, with their quantization.

    Args:
        path: the .tflite; it has a signature with the program's name, or one signature.
        spec: the program's signature.

    Raises:
        ProgramError: the file is damaged, or has no such signature.
        BundleError: the file has other inputs or outputs than the program.
        MissingPackageError: the package tflite is not installed.
    """
    from whisperport.inspection.tflite_signatures import read_signatures

    signatures = read_signatures(path)
    found = signatures.get(spec.name)
    if found is None and len(signatures) == 1:
        (found,) = signatures.values()
    if found is None:
        raise ProgramError(
            f"{path.name} has no signature `{spec.name}`",
            why=f"its signatures are {', '.join(signatures) or 'none'}",
            hint="export the program again",
        )
    try:
        quantization = _quantization(path.read_bytes(), found.subgraph)
    except (struct.error, ValueError, TypeError, IndexError) as error:
        raise ProgramError(
            f"{path.name} is damaged, or is not a TFLite model",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="convert the model again",
        ) from error
    sides = [
        tuple(
            DeviceTensor(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                scale=scale,
                zero_point=zero_point,
            )
            for tensor, (scale, zero_point) in zip(tensors, stated, strict=True)
        )
        for tensors, stated in zip((found.inputs, found.outputs), quantization, strict=True)
    ]
    return DeviceIo.from_json(DeviceIo(*sides).to_json(), spec)


def _quantization(data: bytes, subgraph: int) -> tuple[list[tuple[float, int]], ...]:
    """Return (scale, zero point) of every input and of every output; scale 0: not quantized."""
    from tflite.Model import Model

    graph = Model.GetRootAs(data).Subgraphs(subgraph)
    return (
        [_of(graph.Tensors(graph.Inputs(i))) for i in range(graph.InputsLength())],
        [_of(graph.Tensors(graph.Outputs(i))) for i in range(graph.OutputsLength())],
    )


def _of(tensor: Any) -> tuple[float, int]:
    stated = tensor.Quantization()
    if stated is None or not stated.ScaleLength():
        return 0.0, 0
    if stated.ScaleLength() != 1:
        raise ValueError("an input or output has a scale per channel")
    return float(stated.Scale(0)), int(stated.ZeroPoint(0)) if stated.ZeroPointLength() else 0
