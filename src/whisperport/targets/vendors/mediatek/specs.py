"""The spec of each board's target, and the limits of each NPU for TFLite files, each with its source."""

from collections.abc import Iterable, Mapping

from whisperport.program.spec import Limit, Lowering, Runs, Software, Support, TargetSpec
from whisperport.targets.vendors.mediatek.chips import (
    LITERT,
    MDLA_2_0,
    MDLA_2_0_GUIDE,
    MDLA_3_0,
    MDLA_3_0_GUIDE,
    MDLA_5_3,
    MODEL_ZOO,
    MODEL_ZOO_OPERATORS,
    RADXA,
    VPU,
    Chip,
    Npu,
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
        supports=Support(
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
            rejects_programs=True,
        ),
        lowering=Lowering(
            rewrites=("drop-no-ops", "fold-constants", "matmul-by-linear", "attention-by-softmax"),
            host_rewrites=("lookup-on-host",),
            lowered_suffix=".tflite",
            # Caches of four axes and a mask of (1, 1, 1, 449), as in a published decoder that compiled.
            # Source: superLin006/MTK_model_zoo@942c4fb whisper-kv-cache (second-hand).
            variants=dict.fromkeys(("cross_kv", "prefill_4", "prefill_64", "step"), "rank4"),
        ),
        runs=Runs(
            programs=ON_THE_NPU,
            fallback=FALLBACK,
            precisions=precisions_of(chip),
            emulation={"emulate": "on"},
        ),
        software=Software(
            runtime="neuronrt",
            emulation_runtime="ai-edge-litert",
            extra="litert-export",
            run_extra="litert",
        ),
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


TFLITE = frozenset({"tflite"})
LONGEST_AXIS = 65_535
LINEAR_BATCHES = frozenset({1, 2, 4, 8})
ACTIVATIONS = frozenset({"float32", "float16", "int8", "uint8", "int16"})

# Operators of MDLA 5.3: name in TFLite's schema -> name in `whisperport check`.
OPERATORS: Mapping[str, str] = {
    **{name: name.lower() for name in ("ABS", "ADD", "DIV", "ELU", "EXP", "GELU", "MAXIMUM")},
    **{name: name.lower() for name in ("MEAN", "MINIMUM", "MUL", "NEG", "POW", "RELU")},
    **{name: name.lower() for name in ("RESHAPE", "RSQRT", "SLICE", "SOFTMAX", "SPLIT", "SQRT")},
    **{name: name.lower() for name in ("SQUARE", "SQUARED_DIFFERENCE", "SQUEEZE", "SUB", "SUM")},
    **{name: name.lower() for name in ("TANH", "TRANSPOSE")},
    **{name: name for name in ("ARG_MAX", "ARG_MIN", "AVERAGE_POOL_2D", "BATCH_TO_SPACE_ND")},
    **{name: name for name in ("DEPTHWISE_CONV_2D", "DEPTH_TO_SPACE", "DEQUANTIZE", "HARD_SWISH")},
    **{name: name for name in ("L2_NORMALIZATION", "L2_POOL_2D", "LSTM", "MAX_POOL_2D")},
    **{name: name for name in ("MIRROR_PAD", "PACK", "PRELU", "QUANTIZE", "REDUCE_MIN", "RELU6")},
    **{name: name for name in ("RELU_N1_TO_1", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR")},
    **{name: name for name in ("SPACE_TO_BATCH_ND", "SPACE_TO_DEPTH", "SPLIT_V", "TILE")},
    **{name: name for name in ("TRANSPOSE_CONV", "UNPACK")},
    "BATCH_MATMUL": "matmul",
    "CAST": "to",
    "CONCATENATION": "cat",
    "CONV_2D": "conv",
    "EXPAND_DIMS": "unsqueeze",
    "FULLY_CONNECTED": "linear",
    "LOGISTIC": "sigmoid",
    "PAD": "constant_pad_nd",
    "REDUCE_MAX": "amax",
    "STRIDED_SLICE": "slice",
}

# Operators of torch that litert_torch 0.10.0 writes with operators of `OPERATORS` only.
TORCH_OPERATORS = frozenset({"addmm", "bmm", "clone", "layer_norm", "mm"})

# Operators of `OPERATORS` that the guide of MDLA 3.0 does not list. This project has the guide's list up to
# POW, in the order of MediaTek's own names; operators after POW are assumed to be as in MDLA 5.3.
NOT_IN_MDLA_3_0 = frozenset(
    {"ARG_MAX", "ARG_MIN", "BATCH_MATMUL", "CAST", "EXP", "EXPAND_DIMS", "GELU"}
)
ATTENTION = frozenset({"matmul", "bmm", "scaled_dot_product_attention"})


def names(operators: Iterable[str]) -> frozenset[str]:
    """Return the names in `whisperport check` of operators that are named as in TFLite's schema."""
    return frozenset(OPERATORS[name] for name in operators)


def operators_of(npu: Npu) -> frozenset[str]:
    """Return the operators of an NPU, by their names in `whisperport check`; empty: none is known."""
    return frozenset() if npu is VPU else names(OPERATORS) | TORCH_OPERATORS


def operators_source(npu: Npu) -> str:
    """Return the document that `operators_of` comes from."""
    return {
        VPU.name: f"none: MediaTek publishes no list of operators for {VPU.name} alone",
        MDLA_2_0.name: f"{MODEL_ZOO_OPERATORS}; inferred for {MDLA_2_0.name}, which may have fewer",
        MDLA_3_0.name: f"{MDLA_3_0_GUIDE}, up to POW; the others {MODEL_ZOO_OPERATORS}",
        MDLA_5_3.name: MODEL_ZOO_OPERATORS,
    }[npu.name]


def limits_of(npu: Npu) -> tuple[Limit, ...]:
    """Return the limits of an NPU for TFLite files, in the order in which they are checked."""
    guide = _guide(npu)
    limits = [
        *_attention(npu),
        Limit(rule="WP212", value=ACTIVATIONS, formats=TFLITE, source=f"{guide}: data types"),
        Limit(rule="WP213", formats=TFLITE, source=f"{guide}: symmetric signed 16-bit"),
        *_widths(npu),
        Limit(
            rule="WP211",
            value=names(npu.per_channel & OPERATORS.keys()),
            formats=TFLITE,
            source=npu.sources["per_channel"],
        ),
        Limit(
            rule="WP210",
            value=LONGEST_AXIS,
            formats=TFLITE,
            source=f"{guide}: height, width and channels, 1 to 65535",
        ),
    ]
    if npu.engine == "mdla":
        limits.append(
            Limit(
                rule="WP502",
                value=LINEAR_BATCHES,
                operators=frozenset({"linear"}),
                formats=TFLITE,
                source=f"{guide}: FULLY_CONNECTED with another batch size is converted to CONV_2D",
                kind="warning",
            )
        )
    return tuple(limits)


def _guide(npu: Npu) -> str:
    if npu is MDLA_5_3:
        return f"{MDLA_3_0_GUIDE} (inferred for {npu.name})"
    return MDLA_3_0_GUIDE if npu is MDLA_3_0 else f"{MDLA_2_0_GUIDE}"


def _attention(npu: Npu) -> list[Limit]:
    """Return the limits for the operators of attention, and for others that MDLA 5.3 added."""
    if npu not in (MDLA_2_0, MDLA_3_0):
        return []
    unlisted = Limit(
        rule="WP104",
        operators=names(NOT_IN_MDLA_3_0) | {"bmm"},
        value=frozenset(),
        source=f"{MDLA_3_0_GUIDE}: not in its list",
        kind="not seen",
    )
    if npu is MDLA_3_0:
        return [unlisted]
    return [Limit(rule="WP101", operators=ATTENTION, value=frozenset(), source=RADXA), unlisted]


def _widths(npu: Npu) -> list[Limit]:
    """Return the limit for 16-bit activations with 8-bit weights, if the NPU does not support them."""
    if npu.w8a16:
        return []
    return [Limit(rule="WP214", formats=TFLITE, source=npu.sources["w8a16"])]
