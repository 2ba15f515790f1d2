"""What a probe found: one attempt per program and set of options, and a recommendation."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from whisperport.verification.compare import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """Nodes of one operator on one execution provider."""

    provider: str
    operator: str
    count: int
    ms: float  # milliseconds of all of them in the first run


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One program in a session on one execution provider with one set of options.

    Attributes:
        program: name of the program.
        provider: name of the execution provider.
        options: of the provider, name -> value.
        status: "ran"; "failed", an exception was raised; or "crashed", the process ended, took too long, or
            needed too much memory.
        reason: why it failed or crashed, with the stage; empty: it ran.
        messages: the last messages of the native libraries, if it failed or crashed.
        nodes: the executed nodes, after ONNX Runtime's fusions. A provider that compiles subgraphs has one
            node for each.
        create_s: seconds to create the session, compilation included; NaN: it was not created.
        ms: milliseconds per run, median; NaN: it did not run.
        comparisons: every output, compared with that of the CPU provider for the same inputs.
        deviation: largest difference between two runs on the same inputs, divided by the output's largest
            value.
        identical: whether all runs returned identical outputs.
    """

    program: str
    provider: str
    options: Mapping[str, str] = field(default_factory=dict)
    status: Literal["ran", "failed", "crashed"]
    reason: str = ""
    messages: tuple[str, ...] = ()
    nodes: tuple[NodeCount, ...] = ()
    create_s: float = math.nan
    ms: float = math.nan
    comparisons: tuple[Comparison, ...] = ()
    deviation: float = math.nan
    identical: bool = False

    @property
    def on_provider(self) -> int:
        """Number of executed nodes on the provider."""
        return sum(node.count for node in self.nodes if node.provider == self.provider)

    @property
    def elsewhere(self) -> Mapping[str, int]:
        """Operator -> number of nodes that ran on another provider, such as the CPU."""
        found: dict[str, int] = {}
        for node in self.nodes:
            if node.provider != self.provider:
                found[node.operator] = found.get(node.operator, 0) + node.count
        return found

    @property
    def sqnr_db(self) -> float:
        """The lowest SQNR of an output against the CPU provider; NaN if an output was not compared."""
        found = [comparison.sqnr_db for comparison in self.comparisons]
        return math.nan if not found or any(map(math.isnan, found)) else min(found)

    def fault(self, max_deviation: float) -> str:
        """Return why the program cannot run on the provider with these options; empty if it can.

        Args:
            max_deviation: the largest permitted deviation between runs.
        """
        if self.status != "ran":
            return f"it {self.status}: {self.reason}"
        if not self.on_provider:
            return "the provider declined all nodes, so that the CPU ran them"
        if not self.comparisons:
            return "it has no outputs"
        for one in self.comparisons:
            if not one:
                return f"output `{one.output}`: {one.reason}"
        if not self.deviation <= max_deviation:
            return (
                f"its outputs differ between runs on the same inputs, by {self.deviation:.1e} of the "
                "largest value"
            )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to run on the provider.

    Attributes:
        options: of the provider, name -> value.
        programs: programs that are correct and faster there; empty: use the CPU for all.
        saved_ms: estimated milliseconds saved per window.
        because: program that is not chosen -> the reason.
    """

    options: Mapping[str, str]
    programs: tuple[str, ...]
    saved_ms: float
    because: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The result of a probe. It is True if a program can run on the provider.

    Attributes:
        bundle: name of the bundle.
        provider: name of the execution provider.
        version: of ONNX Runtime.
        clip: the clip whose inputs were used.
        calls: program -> number of calls per window of this clip.
        opsets: program -> version of ONNX's operator set.
        min_opset: oldest version that the provider's documentation supports; 0: not known.
        objections: program -> what the documentation says against it.
        precision: precision of the provider, which chooses the limits of the comparisons.
        max_deviation: largest permitted deviation between runs.
        on_cpu: program -> the attempt on the CPU provider.
        attempts: all attempts on the provider.
        skipped: programs of other targets, which have no ONNX file to probe.
        notes: further remarks.
        choice: what to run on the provider.
    """

    bundle: str
    provider: str
    version: str
    clip: str
    calls: Mapping[str, int]
    opsets: Mapping[str, int]
    min_opset: int
    objections: Mapping[str, tuple[str, ...]]
    precision: str
    max_deviation: float
    on_cpu: Mapping[str, Attempt]
    attempts: tuple[Attempt, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    choice: Choice

    def __bool__(self) -> bool:
        return any(not attempt.fault(self.max_deviation) for attempt in self.attempts)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data; NaN and infinity are strings."""
        data = asdict(self)
        for attempt, found in zip(self.attempts, data["attempts"], strict=True):
            found |= {
                "on_provider": attempt.on_provider,
                "elsewhere": dict(attempt.elsewhere),
                "sqnr_db": attempt.sqnr_db,
                "fault": attempt.fault(self.max_deviation),
            }
        return cast(dict[str, Any], _plain({"usable": bool(self), **data}))


def _plain(value: Any) -> Any:
    """Replace NaN and the infinities, which JSON does not have, by "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
