"""Quantize an ONNX file for ONNX Runtime's CPU, with activations in 8 bits of a fixed scale.

    MatMul + Add ─► Gemm ─► activations over samples ─► QuantizeLinear, DequantizeLinear ─► 8-bit weights
                            which does one scale ruin?   around the others                  of the ruined

ONNX Runtime multiplies in 8 bits where it finds such pairs around a Gemm, a MatMul or a Conv, and its own
quantizer inserts them. The outputs of multiplications stay in float32, since only their inputs are
multiplied; a convolution needs both. An operator with an activation that one scale ruins is not
quantized so: its weights get 8 bits, and its input a scale for each block of 128 values in every run
(MatMulNBits). A multiplication of two activations has no weights, and stays in float32.

Weights are unsigned: ONNX Runtime's kernels for x86 without VNNI add pairs of multiplied signed weights in
16 bits, which overflow. Measured on such a CPU with a checkpoint of OpenAI and dynamic activations: 16.5 dB
with signed weights, 22.9 with unsigned ones, 22.6 in a simulation.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.targets.activations import MIN_SQNR_DB, SAMPLES, Activation
from whisperport.targets.onnx.activations import OnnxActivations

if TYPE_CHECKING:  # boards have no package onnx
    import onnx

MULTIPLIES = ("Gemm", "MatMul")
QUANTIZED = (*MULTIPLIES, "Conv")
# An operator is ruined if an activation's typical values keep less than this. On three checkpoints: with
# attention's probabilities (10 to 17 dB) in 8 bits, encoders have 5 to 17 dB; with the input of the second
# linear of a massive block (16 to 18), 23 to 27; without these, 30 to 35. The second convolution's input
# has 19 to 21 dB, and its alternative is float32, so that limit is lower.
MIN_DB = {"w8": MIN_SQNR_DB, "fp32": 18.0}


@dataclass(frozen=True, slots=True)
class SensitiveOperator:
    """An operator that is not quantized statically, since one scale would ruin one of its activations.

    Attributes:
        node: its name.
        activation: the one that loses most.
        precision: "w8" if it multiplies by weights, else "fp32".
    """

    node: str
    activation: Activation
    precision: str

    def __str__(self) -> str:
        return f"in {self.precision} instead: {self.activation}"


def quantize_statically(
    path: Path, out: Path, arrays: Mapping[str, Path], *, examine: bool = True
) -> tuple[SensitiveOperator, ...]:
    """Quantize a file in float32.

    Args:
        path: of the file.
        out: the file to write. Its weights are written to a file beside it, with the suffix `.bin`.
        arrays: name of an input -> `.npy` file of its samples, (samples, ...).
        examine: whether to look for operators that one scale ruins.

    Returns:
        The operators that have another precision, in the order of the file.
    """
    import onnx
    from onnxruntime.quantization import QDQQuantizer, QuantType
    from onnxruntime.quantization.quant_utils import load_model_with_shape_infer

    with TemporaryDirectory(dir=path.parent) as folder:
        fused, quantized = Path(folder, "fused.onnx"), Path(folder, "quantized.onnx")
        fuse(path, fused, external=True)
        nodes = [
            node
            for node in onnx.load(fused, load_external_data=False).graph.node
            if node.op_type in QUANTIZED
        ]
        sensitive = _sensitive(fused, nodes, arrays) if examine else ()
        sensitive_nodes = {operator.node for operator in sensitive}
        quantizer = QDQQuantizer(
            load_model_with_shape_infer(fused),
            per_channel=True,
            reduce_range=False,
            weight_qType=QuantType.QUInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=calibrated(fused, QUANTIZED, samples_of(arrays), Path(folder)),
            nodes_to_quantize=[node.name for node in nodes if node.name not in sensitive_nodes],
            nodes_to_exclude=[],
            op_types_to_quantize=QUANTIZED,
            extra_options={"OpTypesToExcludeOutputQuantization": list(MULTIPLIES)},
        )
        quantizer.quantize_model()
        quantizer.model.save_model_to_file(quantized, use_external_data_format=True)
        _write(
            quantized, out, {operator.node for operator in sensitive if operator.precision == "w8"}
        )
    return sensitive


def _sensitive(
    path: Path, nodes: "list[onnx.NodeProto]", arrays: Mapping[str, Path]
) -> tuple[SensitiveOperator, ...]:
    """Return the operators with an activation that one 8-bit scale ruins."""
    program = OnnxActivations.read(path)
    weights = {weight.name for weight in program.model.graph.initializer}
    counted = {
        node.name: [
            name
            for name in (*node.input, *(node.output if node.op_type == "Conv" else ()))
            if name not in weights and name not in arrays
        ]
        for node in nodes
    }
    tensors = dict.fromkeys(name for names in counted.values() for name in names)
    samples = list(islice(samples_of(arrays), SAMPLES))
    activations = program.measured(tensors, samples)
    sensitive = []
    for node in nodes:
        own = [activations[name] for name in counted[node.name]]
        worst = min(own, key=Activation.sqnr_db, default=None)
        has_weights = node.op_type in MULTIPLIES and not weights.isdisjoint(node.input)
        precision = "w8" if has_weights else "fp32"
        if worst is not None and worst.sqnr_db() < MIN_DB[precision]:
            sensitive.append(SensitiveOperator(node.name, worst, precision))
    return tuple(sensitive)


def _write(source: Path, path: Path, in_8_bits: set[str]) -> None:
    """Write a quantized file and its weights, with 8-bit weights alone for some of its operators."""
    import onnx_ir as ir

    from whisperport.model.trace.onnx import SharedWeights, share_weights
    from whisperport.model.trace.onnx_eight_bits import store_in_8_bits

    model = ir.load(source)
    store_in_8_bits(model, in_8_bits)
    share_weights(model.graph, SharedWeights(path.with_suffix(".bin")))
    ir.save(model, path)


def fuse(path: Path, out: Path, *, external: bool = False) -> None:
    """Write the graph as ONNX Runtime simplifies it for any CPU: a MatMul and its bias become a Gemm.

    Args:
        path: the file.
        out: the file to write.
        external: whether its weights are written to a file beside it, which may be larger than 2 GB.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(out)
    if external:
        entry = "session.optimized_model_external_initializers_file_name"
        options.add_session_config_entry(entry, f"{out.stem}.data")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def samples_of(arrays: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield the samples as inputs of a run, name -> array."""
    mapped = {name: np.load(file, mmap_mode="r") for name, file in arrays.items()}
    for index in range(min(map(len, mapped.values()))):
        yield {name: np.ascontiguousarray(array[index]) for name, array in mapped.items()}


def calibrated(
    path: Path, operators: Sequence[str] | None, samples: Iterable[dict[str, Any]], folder: Path
) -> Any:
    """Return the smallest and the largest value of each activation, as a `TensorsData` of ONNX Runtime.

    ONNX Runtime's own session for this keeps every activation in memory until the end of a run, and all of
    them again as a pattern: 1.5 GB for the encoder of tiny. By priority each is measured when it is made,
    and freed after its last use: 0.3 GB, in a third of the time.

    Args:
        path: of the ONNX file.
        operators: kinds of those whose activations are measured; None: all that have float activations.
        samples: inputs of the runs, name -> array.
        folder: for temporary files.
    """
    import onnxruntime
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    augmented = os.fspath(folder / "calibrating.onnx")
    calibrator = create_calibrator(
        path,
        operators,
        augmented_model_path=augmented,
        calibrate_method=CalibrationMethod.MinMax,
        use_external_data_format=True,
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_pattern = False
    calibrator.infer_session = onnxruntime.InferenceSession(
        augmented, options, providers=["CPUExecutionProvider"]
    )
    calibrator.collect_data(Reader(samples))
    return calibrator.compute_data()


class Reader:
    """Samples as ONNX Runtime's quantizer reads them: a `CalibrationDataReader` by its methods."""

    def __init__(self, samples: Iterable[dict[str, Any]]) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next sample; None: there is no more."""
        return next(self._left, None)
