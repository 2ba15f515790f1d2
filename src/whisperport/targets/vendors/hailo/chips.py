"""The limits of Hailo's chips and their compiler, as data, each with its source.

Nothing here was run: this project had neither the compiler nor a chip, and the compiler's list of
operators is not public. An operator is a limit if documentation or users report that it is rejected. If it
merely does not occur in programs that are known to compile, the limit has the kind `not seen`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whisperport.program.spec import Limit, Package, TargetSpec
from whisperport.targets.onnx.target import onnx_lowering, onnx_runs, onnx_software, onnx_support

TOOLKIT = "hailocs/hailo-whisper@ebe7a85"  # published by Hailo
NOTEBOOK = "ktomanek/huggingface_whisper_to_hailo_conversion@fdf1aab"  # by a user, with logs
EXAMPLES = "hailo-ai/Hailo-Application-Code-Examples@5eab622 runtime/python/speech_recognition"
FORUM = "community.hailo.ai 19530"

TINY, BASE = 384, 512  # widths d of whisper-tiny and whisper-base

# Dataflow Compiler 3.31 and later 3.x for Hailo-8 and 8L, 5.x for Hailo-10H. Source: README of TOOLKIT.
COMPILER_3, COMPILER_5 = (3, 31), (5, 0)

# Names of aten operators. The compiler's own list is not public. In logs it parses MatMul, Softmax,
# LayerNormalization or its parts, GELU with Erf, Conv2d, Add, Mul, Transpose and Reshape. The other matrix
# multiplications of torch become MatMul in ONNX.
OPERATORS = frozenset(
    {
        *("add", "addmm", "bmm", "clone", "conv", "div", "erf", "gelu", "layer_norm", "linear"),
        *("matmul", "mean", "mm", "mul", "pow", "reshape", "softmax", "sqrt", "sub", "transpose"),
    }
)
OPSETS = frozenset({13, 17})
MAX_MATMUL_COLUMNS = 12_967  # the largest quarter of the vocabulary of 51865 tokens

REJECTED = frozenset({"embedding", "gather", "index", "scaled_dot_product_attention"})

LIMITS = (
    Limit(
        rule="WP101",
        operators=REJECTED,
        value=frozenset(),
        source=f"{TOOLKIT} conversion/ and hailo-compatibility-changes.patch: lookups are removed from the "
        "graph, and attention is written as MatMul and Softmax",
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
        source=f"{TOOLKIT} hailo-compatibility-changes.patch: one MatMul is too large for Hailo-8",
        rewrite="split-vocab-projection",
        kind="warning",
    ),
)
SOURCES = {
    "operators": f"operators in {TOOLKIT} and {NOTEBOOK}; the compiler's own list is not public",
    "dtypes": f"{EXAMPLES}: float32 buffers, and tokens looked up on the host",
    "max_rank": f"{TOOLKIT}, {FORUM}: NHWC",
    "formats": f"{TOOLKIT} conversion/: translate_onnx_model; torch programs are converted to ONNX first",
    "domains": f"{TOOLKIT} and {NOTEBOOK} use only ONNX's own operators",
    "static": f"{TOOLKIT} export/export_whisper_model.py: fixed shapes",
    "precisions": f"{TOOLKIT} conversion/optimization/: the compiler's 8 bits, and a16_w16 for some layers",
    "windows_s": f"{TOOLKIT} README, and the names of the files that {EXAMPLES} fetches",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One chip: the spec of its target, and its names in the vendor's tools."""

    spec: TargetSpec
    sequence_length: Mapping[int, int]  # model width d -> sequence length of the published decoder
    architectures: frozenset[int]  # architectures of HEFs that it runs; see hef.ARCHITECTURES
    compiled_for: frozenset[int]  # architectures of HEFs that were compiled for this chip
    compiler: tuple[int, int]  # oldest supported version; later major versions are for other chips

    @property
    def name(self) -> str:
        """Name of the target, which is also the compiler's `hw_arch`."""
        return self.spec.name


def _spec(name: str, summary: str, windows_s: Mapping[int, float]) -> TargetSpec:
    return TargetSpec(
        name=name,
        summary=summary,
        supports=onnx_support(
            operators=OPERATORS,
            operators_observed=True,
            max_rank=4,
            limits=LIMITS,
            suggested_rewrites={
                "embedding": "lookup-on-host",
                "scaled_dot_product_attention": "attention-by-softmax",
                "dropout": "drop-no-ops",
            },
        ),
        lowering=onnx_lowering(
            # `split-vocab-projection` as TOOLKIT's patch of TextDecoder: 12966, 12966, 12966 and 12967
            # columns. `conv1d-by-conv2d` as its patch of AudioEncoder.
            rewrites=(
                "drop-no-ops",
                "fold-constants",
                "matmul-by-linear",
                "attention-by-softmax",
                "conv1d-by-conv2d",
                "split-vocab-projection",
            ),
            host_rewrites=("lookup-on-host", "join-on-host"),
            # Source: TOOLKIT export/export_whisper_model.py and the patch beside it, which also gives
            # attention its batch axis, as NOTEBOOK does. No MatMul of rank 3 is known to compile.
            variants={"encoder": "nchw"},
        ),
        runs=onnx_runs(
            programs=frozenset({"encoder", "uncached_decoder"}),
            precisions=("w8a8",),  # with element-wise additions in 16 bits
            windows_s=windows_s,
        ),
        software=onnx_software(
            runtime="hailort",
            run_extra="hailo",
            packages={
                "hailo": (
                    Package(
                        "hailo_platform",
                        "hailort",
                        "get HailoRT with its Python package from Hailo's developer zone",
                    ),
                )
            },
        ),
        sources=SOURCES,
    )


# hailo-ai/hailort, libhailort/src/device_common/device_internal.cpp: 739 (4.23) and 736 (5.2).
HAILO8 = Chip(
    spec=_spec(
        "hailo8", "Hailo-8 runs the encoder; the CPU runs the decoder", {TINY: 10.0, BASE: 5.0}
    ),
    sequence_length={TINY: 32, BASE: 24},
    architectures=frozenset({1, 2, 3}),
    compiled_for=frozenset({1, 2}),
    compiler=COMPILER_3,
)
HAILO8L = Chip(
    spec=_spec(
        "hailo8l", "Hailo-8L runs the encoder; the CPU runs the decoder", {TINY: 10.0, BASE: 5.0}
    ),
    sequence_length={TINY: 32, BASE: 24},
    architectures=frozenset({3}),
    compiled_for=frozenset({3}),
    compiler=COMPILER_3,
)
HAILO10H = Chip(
    spec=_spec(
        "hailo10h", "Hailo-10H runs the encoder; the CPU runs the decoder", {TINY: 10.0, BASE: 10.0}
    ),
    sequence_length={TINY: 32, BASE: 64},
    architectures=frozenset({4, 103, 104, 105}),
    compiled_for=frozenset({4, 103, 104, 105}),
    compiler=COMPILER_5,
)
