"""Quantize a .tflite file for a target: the samples it needs, and the call of the quantizer."""

from collections.abc import Mapping
from pathlib import Path

from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiler import CalibrationNeed
from whisperport.targets.quantizing import replace_by_quantized
from whisperport.targets.tflite.quantization import STATIC_BITS, Recipe, quantize

SAMPLES = 32  # of calibration; the shipped audio files give enough


def static_calibration(spec: ProgramSpec, precision: str) -> CalibrationNeed | None:
    """Return the samples that quantizing a program needs; None: the precision is not static."""
    if precision not in STATIC_BITS:
        return None
    return CalibrationNeed(samples=SAMPLES, names=tuple(tensor.name for tensor in spec.inputs))


def quantize_in_place(
    path: Path,
    steps: Recipe,
    samples: Mapping[str, Mapping[str, Path]] | None = None,
    *,
    target: str,
    extra: str,
) -> None:
    """Quantize a file in place; see `tflite_quantization.quantize`.

    Args:
        path: of the file in float32. After an error it is unchanged.
        steps: the recipe.
        samples: signature -> name of an input -> `.npy` file of its samples, for a static recipe.
        target: name of the target, for messages.
        extra: pip extra that installs the quantizer, for messages.

    Raises:
        MissingPackageError: ai-edge-quantizer is not installed.
        LoweringError: the quantizer could not quantize the file.
    """
    replace_by_quantized(
        path,
        lambda source, made: quantize(source, made, steps, samples),
        failure="ai-edge-quantizer could not quantize",
        missing="ai-edge-quantizer is not installed",
        target=target,
        extra=extra,
    )
