"""The spec of each NPU's target."""

from whisperport.spec import TargetSpec
from whisperport.targets.ethos_u.chips import EXECUTORCH, VELA, Npu

EXTRA = "export"
FALLBACK = "onnxruntime"


def spec_of(npu: Npu) -> TargetSpec:
    """Return the spec of an NPU's target."""
    return TargetSpec(
        name=npu.name,
        summary=f"Arm {npu.title} NPU: microcontrollers and Linux chips, {' or '.join(npu.precisions)}",
        max_rank=6,
        dtypes=frozenset({"float32"}),
        rewrites=("drop-no-ops", "fold-constants"),
        rejects_programs=True,
        lowered_suffix=".pt2",
        fallback=FALLBACK,
        precisions=npu.precisions,
        emulation={"emulate": "on"},
        runtime="executorch",
        emulation_runtime="torch",
        extra=EXTRA,
        run_extra=EXTRA,
        sources={
            "formats": f"{EXECUTORCH} torch.export: Arm's quantizer gets an ExportedProgram",
            "domains": f"{EXECUTORCH} backends/arm: all operators are aten's",
            "static": f"{VELA} compiles graphs of fixed shapes",
            "dtypes": "inputs and outputs are quantized from and to float32 on the CPU",
            "max_rank": f"{EXECUTORCH} backends/arm/arm_vela.py: compiled programs have 6 axes",
            "precisions": npu.sources["precisions"],
        },
    )
