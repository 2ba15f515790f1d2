"""What a compiled program's runtime said of one run: who ran each node, and how long it took."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from whisperport.ranges import MAX_REPEAT, MAX_THREADS, check_range
from whisperport.runner import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How a program is run to be measured.

    Raises:
        UsageError: `repeat` or `threads` is out of its range.
    """

    repeat: int = 5  # runs, after one that does not count
    threads: int | None = None  # None: as the runtime chooses
    options: Mapping[str, str] = field(default_factory=dict)  # the runtime's own
    inputs: Mapping[str, Array] | None = None  # by name; None: random, see `inputs.py`
    programs: tuple[str, ...] = ()  # programs of a bundle, or methods of a .pte; empty: all

    def __post_init__(self) -> None:
        check_range("repeat", self.repeat, 1, MAX_REPEAT)
        check_range("threads", self.threads, 1, MAX_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """One node as the runtime ran it, fused with others or not."""

    name: str  # the runtime's own
    operator: str
    where: str  # who ran it
    delegated: bool  # by the accelerator, delegate or provider that was asked for
    ms: float | None  # median over runs; None: the runtime does not say
    rule: str = ""  # why it is not delegated: a rule of `whisperport check`
    reason: str = ""  # in words; empty: not known, or nothing to explain
    estimated_gain_ms: float | None = None  # an estimate, see `gain.py`; None: no basis for one


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One program, or one method of a file of several."""

    program: str
    runtime: str  # "ExecuTorch", "ONNX Runtime", "OpenVINO" or "LiteRT"
    target: str  # to what its nodes are delegated: a backend, a provider, a device
    subgraphs: int  # pieces that the target runs without leaving
    nodes: tuple[NodeProfile, ...]  # the most expensive first
    overhead_ms: float | None  # what no node accounts for, median: calls, copies between subgraphs
    run_ms: float  # of a whole run, median
    runs: int
    notes: tuple[str, ...] = ()  # what the numbers do not say

    @property
    def undelegated(self) -> tuple[NodeProfile, ...]:
        return tuple(node for node in self.nodes if not node.delegated)

    @property
    def undelegated_time_share(self) -> float | None:
        """Of the time of a run; None where single nodes were not measured."""
        return self._share(self.undelegated)

    @property
    def total_ms(self) -> float:
        """Of a run: nodes and rest, so that shares add up. A pause while one node ran is in no median,
        so on a busy machine this is less than `run_ms`; where nodes were not measured it is that."""
        if self.overhead_ms is None:
            return self.run_ms
        return self.overhead_ms + sum(node.ms or 0.0 for node in self.nodes)

    def time_share(self, node: NodeProfile) -> float | None:
        return self._share((node,))

    def _share(self, nodes: tuple[NodeProfile, ...]) -> float | None:
        if not self.total_ms or any(node.ms is None for node in nodes):
            return None
        return sum(node.ms or 0.0 for node in nodes) / self.total_ms

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "runtime": self.runtime,
            "target": self.target,
            "subgraphs": self.subgraphs,
            "delegated_nodes": len(self.nodes) - len(self.undelegated),
            "undelegated_nodes": len(self.undelegated),
            "undelegated_time_share": self.undelegated_time_share,
            "total_ms": self.total_ms,
            "overhead_ms": self.overhead_ms,
            "run_ms": self.run_ms,
            "runs": self.runs,
            "nodes": [asdict(node) | {"time_share": self.time_share(node)} for node in self.nodes],
            "notes": list(self.notes),
        }


def by_time(nodes: list[NodeProfile]) -> tuple[NodeProfile, ...]:
    """The most expensive first; where no times are known, those off the target first."""
    return tuple(sorted(nodes, key=lambda node: (-(node.ms or 0.0), node.delegated)))


def median_overhead(wholes: Sequence[float], by_run: Sequence[Iterable[float]]) -> float:
    """Median over runs of the whole less its nodes; clocks of different steps may leave it below zero."""
    rests = [whole - sum(nodes) for whole, nodes in zip(wholes, by_run, strict=True)]
    return max(0.0, statistics.median(rests))
