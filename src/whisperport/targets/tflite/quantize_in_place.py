"""Quantize a .tflite file for a target: the samples it needs, and the calls of the quantizer."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from whisperport.program.spec import ProgramSpec
from whisperport.targets.quantizing import replace_by_quantized
from whisperport.targets.tflite.quantization import (
    ALL,
    LINEAR,
    Recipe,
    quantize,
    recipe,
)
from whisperport.targets.tflite.sensitive import SensitiveOperator, sensitive_operators

MISSING = "ai-edge-quantizer is not installed"
FAILURE = "ai-edge-quantizer could not quantize"


def quantize_in_place(path: Path, steps: Recipe, *, target: str, extra: str) -> None:
    """Quantize a file in place by a recipe that needs no samples.

    Args:
        path: of the file in float32. After an error it is unchanged.
        steps: the recipe.
        target: name of the target, for messages.
        extra: pip extra that installs the quantizer, for messages.

    Raises:
        MissingPackageError: ai-edge-quantizer is not installed.
        LoweringError: the quantizer could not quantize the file.
    """
    replace_by_quantized(
        path,
        lambda source, out: quantize(source, out, steps),
        failure=FAILURE,
        missing=MISSING,
        target=target,
        extra=extra,
    )


def quantize_statically(
    path: Path,
    spec: ProgramSpec,
    precision: str,
    arrays: Mapping[str, Path],
    *,
    operators: tuple[str, ...] = LINEAR,
    sensitive_in: Mapping[str, str] = MappingProxyType({}),
    target: str,
    extra: str,
) -> tuple[str, ...]:
    """Quantize a file with one program in place, in "w8a8" or "w8a16".

    Args:
        path: of the file in float32. After an error it is unchanged.
        spec: of the program.
        precision: the static precision.
        arrays: name of an input -> `.npy` file of its samples, (samples, ...).
        operators: names of TFLite's operators that are quantized.
        sensitive_in: operator that one fixed scale may ruin, by its name in TFLite -> its precision then.
            Those of others are not examined. Default: none.
        target: name of the target, for messages.
        extra: pip extra that installs the quantizer, for messages.

    Returns:
        A sentence about each operator that has another precision.

    Raises:
        MissingPackageError: ai-edge-quantizer or LiteRT is not installed.
        LoweringError: the samples do not fit, or the quantizer could not quantize the file.
    """
    sensitive: list[SensitiveOperator] = []

    def run(source: Path, out: Path) -> None:
        examined = [
            operator for operator in sensitive_in if operator in operators or operators == ALL
        ]
        if examined:
            sensitive.extend(sensitive_operators(source, spec, precision, examined, arrays))
        exceptions = [(sensitive_in[op.operator], op.operator, op.tensor) for op in sensitive]
        quantize(source, out, recipe(precision, operators, exceptions), {spec.name: arrays})

    replace_by_quantized(path, run, failure=FAILURE, missing=MISSING, target=target, extra=extra)
    return tuple(f"in {sensitive_in[op.operator]} instead: {op.activation}" for op in sensitive)
