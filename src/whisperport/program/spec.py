"""Descriptions of programs and targets as data, for the checks, the command line, manifests and docs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from whisperport.program.program_kind import ProgramKind, kind_of
from whisperport.program.strict_json import Field

DTYPES = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
DTYPES |= {"bfloat16", "float16", "float32", "float64"}


def _dtype(dtype: Field) -> str:
    return dtype.one_of(sorted(DTYPES))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, static shape and dtype (numpy's name) of one input or output of a program."""

    name: Annotated[str, Field.non_empty_text]
    shape: tuple[Annotated[int, Field.positive], ...]
    dtype: Annotated[str, _dtype] = "float32"


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The signature of one program: its name, inputs and outputs, in the order of the lowered program."""

    name: Annotated[str, Field.non_empty_text]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def kind(self) -> ProgramKind:
        """What the program computes, as its name tells."""
        return kind_of(self.name)


@dataclass(frozen=True, slots=True)
class Rejection:
    """One node that a target does not support or a rewrite does not change, and why.

    Attributes:
        node: name of the node.
        reason: the value found and the limit, such as "rank 5 is above 4".
        rule: code of the rule, such as "WP201"; empty if no rule applies.
        place: where the node is in the model's code, such as "blocks.0.attn, whisper/model.py:111"; empty:
            the file does not state it.
    """

    node: str
    reason: str
    rule: str = ""
    place: str = field(default="", compare=False)


FindingKind = Literal["rejected", "not seen", "warning"]
"""What is known about a node that exceeds a limit.

