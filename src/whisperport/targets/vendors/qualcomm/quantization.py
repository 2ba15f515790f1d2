"""Quantize an ONNX file to 8-bit weights and 16-bit activations, with QuantizeLinear and DequantizeLinear.

ONNX Runtime's own quantizer has a configuration for this provider. Every tensor's range is that of the
calibration samples, times `MARGIN`: a value outside of the range is clipped, which is the largest error of
all. Of the embedded model's `step`, calibrated with 16 calls, new values were wrong by up to 0.2 of the
largest one, with the margin by 0.014, and the smallest SQNR rose from 29.8 to 37.9 dB. A margin of 2 costs
one of 16 bits. Weights have a scale per output channel, since one row of large weights, as of a massive
activation, leaves few steps to all others: the encoder of a checkpoint with such a row has 22 dB in the
simulator, and 6 dB with one scale per tensor. QNN has no such scales for a MatMul: a linear with a bias
becomes a Gemm.

The second operand of a matrix multiplication of two activations, such as the keys and values of attention,
is converted before it: see `Operand`. Left in unsigned 16 bits, the simulator reduces it to 8 bits of its
complete range, margin included: a random matmul has 39.5 dB for every generation of the NPU. In signed 16
bits with zero point 0, it has 78.8 dB, and the smallest SQNR of the logits of the embedded model's
`prefill_64` rises from 33.2 to 40.2 dB (onnxruntime-qnn 2.7.0, v75). In 8 bits of a narrower range, it
rises from 31.6 to 37.8 dB (v68).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.targets.onnx.static_quantization import Reader, calibrated, fuse, samples_of
from whisperport.targets.quantizing import replace_by_quantized
from whisperport.targets.vendors.qualcomm.chips import Operand

MARGIN = 2.0


def quantize_in_place(
    path: Path, arrays: Mapping[str, Path], operand: Operand, *, target: str, extra: str
) -> None:
    """Quantize a file in place.

    Args:
        path: of the ONNX file in float32, which holds its weights. After an error it is unchanged.
        arrays: name of an input -> `.npy` file of its samples, (samples, ...).
        operand: of the NPU.
        target: name of the target, for messages.
        extra: pip extra that installs the quantizer, for messages.

    Raises:
        MissingPackageError: the quantizer is not installed.
        LoweringError: the quantizer could not quantize the file.
    """
    replace_by_quantized(
        path,
        lambda source, out: _quantize(source, out, arrays, operand),
        failure="ONNX Runtime could not quantize",
        missing="ONNX Runtime's quantizer needs a package that is missing",
        target=target,
        extra=extra,
    )


def _quantize(path: Path, out: Path, arrays: Mapping[str, Path], operand: Operand) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

    source = out.with_name(f"fused-{path.name}")
    fuse(path, source)
    model = _prepared(source)
    types = {
        value.name: onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        for value in model.graph.input
    }
    operands = _second_operands(model)
    del model  # its memory

    def samples() -> Iterator[dict[str, Any]]:
        """Yield the calibration set, which has floats only, with integers for tokens and positions."""
        for sample in samples_of(arrays):
            yield {name: array.astype(types[name], copy=False) for name, array in sample.items()}

    ranges = _ranges(source, samples(), out.parent)
    overrides = {
        name: [{"quant_type": QuantType.QUInt16, **_bounds(bounds, MARGIN)}]
        for name, bounds in ranges.items()
    }
    for name, nodes in operands.items():
        overrides[name][0]["convert"] = {
            "quant_type": QuantType[operand.quant_type],
            "symmetric": operand.symmetric,
            "recv_nodes": nodes,
            **_bounds(ranges[name], operand.margin),
        }
    configuration = get_qnn_qdq_config(
        source,
        Reader(islice(samples(), 1)),  # the ranges are known already
        activation_type=QuantType.QUInt16,
        weight_type=QuantType.QUInt8,
        per_channel=True,
        init_overrides=overrides,
        add_qtype_converts=False,  # all conversions are in the overrides
    )
    quantize(source, out, configuration)


def _prepared(path: Path) -> Any:
    """Name the nodes of a file, and give each Gather a table of its own if another node multiplies by it.

    Nodes without a name are the same one to the quantizer: what is converted for one is for all. A table is
    an activation, in 16 bits, and a weight has 8: the provider takes one form of a tensor only.

    Returns:
        The model in the file.
    """
    import onnx

    model = onnx.load(path)
    graph = model.graph
    unnamed = [node for node in graph.node if not node.name]
    for node in unnamed:
        node.name = f"node of {node.output[0]}"
    weights = {weight.name: weight for weight in graph.initializer}
    readers = Counter(name for node in graph.node for name in set(node.input))
    shared = [
        node
        for node in graph.node
        if node.op_type == "Gather" and node.input[0] in weights and readers[node.input[0]] > 1
    ]
    for node in shared:
        table = graph.initializer.add()
        table.CopyFrom(weights[node.input[0]])
        table.name = node.input[0] = f"{node.name}.{table.name}"
    if unnamed or shared:
        onnx.save(model, path)
    return model


def _ranges(
    source: Path, samples: Iterable[dict[str, Any]], folder: Path
) -> dict[str, tuple[float, float]]:
    """Return name of a tensor -> its smallest and largest value in the samples and 0."""
    ranges = {}
    for name, observed in calibrated(source, None, samples, folder).items():
        low, high = (
            float(bound(values))
            for bound, values in zip((np.min, np.max), observed.range_value, strict=True)
        )
        ranges[name] = min(low, 0.0), max(high, 0.0)
    return ranges


def _bounds(values: tuple[float, float], margin: float) -> dict[str, Any]:
    low, high = values
    return {"rmin": np.float32(low * margin), "rmax": np.float32(high * margin)}


def _second_operands(model: Any) -> dict[str, set[str]]:
    """Return name of an activation -> the names of the MatMul nodes whose second operand it is."""
    weights = {weight.name for weight in model.graph.initializer}
    readers: dict[str, set[str]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] not in weights:
            readers.setdefault(node.input[1], set()).add(node.name)
    return readers
