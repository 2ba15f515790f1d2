"""The spec of each chip's target."""

from whisperport.spec import Package, TargetSpec
from whisperport.targets.onnx_target import onnx_spec
from whisperport.targets.qualcomm.chips import Chip

PACKAGE, EXTRA = "onnxruntime-qnn", "qualcomm"
RAN = "onnxruntime-qnn 2.7.0, v75"
OPSET = 20  # in which GELU is one operator


def spec_of(chip: Chip) -> TargetSpec:
    """Return the spec of a chip's target."""
    architecture = chip.architecture
    limit = " (not for `step`)" if architecture.min_rows > 1 else ""
    return onnx_spec(
        name=chip.name,
        summary=f"{chip.marketing_name}: Hexagon NPU {architecture.name}, "
        f"{' or '.join(architecture.precisions)}{limit}",
        max_rank=5,
        dtypes=frozenset({"float32", "float16", "int32"}),
        domains=frozenset({"com.microsoft"}),
        precisions=architecture.precisions,
        runtime=PACKAGE,
        run_extra=EXTRA,
        packages={EXTRA: (Package("onnxruntime_qnn", PACKAGE),)},
        sources={
            "formats": "the provider of onnxruntime-qnn compiles ONNX; torch programs are converted first",
            "domains": "QuantizeLinear and DequantizeLinear of 16 bits are com.microsoft's below opset 21",
            "static": "onnxruntime.ai, QNN Execution Provider: no dynamic shapes",
            "dtypes": f"a graph with inputs of each ran in the simulator; int64 did not ({RAN})",
            "max_rank": f"a graph of rank 5 ran in the simulator, one of rank 6 was rejected ({RAN})",
            "precisions": architecture.source,
        },
    )