`rejected`: the vendor's documentation or tool says that the node does not compile. `not seen`: the node
occurs in no program that is known to compile; nothing else is known. `warning`: the node compiles, but
perhaps only on some chips or with different results; the reason says what to check.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of a target: a property of nodes that the target does not support.

    Attributes:
        rule: code of the rule that checks the limit, such as "WP301"; see `whisperport explain WP301`.
        source: the document or measurement that the limit comes from.
        value: the limit itself, as the rule defines it: a rank, a set of dtypes, …
        operators: operators that the limit applies to; empty: every node.
        formats: program formats that the limit applies to: "torch", "onnx", "tflite"; empty: all.
        rewrite: the suggested rewrite, which produces a supported form; empty if there is none.
        kind: what is known about a node that exceeds the limit.
        parts: for each part that a rejected node is decomposed into, one after another, whether it is
            delegated. Default: one part, which is not.
    """

    rule: str
    source: str
    value: Any = None
    operators: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    rewrite: str = ""
    kind: FindingKind = "rejected"
    parts: tuple[bool, ...] = (False,)


@dataclass(frozen=True, slots=True)
class Package:
    """One Python package that is required to lower for a target or to run on it.

    Attributes:
        module: import name of the package.
        name: name of the distribution, for its version.
        source: where to get the package if no package index has it; empty: the pip extra installs it.
    """

    module: str
    name: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class UncachedForm:
    """Form of the inputs and outputs of `uncached_decoder`, the decoder without KV cache.

    Attributes:
        sequence_length: S, number of tokens of every run, including the prompt; at least 8, because the
            prompt alone has 4.
        positions: who adds the positional embeddings: "host", or "graph" for the program itself.
            Default: "host".
        pieces: number of outputs that the logits of the vocabulary are split into; at least 1. Default: 4.

    Raises:
        ValueError: `sequence_length` or `pieces` is too small.
    """

    sequence_length: int
    positions: Literal["host", "graph"] = "host"
    pieces: int = 4

    def __post_init__(self) -> None:
        if self.sequence_length < 8 or self.pieces < 1:
            raise ValueError(
                f"`sequence_length` is {self.sequence_length} and `pieces` {self.pieces}; "
                "expected at least 8 and 1"
            )

    @property
    def layout(self) -> tuple[int, int]:
        """Sizes of the last two axes of the embeddings: (S, 1) or (1, S)."""
        return (self.sequence_length, 1) if self.positions == "host" else (1, self.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringCost:
    """Memory, disk space and time that lowering to a target needs, fitted to measured exports.

    Attributes:
        base_bytes: memory of Python, torch and the compiler, without weights.
        bundle_factor: peak memory per byte of weights, to export a complete bundle.
        program_factor: peak memory per byte of weights, to lower a single program.
        base_s: seconds of CPU time, without weights.
        s_per_gb: seconds of CPU time per GB of weights.
        temporary_factor: disk space of temporary files per byte of weights. Default: 0.
    """

    base_bytes: float
    bundle_factor: float
    program_factor: float
    base_s: float
    s_per_gb: float
    temporary_factor: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a target's compiler accepts; `check` compares programs with it.

    Attributes:
        operators: operators that the target's compiler supports; None: only the compiler knows.
        operators_observed: True if the vendor publishes no list, so that `operators` are those seen in
            programs that are known to compile.
        max_rank: highest tensor rank that the compiler accepts.
        dtypes: dtypes that inputs and outputs may have.
        formats: program formats that the compiler reads: "torch", "onnx", "tflite".
        static: True if every axis must have a fixed size.
        domains: domains of custom ONNX operators that the target supports, such as "com.microsoft".
        limits: further limits.
        suggested_rewrites: operator -> rewrite that replaces it.
        rejects_programs: True if the compiler rejects a program with an unsupported node; False if such a
            node runs on the CPU.
        folds_constants: False if the runtime runs nodes of a TFLite file that depend on constants only.
    """

    operators: frozenset[str] | None = None
    operators_observed: bool = False
    max_rank: int = 8
    dtypes: frozenset[str] = frozenset({"float32"})
    formats: frozenset[str] = frozenset({"torch"})
    static: bool = True
    domains: frozenset[str] = frozenset()
    limits: tuple[Limit, ...] = ()
    suggested_rewrites: Mapping[str, str] = field(default_factory=dict)
    rejects_programs: bool = False
    folds_constants: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """How programs are prepared for a target, and how they are written.

    Attributes:
        variants: program -> its variant in `trace/variants.py`; other programs have the default variant.
        rewrites: names of the rewrites that are applied, in this order.
        host_rewrites: names of the rewrites that move steps to the host, in this order; `export` does not
            use them.
        masks: precision -> number that is added to the attention scores of hidden tokens, -30000 to -16;
            other precisions: -30000 for "fp32", -64 for the others. `export` chooses a lower number if the
            model's scores need it.
        batch: number of texts that the program `step_B` of a new bundle decodes together, if `step` runs on
            this target and the user does not choose; 1: no such program. See `BATCHES` in
            `trace/variants.py`.
        sums_exponentials: True if `step` and `step_B` of new bundles return `logsumexp` in the precisions
            "fp32" and "w8", and every `prefill_P` in "w8"; see `signatures.py`. For runtimes that compute
            it faster than numpy.
        lowered_suffix: suffix of the file that `whisperport lower` writes, such as ".onnx".
        lowered_max_rank: highest tensor rank in that file; 0: the `max_rank` that the target supports.
        cost: what lowering needs; None: not measured, so the most expensive measured target is assumed.
    """

    variants: Mapping[str, str] = field(default_factory=dict)
    rewrites: tuple[str, ...] = ()
    host_rewrites: tuple[str, ...] = ()
    masks: Mapping[str, float] = field(default_factory=dict)
    batch: int = 1
    sums_exponentials: bool = False
    lowered_suffix: str = ""
    lowered_max_rank: int = 0
    cost: LoweringCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Which programs a target runs, in which precisions, and how they run without the device.

    Attributes:
        programs: Whisper programs that `export` places on the target; empty: all but `further_programs`.
        further_programs: programs that few targets run, and this one does, such as "coarse_projection".
        fallback: name of the target for the other programs.
        precisions: precisions that programs can have; the first is the default.
        timed_precisions: those that `--target auto` measures if the user names none. A lowering that takes
            long is left out where another target has the same kernels, or is as fast.
        windows_s: width of the encoder -> longest window known to compile, in seconds; empty: any window.
        any_audio: whether its runtime reads windows of any length, from programs of one length.
        emulation: run options that run the lowered programs on the CPU in float32: name without the
            target's name -> value. `export` verifies with them, because the device may be absent.
        trial_options: run options that replace the user's options in a trial run, which uses no device:
            name without the target's name -> value.
    """

    programs: frozenset[str] = frozenset()
    further_programs: frozenset[str] = frozenset()
    fallback: str = ""
    precisions: tuple[str, ...] = ("fp32",)
    timed_precisions: tuple[str, ...] = ("fp32",)
    windows_s: Mapping[int, float] = field(default_factory=dict)
    any_audio: bool = False
    emulation: Mapping[str, str] = field(default_factory=dict)
    trial_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The packages and tools that lower for a target and run its programs.

    Attributes:
        runtime: package or tool that runs the programs; evidence states its version.
        emulation_runtime: package that emulates the programs, if `Runs.emulation` is given.
        extra: pip extra that is required to lower for the target; empty: the core install.
        run_extra: pip extra that is required to run on the target; empty: the core install.
        packages: pip extra of this target -> the packages that it installs or that the user must install.
    """

    runtime: str = ""
    emulation_runtime: str = ""
    extra: str = ""
    run_extra: str = ""
    packages: Mapping[str, tuple[Package, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """Description of a target.

    Attributes:
        name: name of the target, as `--target` takes it.
        summary: one line for `whisperport targets`.
        supports: what the compiler accepts.
        lowering: how programs are prepared and written.
        runs: which programs the target runs, in which precisions.
        software: the packages and tools that are required.
        sources: name of a field of these records -> the document or measurement that its value comes from.
    """

    name: str
    summary: str
    supports: Support = Support()
    lowering: Lowering = Lowering()
    runs: Runs = Runs()
    software: Software = Software()
    sources: Mapping[str, str] = field(default_factory=dict)
