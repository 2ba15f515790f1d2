"""Programs and targets as data: read by the checks, the command line, the manifest and the docs alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named input or output of a program: static shape, dtype by numpy's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TensorSpec":
        return cls(str(data["name"]), tuple(int(n) for n in data["shape"]), str(data["dtype"]))


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The signature of one program; the order of inputs and outputs is the lowered program's order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inputs": [tensor.to_json() for tensor in self.inputs],
            "outputs": [tensor.to_json() for tensor in self.outputs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ProgramSpec":
        return cls(
            str(data["name"]),
            tuple(TensorSpec.from_json(tensor) for tensor in data["inputs"]),
            tuple(TensorSpec.from_json(tensor) for tensor in data["outputs"]),
        )


@dataclass(frozen=True, slots=True)
class Rejection:
    """One node left alone, and why: the unit of every 'why not' report."""

    node: str
    reason: str  # states the value met and the limit: "rank 5 is above 4"
    rule: str = ""  # a stable code, such as "WP201"


FindingKind = Literal["rejected", "not seen", "warning"]
"""What is known of what breaks a limit.

`rejected`: the vendor's documentation or tool says that it does not compile. `not seen`: it occurs in no
program that is known to compile, and nothing else is known of it. `warning`: it compiles, perhaps on some
chips or with other results only; the reason says what to look at.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One thing that a target does not support; the rule says what `value` means and how it is checked."""

    rule: str  # a code, such as "WP301"; `whisperport explain WP301`
    source: str  # where it was read or measured
    value: Any = None  # in the rule's own terms: a rank, a set of dtypes, …
    operators: frozenset[str] = frozenset()  # whom it concerns; empty: every node
    formats: frozenset[str] = frozenset()  # of programs: "torch", "onnx", "tflite"; empty: all
    rewrite: str = ""  # the suggested rewrite, which makes a supported form of it; empty: none does
    kind: FindingKind = "rejected"


@dataclass(frozen=True, slots=True)
class Package:
    """One package that lowering to a target, or running it, needs."""

    module: str  # its import name
    name: str  # of its distribution, whose version is shown
    source: str = (
        ""  # where it comes from, if no package index has it; empty: the extra installs it
    )


@dataclass(frozen=True, slots=True)
class UncachedForm:
    """Form of `uncached_decoder`, the decoder without KV cache: its inputs and its outputs.

    Raises:
        ValueError: fewer than 8 tokens, of which the prompt alone has 4, or no piece.
    """

    sequence_length: int  # S: tokens that it takes, of which the prompt is a part
    positions: Literal["host", "graph"] = "host"  # who adds them to the embeddings
    pieces: int = 4  # of the vocabulary, one output each

    def __post_init__(self) -> None:
        if self.sequence_length < 8 or self.pieces < 1:
            raise ValueError(
                f"`sequence_length` is {self.sequence_length} and `pieces` {self.pieces}; "
                "expected at least 8 and 1"
            )

    @property
    def layout(self) -> tuple[int, int]:
        """The last two axes of the embeddings."""
        return (self.sequence_length, 1) if self.positions == "host" else (1, self.sequence_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What a target can run, as data."""

    name: str
    summary: str  # one line, shown by `whisperport targets`
    # Operators that its compiler supports; None: its compiler decides.
    operators: frozenset[str] | None = None
    # True: the vendor publishes no list; `operators` were seen in programs that are known to compile.
    operators_observed: bool = False
    max_rank: int = 8  # highest tensor rank its compiler accepts
    dtypes: frozenset[str] = frozenset({"float32"})  # of inputs and outputs
    formats: frozenset[str] = frozenset({"torch"})  # of programs it compiles, if by way of another
    static: bool = True  # every axis must be a number
    domains: frozenset[str] = frozenset()  # of custom operators that it takes: "com.microsoft"
    limits: tuple[Limit, ...] = ()  # what else it does not take
    suggested_rewrites: Mapping[str, str] = field(
        default_factory=dict
    )  # operator -> rewrite that does without it
    rewrites: tuple[str, ...] = ()  # names, applied in this order
    host_rewrites: tuple[str, ...] = ()  # those that move steps to the host; not used by `export`
    # True: its compiler rejects a program with an unsupported node. False: such nodes run on the CPU.
    rejects_programs: bool = False
    lowered_suffix: str = ""  # of the file that `whisperport lower` writes
    lowered_max_rank: int = 0  # highest rank in that file; 0: `max_rank`
    programs: frozenset[str] = frozenset()  # of ours that `export` puts on it; empty: all
    fallback: str = ""  # the target of the other programs
    precisions: tuple[str, ...] = ("fp32",)  # that its programs can have; the first is the default
    variants: Mapping[str, str] = field(
        default_factory=dict
    )  # program -> its variant in `programs/variants.py`; of other programs, the default there
    windows_s: Mapping[int, float] = field(
        default_factory=dict
    )  # encoder width -> longest window known to compile, in seconds; empty: any
    emulation: Mapping[str, str] = field(
        default_factory=dict
    )  # run options, without the target's name, that run its lowered programs on the CPU in float32;
    # `export` verifies with them, since the device need not be there
    trial_options: Mapping[str, str] = field(
        default_factory=dict
    )  # run options, without the target's name, that replace the user's in a trial run, which uses no
    # device
    runtime: str = ""  # package or tool that runs its programs; evidence states its version
    emulation_runtime: str = ""  # package that emulates its programs, where `emulation` is given
    extra: str = ""  # pip extra that lowers to it; empty: the core install
    run_extra: str = ""  # pip extra that runs it; empty: the core install
    packages: Mapping[str, tuple[Package, ...]] = field(
        default_factory=dict
    )  # extra of this target's own -> what it installs, or what must come from elsewhere
    sources: Mapping[str, str] = field(
        default_factory=dict
    )  # field name -> where it was read or measured
