"""Programs and targets as data: read by the checks, the command line, the manifest and the docs alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["run here", "compiled here", "checked against contract"]


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
class Refusal:
    """One node left alone, and why: the unit of every 'why not' report."""

    node: str
    reason: str  # states the value met and the limit: "rank 5 is above 4"
    rule: str = ""  # a stable code, such as "WP201"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One thing that a target does not take; the rule says what `value` means and how it is checked."""

    rule: str  # a code, such as "WP301"; `whisperport explain WP301`
    source: str  # where it was read or measured
    value: Any = None  # in the rule's own terms: a rank, a set of dtypes, …
    operators: frozenset[str] = frozenset()  # whom it concerns; empty: every node
    formats: frozenset[str] = frozenset()  # of programs: "torch", "onnx", "tflite"; empty: all
    rewrite: str = ""  # the rewrite that mends it; empty: none does
    warning: bool = False  # the target takes it, and computes something else


@dataclass(frozen=True, slots=True)
class Package:
    """One package that lowering to a target, or running it, needs."""

    module: str  # its import name
    name: str  # of its distribution, whose version is shown
    source: str = (
        ""  # where it comes from, if no package index has it; empty: the extra installs it
    )


@dataclass(frozen=True, slots=True)
class FullForm:
    """How `decode_full`, the decoder without a cache, takes its tokens and gives its logits.

    Raises:
        ValueError: fewer than 8 rows, of which the prompt alone takes 4, or no piece.
    """

    rows: int  # S: tokens that it takes, of which the prompt is a part
    positions: Literal["host", "graph"] = "host"  # who adds them to the embeddings
    pieces: int = 4  # of the vocabulary, one output each

    def __post_init__(self) -> None:
        if self.rows < 8 or self.pieces < 1:
            raise ValueError(f"{self.rows} rows and {self.pieces} pieces; expected 8 and 1 or more")

    @property
    def layout(self) -> tuple[int, int]:
        """The last two axes of the embeddings."""
        return (self.rows, 1) if self.positions == "host" else (1, self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What a target can run, as data."""

    name: str
    summary: str  # one line, shown by `whisperport targets`
    status: Status  # what was done with it on the project's own machines
    operators: frozenset[str] | None = None  # what its compiler takes; None: its compiler decides
    max_rank: int = 8  # highest tensor rank its compiler accepts
    dtypes: frozenset[str] = frozenset({"float32"})  # of inputs and outputs
    formats: frozenset[str] = frozenset({"torch"})  # of programs it compiles, if by way of another
    static: bool = True  # every axis must be a number
    domains: frozenset[str] = frozenset()  # of custom operators that it takes: "com.microsoft"
    limits: tuple[Limit, ...] = ()  # what else it does not take
    mends: Mapping[str, str] = field(
        default_factory=dict
    )  # operator -> rewrite that does without it
    run_options: frozenset[str] = frozenset()  # names that `RunOptions.options` may hold
    rewrites: tuple[str, ...] = ()  # names, applied in this order
    programs: frozenset[str] = frozenset()  # of ours that `export` puts on it; empty: all
    rest: str = ""  # the target of the others
    precision: str = ""  # at which it computes, if not at the bundle's: "w8a8"
    encoder_input: Literal["sequence", "image"] = "sequence"  # image: (1, n_mels, 1, 2T)
    windows_s: Mapping[int, float] = field(
        default_factory=dict
    )  # encoder width -> longest window known to compile, in seconds; empty: any
    lower_options: frozenset[str] = frozenset()  # names that `Target.configured` knows
    stand_in: Mapping[str, str] = field(
        default_factory=dict
    )  # run options by which `export` verifies, where the target itself is not here to run
    trial_options: Mapping[str, str] = field(
        default_factory=dict
    )  # run options that replace the user's in a trial run, so that it needs no device
    extra: str = ""  # pip extra that lowers to it; empty: the core install
    run_extra: str = ""  # pip extra that runs it; empty: the core install
    packages: Mapping[str, tuple[Package, ...]] = field(
        default_factory=dict
    )  # extra of this target's own -> what it installs, or what must come from elsewhere
    sources: Mapping[str, str] = field(
        default_factory=dict
    )  # field name -> where it was read or measured
