"""Quantize a .tflite file for a target, but for operators whose activations one fixed scale would ruin."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.program.program_kind import ENCODER
from whisperport.program.spec import ProgramSpec
from whisperport.targets.activations import MIN_SQNR_DB, SAMPLES, Activation
from whisperport.targets.quantizing import replace_by_quantized
from whisperport.targets.tflite.quantization import (
    ALL,
    LINEAR,
    STATIC_BITS,
    Recipe,
    quantize,
    recipe,
)

if TYPE_CHECKING:
    from whisperport.model.inspection.litert_run import Op


CONVOLUTIONS = ("conv1", "conv2")
PROJECTION = "attn.query, key or value"  # the converter orders them as it likes
PER_BLOCK = (PROJECTION, PROJECTION, PROJECTION, "attn.out", "mlp.0", "mlp.2")
PRODUCTS = (
    "attn, scores",
    "attn, probabilities times values",
)  # matrix multiplications of activations


@dataclass(frozen=True, slots=True)
class SensitiveOperator:
    """An operator that is not to be quantized statically.

    Attributes:
        operator: its name in TFLite.
        tensor: name of its output in the file.
        activation: the one of its inputs and outputs that loses most.
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
    """Run a float32 file on a few samples, and return the operators that lose too much.

    Of a linear or convolution, its output counts; of a multiplication of two activations, these too. All
    intermediate tensors of a run are in memory.

    Args:
        path: a file that holds this program alone.
        spec: of the program. An encoder's operators are named by their place in it.
        precision: a static precision.
        operators: names of TFLite's operators that are quantized.
        arrays: name of an input -> `.npy` file of its samples, (samples, ...).
    """
    from ai_edge_litert.interpreter import Interpreter

    from whisperport.model.inspection.litert_run import listed_ops

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that keeping all tensors is meant for debugging
        running = Interpreter(str(path), experimental_preserve_all_tensors=True, num_threads=1)
    run = running.get_signature_runner(spec.name)
    names = {detail["index"]: detail["name"] for detail in running.get_tensor_details()}
    ops = [op for op in listed_ops(running) if op.name in operators]
    places = _places(spec, ops, names)
    activations = {
        tensor: Activation(place)
        for op, place in zip(ops, places, strict=True)
        for tensor in _counted(op)
    }
    mapped = {name: np.load(file, mmap_mode="r") for name, file in arrays.items()}
    for sample in range(min(SAMPLES, *map(len, mapped.values()))):
        run(**{name: _as_stored(run, name, array[sample]) for name, array in mapped.items()})
        for tensor, activation in activations.items():
            activation.add(running.get_tensor(tensor))
    bits = STATIC_BITS[precision]
    sensitive = []
    for op in ops:
        worst = min((activations[tensor] for tensor in _counted(op)), key=lambda a: a.sqnr_db(bits))
        if worst.sqnr_db(bits) < MIN_SQNR_DB:
            sensitive.append(SensitiveOperator(op.name, names[op.outputs[0]], worst))
    return sensitive


def _counted(op: "Op") -> tuple[int, ...]:
    return op.outputs[:1] if op.name in LINEAR else (*op.outputs[:1], *op.inputs)


def _as_stored(run: Any, name: str, values: Any) -> Any:
    """Return an input in the dtype of the file, which has no int64."""
    return np.ascontiguousarray(values, run.get_input_details()[name]["dtype"])


def _places(spec: ProgramSpec, ops: "Sequence[Op]", names: Mapping[int, str]) -> list[str]:
    """Return names of operators for people: an encoder's by their place, others' by their outputs."""
    linears = [op for op in ops if op.name in LINEAR]
    blocks, rest = divmod(len(linears) - len(CONVOLUTIONS), len(PER_BLOCK))
    products = len(ops) - len(linears)
    if spec.kind.name != ENCODER or rest or products not in (0, len(PRODUCTS) * blocks):
        return [names[op.outputs[0]] for op in ops]
    of_linears = iter(
        [*CONVOLUTIONS, *(f"blocks.{n}.{part}" for n in range(blocks) for part in PER_BLOCK)]
    )
    of_products = iter([f"blocks.{n}.{part}" for n in range(blocks) for part in PRODUCTS])
    return [next(of_linears if op.name in LINEAR else of_products) for op in ops]


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
