"""Hailo's chips as data: what their compiler supports, each limit with where it was read.

Nothing here was run: neither compiler nor chip was at hand, and the compiler's own list of operators is
not public. What its documentation and its users say is rejected is a limit; what was merely not seen in
programs known to compile is told apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whisperport.spec import Limit, Package, TargetSpec

TOOLKIT = "hailocs/hailo-whisper@ebe7a85"  # Hailo's own
NOTEBOOK = "ktomanek/huggingface_whisper_to_hailo_conversion@fdf1aab"  # another's, with logs
EXAMPLES = "hailo-ai/Hailo-Application-Code-Examples@5eab622 runtime/python/speech_recognition"
FORUM = "community.hailo.ai 19530"

TINY, BASE = 384, 512  # widths of encoders

# 3.31 and later 3.x for Hailo-8 and 8L, 5.x for Hailo-10H: the README of TOOLKIT.
COMPILER_3, COMPILER_5 = (3, 31), (5, 0)

# By aten's names. The compiler's own list is not public; seen to be parsed: MatMul, Softmax,
# LayerNormalization or what it is made of, GELU by Erf, Conv2d, Add, Mul, Transpose, Reshape. torch's other
# products become MatMul in ONNX.
OPERATORS = frozenset(
    {
        *("add", "addmm", "bmm", "clone", "conv", "div", "erf", "gelu", "layer_norm", "linear"),
        *("matmul", "mean", "mm", "mul", "pow", "reshape", "softmax", "sqrt", "sub", "transpose"),
    }
)
OPSETS = frozenset({13, 17})
MAX_MATMUL_COLUMNS = 12_967  # columns: the largest quarter of 51865

REJECTED = frozenset({"embedding", "gather", "index", "scaled_dot_product_attention"})

LIMITS = (
    Limit(
        rule="WP101",
        operators=REJECTED,
        value=frozenset(),
        source=f"{TOOLKIT} conversion/ and hailo-compatibility-changes.patch: lookups are cut off, and "
        "attention is written as products and a softmax",
    ),
    Limit(
        rule="WP404",
        kind="not seen",
        formats=frozenset({"onnx"}),
        value=OPSETS,
        source=f"{TOOLKIT} export/ (13) and {NOTEBOOK} (17)",
    ),
    Limit(
        rule="WP205",
        value=frozenset({4}),
        source=f"{TOOLKIT} hailo-compatibility-changes.patch: conv1d becomes conv2d",
        rewrite="conv1d-by-conv2d",
    ),
    Limit(rule="WP208", value=1, source=f"{TOOLKIT} export/export_whisper_model.py: batch 1"),
    Limit(
        rule="WP207",
        value=MAX_MATMUL_COLUMNS,
        source=f"{TOOLKIT} hailo-compatibility-changes.patch: one product is too big for Hailo-8",
        rewrite="split-vocab-projection",
        kind="warning",
    ),
)
SOURCES = {
    "operators": f"seen in {TOOLKIT} and {NOTEBOOK}; the compiler's own list is not public",
    "dtypes": f"{EXAMPLES}: float32 buffers, and tokens looked up on the host",
    "max_rank": f"{TOOLKIT}, {FORUM}: NHWC",
    "formats": f"{TOOLKIT} conversion/: translate_onnx_model; torch programs are written as ONNX first",
    "domains": f"{TOOLKIT} and {NOTEBOOK} use ONNX's own operators only",
    "static": f"{TOOLKIT} export/export_whisper_model.py: fixed shapes",
    "precisions": f"{TOOLKIT} conversion/optimization/: the compiler's 8 bits, and a16_w16 for some layers",
    "windows_s": f"{TOOLKIT} README, and the names of the files that {EXAMPLES} fetches",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One chip: its target's spec, and how the vendor's tools name it."""

    spec: TargetSpec
    sequence_length: Mapping[int, int]  # width -> tokens of the published decoder
    architectures: frozenset[int]  # of HEFs that it runs: see hef.ARCHITECTURES
    compiled_for: frozenset[int]  # of HEFs that are meant for this chip
    compiler: tuple[int, int]  # the oldest that serves it; a later major version serves others

    @property
    def name(self) -> str:
        """As the compiler's `hw_arch`, and as the target is called."""
        return self.spec.name


def _spec(name: str, summary: str, windows_s: Mapping[int, float]) -> TargetSpec:
    return TargetSpec(
        name=name,
        summary=summary,
        operators=OPERATORS,
        operators_observed=True,
        max_rank=4,
        formats=frozenset({"torch", "onnx"}),
        limits=LIMITS,
        suggested_rewrites={
            "embedding": "lookup-on-host",
            "scaled_dot_product_attention": "attention-by-softmax",
            "dropout": "drop-no-ops",
        },
        # `split-vocab-projection` as TOOLKIT's patch of TextDecoder: 12966, 12966, 12966 and 12967 columns.
        # `conv1d-by-conv2d` as its patch of AudioEncoder.
        rewrites=(
            "drop-no-ops",
            "fold-constants",
            "matmul-by-linear",
            "attention-by-softmax",
            "conv1d-by-conv2d",
            "split-vocab-projection",
        ),
        host_rewrites=("lookup-on-host", "join-on-host"),
        rejects_programs=True,
        lowered_suffix=".onnx",
        programs=frozenset({"encoder", "uncached_decoder"}),
        fallback="onnxruntime",
        precisions=("w8a8",),  # adds in 16 bits
        # Source: TOOLKIT export/export_whisper_model.py and the patch beside it, which also gives
        # attention its batch axis, as NOTEBOOK does; no rank-3 product is known to compile.
        variants={"encoder": "nchw"},
        windows_s=windows_s,
        emulation={"emulation": "onnx"},
        runtime="hailort",
        emulation_runtime="onnxruntime",
        extra="export",
        run_extra="hailo",
        packages={
            "hailo": (
                Package("xxhash", "xxhash"),
                Package(
                    "hailo_platform", "hailort", "get HailoRT, with its Python package, at Hailo's"
                ),
            )
        },
        sources=SOURCES,
    )


# hailo-ai/hailort, libhailort/src/device_common/device_internal.cpp: 739 (4.23) and 736 (5.2).
HAILO8 = Chip(
    spec=_spec("hailo8", "Hailo-8: the encoder; the decoder on the CPU", {TINY: 10.0, BASE: 5.0}),
    sequence_length={TINY: 32, BASE: 24},
    architectures=frozenset({1, 2, 3}),
    compiled_for=frozenset({1, 2}),
    compiler=COMPILER_3,
)
HAILO8L = Chip(
    spec=_spec("hailo8l", "Hailo-8L: as hailo8, on the smaller chip", {TINY: 10.0, BASE: 5.0}),
    sequence_length={TINY: 32, BASE: 24},
    architectures=frozenset({3}),
    compiled_for=frozenset({3}),
    compiler=COMPILER_3,
)
HAILO10H = Chip(
    spec=_spec("hailo10h", "Hailo-10H: as hailo8, by compiler 5", {TINY: 10.0, BASE: 10.0}),
    sequence_length={TINY: 32, BASE: 64},
    architectures=frozenset({4, 103, 104, 105}),
    compiled_for=frozenset({4, 103, 104, 105}),
    compiler=COMPILER_5,
)
