"""The spec of each board's target."""

from whisperport.program.spec import TargetSpec
from whisperport.targets.mediatek.chips import (
    LITERT,
    MDLA_3_0_GUIDE,
    MODEL_ZOO,
    VPU,
    Chip,
    Npu,
)
from whisperport.targets.mediatek.limits import (
    ACTIVATIONS,
    limits_of,
    operators_of,
    operators_source,
)

FALLBACK = "litert"
ON_THE_NPU = frozenset(
    {"encoder", "cross_kv"}
)  # the programs of each window, unless placed otherwise
FLOAT, W8A16, W8A8 = "fp16", "w8a16", "w8a8"


def precisions_of(chip: Chip) -> tuple[str, ...]:
    """Return the precisions that programs can have on a board; the first is the default.

    `fp16` is a float32 program that the NPU computes in float16 (`--relax-fp32`): the file, its inputs and
    its outputs are float32.
    """
    return (FLOAT, W8A16, W8A8) if chip.npu.w8a16 else (FLOAT, W8A8)


def spec_of(chip: Chip) -> TargetSpec:
    """Return the spec of a board's target."""
    npu = chip.npu
    return TargetSpec(
        name=chip.name,
        summary=f"{chip.board}{_runs(npu)}",
        operators=operators_of(npu),
        operators_observed=npu is VPU,
        max_rank=4,
        dtypes=ACTIVATIONS,
        formats=frozenset({"torch", "tflite"}),
        limits=limits_of(npu),
        suggested_rewrites={
            "embedding": "lookup-on-host",
            "scaled_dot_product_attention": "attention-by-softmax",
            "dropout": "drop-no-ops",
        },
        rewrites=("drop-no-ops", "fold-constants", "matmul-by-linear", "attention-by-softmax"),
        host_rewrites=("lookup-on-host",),
        rejects_programs=True,
        lowered_suffix=".tflite",
        programs=ON_THE_NPU,
        fallback=FALLBACK,
        precisions=precisions_of(chip),
        # Caches of four axes and a mask of (1, 1, 1, 449), as in a published decoder that compiled.
        # Source: superLin006/MTK_model_zoo@942c4fb whisper-kv-cache (second-hand).
        variants=dict.fromkeys(("cross_kv", "prefill_4", "prefill_64", "step"), "rank4"),
        emulation={"emulate": "on"},
        runtime="neuronrt",
        emulation_runtime="ai-edge-litert",
        extra="litert-export",
        run_extra="litert",
        sources={
            "operators": operators_source(npu),
            "dtypes": f"{MDLA_3_0_GUIDE}: data types; {MODEL_ZOO} whisper: tokens looked up on the host",
            "max_rank": f"{MDLA_3_0_GUIDE}: 5 axes for 3-D convolutions and pooling only, else up to 4",
            "formats": "ncc-tflite reads .tflite; torch programs are converted by litert_torch first",
            "domains": f"{LITERT}: TFLite's own operators",
            "static": f"{MODEL_ZOO} .claude/doc/mtk_mdla_operators.md: fixed shapes only",
            "precisions": f"{MDLA_3_0_GUIDE}: data types; {npu.sources['w8a16']}",
        },
    )


def _runs(npu: Npu) -> str:
    if npu is VPU:
        return " has no MDLA: its CPU runs Whisper, with another target"
    if npu.transformer is False:
        return f", {npu.name}: linears such as cross_kv on the NPU, and no attention"
    return f", {npu.name}: the encoder on the NPU; the decoder on the CPU"
