"""Profiles of compiled programs: where each node runs and how long it takes. A `Profiler` measures them."""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from whisperport.program.runner import Array
from whisperport.system.option import MAX_REPEAT, MAX_THREADS, check_range

VOCABULARY = "vocabulary projection"  # the module of a node whose file does not name it


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How a program is run and measured.

    Raises:
        UsageError: `repeat` or `threads` is out of its range.
    """

    repeat: int = 5  # measured runs, after one warm-up run
    threads: int | None = None  # CPU threads; None lets the runtime choose
    options: Mapping[str, str] = field(default_factory=dict)  # of the runtime
    inputs: Mapping[str, Array] | None = None  # by name; None: random, see `inputs.py`
    programs: tuple[str, ...] = ()  # programs of a bundle, or methods of a .pte; empty: all

    def __post_init__(self) -> None:
        check_range("repeat", self.repeat, 1, MAX_REPEAT)
        check_range("threads", self.threads, 1, MAX_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """One node of the compiled program; the runtime may have fused it from several nodes of the source."""

    name: str  # in the runtime
    operator: str
    where: str  # the delegate, provider or device that ran the node
    delegated: bool  # True: `target` of the profile ran the node
    ms: float | None  # milliseconds per run, median over runs; None: not measured
    rule: str = ""  # of `whisperport check`, if it explains why the node is undelegated
    reason: str = ""  # why the node is undelegated; empty: not known, or delegated
    estimated_gain_ms: float | None = (
        None  # milliseconds, see `gain.py`; None: no estimate is possible
    )
    place: int = 0  # in a run, from 0
    module: str = ""  # path of its module, or "vocabulary projection"; empty: not known


@dataclass(frozen=True, slots=True)
class Subgraph:
    """One delegated part of a graph; bytes are None if a shape is not static."""

    nodes: int
    input_bytes: int | None
    output_bytes: int | None


def border_bytes(subgraphs: Sequence[Subgraph]) -> int | None:
    """Return the bytes that enter and leave all subgraphs; None if a shape is not static."""
    sizes = [size for s in subgraphs for size in (s.input_bytes, s.output_bytes)]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile of one program, or of one method of a .pte."""

    program: str
    runtime: str  # name of the runtime, such as "ONNX Runtime"
    target: str  # the backend, execution provider or device that nodes are delegated to
    subgraphs: int  # delegated parts of the graph; each is entered once per run
    nodes: tuple[NodeProfile, ...]  # the most expensive first
    overhead_ms: (
        float | None
    )  # time of a run outside all nodes, median: calls, copies between subgraphs
    run_ms: float  # milliseconds of a complete run, median
    runs: int  # number of measured runs
    notes: tuple[str, ...] = ()  # on how to read the numbers
    on_cpu: bool = (
        False  # the target is the CPU, and the runtime itself runs the nodes: none is delegated
    )
    borders: tuple[Subgraph, ...] = ()  # of the subgraphs; empty: the format does not tell them

    @property
    def undelegated(self) -> tuple[NodeProfile, ...]:
        """The nodes that the target does not run."""
        return tuple(node for node in self.nodes if not node.delegated)

    @property
    def undelegated_time_share(self) -> float | None:
        """Share of a run's time spent in undelegated nodes, 0 to 1; None if nodes were not measured."""
        return self._share(self.undelegated)

    @property
    def total_ms(self) -> float:
        """Milliseconds of all nodes plus `overhead_ms`, so that time shares add up to 1.

        The medians of single nodes do not contain occasional pauses, so on a loaded machine this is less
        than `run_ms`. If nodes were not measured, this is `run_ms`.
        """
        if self.overhead_ms is None:
            return self.run_ms
        return self.overhead_ms + sum(node.ms or 0.0 for node in self.nodes)

    def time_share(self, node: NodeProfile) -> float | None:
        """Return the node's share of a run's time, 0 to 1; None if it was not measured."""
        return self._share((node,))

    def _share(self, nodes: tuple[NodeProfile, ...]) -> float | None:
        if not self.total_ms or any(node.ms is None for node in nodes):
            return None
        return sum(node.ms or 0.0 for node in nodes) / self.total_ms

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON, as `whisperport inspect --json` prints it."""
        return {
            "program": self.program,
            "runtime": self.runtime,
            "target": self.target,
            "on_cpu": self.on_cpu,
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
            "borders": [asdict(subgraph) for subgraph in self.borders],
        }


class Profiler(ABC):
    """Measures, reads and runs programs of a file format that only one target has."""

    title: ClassVar[str]  # name of the format in help and errors, with its suffix
    suffix: ClassVar[str]  # of a program's first file in a bundle
    files: ClassVar[int] = 1  # number of a program's files in a bundle

    @abstractmethod
    def recognizes(self, head: bytes) -> bool:
        """Return whether a file has this format; `head` is its first bytes."""

    @abstractmethod
    def profile(self, files: Sequence[Path], options: ProfileOptions) -> Profile:
        """Run a program, and report where each node ran and how long it took.

        Args:
            files: of the program, as a manifest lists them; outside of a bundle, the first one only.
            options: how it is run; `programs` does not apply.

        Raises:
            ProgramError: the program cannot be read or run, or has dynamic shapes and no inputs were given.
            MissingPackageError: the runtime is not installed.
        """

    @abstractmethod
    def read_graph(self, path: Path) -> Any:
        """Return the `inspection.graph.Graph` of a program, without weights and without the runtime.

        Args:
            path: of the program's first file.

        Raises:
            ProgramError: the file cannot be read, or is damaged.
        """

    @abstractmethod
    def run_keeping(
        self, files: Sequence[Path], inputs: Sequence[Array], names: Collection[str]
    ) -> tuple[dict[str, Array], list[Array]]:
        """Run a program once, in float32, and keep inner values.

        Args:
            files: as for `profile`.
            inputs: in the order of the graph's inputs.
            names: of values of the graph.

        Returns:
            The values by name, and the outputs in the order of the graph.

        Raises:
            ProgramError: the program cannot be read or run.
            MissingPackageError: the runtime is not installed.
        """

    def without_states(self, path: Path, folder: Path) -> Path:
        """Return a copy of a program in which each state is an input and an output.

        Args:
            path: of the program's first file.
            folder: where the copy is written.

        Returns:
            The path of the copy; `path` itself if the program has no states.

        Raises:
            ProgramError: the file cannot be read, or is damaged.
        """
        return path


def block_of(module: str) -> str:
    """Return the path up to the first number: "decoder.layers.0"; empty if it has none."""
    parts = module.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def readable_formats(profilers: Sequence[Profiler], first: str = ".pte") -> str:
    """Return the formats of programs that can be measured or, with ".pt2" first, checked, for help."""
    return f"{', '.join([first, '.onnx', *(profiler.title for profiler in profilers)])} or .tflite"


def by_time(nodes: Sequence[NodeProfile]) -> tuple[NodeProfile, ...]:
    """Sort nodes, the slowest first; without times, undelegated nodes first.

    Args:
        nodes: in the order of a run, which becomes their `place`.
    """
    placed = [replace(node, place=place) for place, node in enumerate(nodes)]
    return tuple(sorted(placed, key=lambda node: (-(node.ms or 0.0), node.delegated)))


def median_overhead(run_times: Sequence[float], node_times: Sequence[Iterable[float]]) -> float:
    """Return the median over runs of the time outside all nodes, in milliseconds.

    Args:
        run_times: milliseconds of each complete run.
        node_times: milliseconds of the nodes of each run.

    Returns:
        At least 0; clocks of different resolution can make the difference negative.
    """
    overheads = [run - sum(nodes) for run, nodes in zip(run_times, node_times, strict=True)]
    return max(0.0, statistics.median(overheads))
