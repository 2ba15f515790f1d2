"""Quantize a .tflite file with ai-edge-quantizer: recipes as data, and the function that applies one.

| Precision | Weights | Activations | Calibration |
|---|---|---|---|
| fp16 | float16 | float32 | no |
| w8 | int8, a scale per channel | float32; the runtime quantizes the inputs of linears in every run | no |
| w8a8 | int8, a scale per channel | int8, one scale per tensor | yes |
| w8a16 | int8, a scale per channel | int16, one scale per tensor and zero point 0 | yes |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PRECISIONS = ("fp16", "w8", "w8a8", "w8a16")
STATIC_BITS = {"w8a8": 8, "w8a16": 16}  # precision -> bits of activations

# Operators that `linear` quantizes. The encoder of whisperport's trained model in w8a8 has 33 dB with these
# operators, and 7 dB with all of them: one 8-bit scale for a complete tensor
# loses the small values of attention scores, residual sums and layer norms beside their few large ones.
#
# Of attention's matrix multiplications, those of softmax's probabilities need 16 bits or float: most
# probabilities are below one 8-bit step. The encoders of two checkpoints with massive activations have 24
# and 31 dB with linears alone; 24 and 32 with all matrix multiplications, these in 16 bits; 6 and 10 with
# these in 8 bits.
LINEAR = ("FULLY_CONNECTED", "CONV_2D")
MATMUL = (*LINEAR, "BATCH_MATMUL")
ALL = ("*",)
OPERATORS = {"linear": LINEAR, "matmul": MATMUL, "all": ALL}  # value of an option -> operators

Recipe = Sequence[Mapping[str, Any]]
"""The quantizer's recipe: a list of JSON objects."""


def recipe(
    precision: str,
    operators: Sequence[str] = LINEAR,
    exceptions: Sequence[tuple[str, str, str]] = (),
) -> Recipe:
    """Return the recipe of a precision.

    Args:
        precision: one of `PRECISIONS`.
        operators: names of TFLite's operators that are quantized statically; ("*",): all. Not used by
            "fp16" and "w8".
        exceptions: operators with another precision in a static program: (that precision: "fp32", "w8" or
            "w8a16", name in TFLite, name of the output).

    Source: the recipes of ai_edge_quantizer 0.10.0, recipe.py: dynamic_wi8_afp32, static_wi8_ai8,
    static_wi8_ai16, and AlgorithmName.FLOAT_CASTING.
    """
    if precision not in STATIC_BITS:
        return [_entry("*", precision)]
    return [
        *(_entry(operator, precision) for operator in operators),
        *(  # the last entry of an operator counts
            _entry(operator, exception, output=f"^{re.escape(output)};?$")
            for exception, operator, output in exceptions
        ),
    ]


def _entry(operator: str, precision: str, output: str = ".*") -> dict[str, Any]:
    """Return the entry of the operators whose outputs' names match a regular expression."""
    algorithms = {"fp32": "no_quantize", "fp16": "float_casting"}
    config = {
        **({} if precision == "fp32" else _configuration(precision)),
        "explicit_dequantize": False,
        "skip_checks": False,
        "min_weight_elements": 0,
    }
    return {
        "regex": output,
        "operation": operator,
        "algorithm_key": algorithms.get(precision, "min_max_uniform_quantize"),
        "op_config": config,
    }


def _configuration(precision: str) -> dict[str, Any]:
    """Return the configuration of the weights and activations of an operator."""
    half = precision == "fp16"
    weights = {
        "num_bits": 16 if half else 8,
        "symmetric": True,
        "granularity": "TENSORWISE" if half else "CHANNELWISE",
        "dtype": "FLOAT" if half else "INT",
        "block_size": 0,
    }
    config = {
        "weight_tensor_config": weights,
        "compute_precision": "FLOAT" if half else "INTEGER",
    }
    if bits := STATIC_BITS.get(precision):
        same = {**weights, "granularity": "TENSORWISE"}
        config["activation_tensor_config"] = {**same, "num_bits": bits, "symmetric": bits == 16}
    return config


def quantize(
    source: Path,
    out: Path,
    steps: Recipe,
    samples: Mapping[str, Mapping[str, Path]] | None = None,
    *,
    threads: int = 1,
) -> None:
    """Quantize a .tflite file in float32.

    Args:
        source: the file.
        out: the file to write; it may be `source`.
        steps: the recipe.
        samples: signature -> name of an input -> `.npy` file of (samples, ...), for a static recipe.
        threads: CPU threads for calibration.

    Raises:
        ImportError: ai-edge-quantizer is not installed.
        ValueError, RuntimeError: the quantizer could not quantize the file.
    """
    from ai_edge_quantizer import quantizer

    quantization = quantizer.Quantizer(str(source), [dict(step) for step in steps])
    ranges = (
        _ranges(source, steps, samples or {}, threads) if quantization.need_calibration else None
    )
    quantization.quantize(ranges).export_model(str(out), overwrite=True)
    if ranges is not None:
        _name_outputs(out)


def _name_outputs(path: Path) -> None:
    """Let each signature name the outputs of its graph.

    ai-edge-quantizer 0.10.0 appends a QUANTIZE or a DEQUANTIZE to an output that has another use in the
    graph, and leaves the name with the integers before it, which are no output: LiteRT has no memory of
    them after a run.
    """
    from ai_edge_litert.schema_py_generated import BuiltinOperator
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(path))
    codes = [code.builtinCode for code in model.operatorCodes]
    appended = (BuiltinOperator.QUANTIZE, BuiltinOperator.DEQUANTIZE)
    moved = 0
    for signature in model.signatureDefs or ():
        graph = model.subgraphs[signature.subgraphIndex]
        outputs = {int(index) for index in graph.outputs}
        after = {
            int(operator.inputs[0]): int(operator.outputs[0])
            for operator in graph.operators
            if codes[operator.opcodeIndex] in appended
            and int(operator.outputs[0]) in outputs  # other uses have some of their own
        }
        for output in signature.outputs:
            index = int(output.tensorIndex)
            if index not in outputs and index in after:
                output.tensorIndex = after[index]
                moved += 1
    if moved:
        flatbuffer_utils.write_model(model, str(path))


def _ranges(
    source: Path, steps: Recipe, samples: Mapping[str, Mapping[str, Path]], threads: int
) -> Any:
    """Return the range of every tensor: from its smallest to its largest value in all samples.

    `Quantizer.calibrate` would return a moving average of each sample's range, and values outside of the
    average are cut off. Measured on the trained encoder in w8a16, linears quantized, 32 samples: the
    largest error of six clips is 0.080 of the largest value with the average, and 0.032 with this range.
    """
    from ai_edge_quantizer import calibrator, recipe_manager
    from ai_edge_quantizer.utils import qsv_utils

    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe([dict(step) for step in steps])
    calibration = calibrator.Calibrator(
        str(source), num_threads=threads, qsv_update_func=qsv_utils.min_max_update
    )
    calibration.calibrate(
        {name: list(_samples(arrays)) for name, arrays in samples.items()}, manager
    )
    return calibration.get_model_qsvs()


def _samples(arrays: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    import numpy as np

    mapped = {
        name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in arrays.items()
    }
    for index in range(min(len(array) for array in mapped.values())):
        yield {name: np.ascontiguousarray(array[index]) for name, array in mapped.items()}
