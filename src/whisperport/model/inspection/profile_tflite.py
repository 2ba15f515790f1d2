"""Measure a .tflite with LiteRT's profiler: the file's undelegated nodes, and the delegate's own nodes.

XNNPACK fuses nodes and adds others, so its nodes are not those of the file. A note lists the nodes of the
file that are delegated. If the profiler of this LiteRT version cannot be used, the nodes are those of the
file and have no times.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from whisperport.errors import ProgramError, UsageError
from whisperport.model.inspection.gain import Rates, xnnpack_rates
from whisperport.model.inspection.graph import Graph, Node
from whisperport.model.inspection.litert_profiler import Event, Run
from whisperport.model.inspection.litert_run import Measured, Op, run_litert
from whisperport.model.inspection.partitions import border
from whisperport.model.inspection.read_tflite import read_tflite
from whisperport.program.profiling import (
    NodeProfile,
    Profile,
    ProfileOptions,
    Subgraph,
    by_time,
    median_overhead,
)

XNNPACK = "XNNPACK"  # LiteRT's default delegate
DELEGATE = "DELEGATE"
NO_DELEGATE = "no delegate"
NOT_DELEGATED = "not delegated to XNNPACK; LiteRT does not report why"

Key = tuple[int, str, int]
"""Number of the delegate's subgraph (0: undelegated), and the node's name and index."""


def profile_tflite(path: Path, options: ProfileOptions) -> Profile:
    """Run a .tflite, and report which of its nodes are delegated and how long each node takes.

    Raises:
        ProgramError: the model cannot be loaded or run, or has dynamic shapes and no inputs were given.
        UsageError: `options.options` is not empty; LiteRT has no runtime options here.
        MissingPackageError: LiteRT is not installed.
    """
    if options.options:
        raise UsageError(
            f"LiteRT has no runtime option `{next(iter(options.options))}`",
            hint="remove --runtime-option; LiteRT has none",
        )
    measured = run_litert(path, options)
    if not measured.runs:
        return _without_times(path.stem, measured, options.repeat)
    return _with_times(path, measured)


def _with_times(path: Path, measured: Measured) -> Profile:
    runs = [_by_key(run) for run in measured.runs]
    keys = dict.fromkeys(key for times in runs for key in times)
    ms = {key: statistics.median(times.get(key, 0.0) for times in runs) for key in keys}
    file = [op for op in measured.ops if op.name != DELEGATE]
    graphs = _graphs(path)
    undelegated = {index for subgraph, _, index in ms if not subgraph}
    nodes = {_index(n): n for graph in graphs[:1] for n in graph.nodes}
    rate = xnnpack_rates(
        [node for index, node in nodes.items() if index not in undelegated],
        [(name, time) for (subgraph, name, _), time in ms.items() if subgraph],
    )
    run_times = [run.ms for run in measured.runs]
    return Profile(
        program=path.stem,
        runtime="LiteRT",
        target=XNNPACK,
        subgraphs=max((subgraph for subgraph, _, _ in ms), default=0),
        nodes=by_time([_node(key, time, nodes.get(key[2]), rate) for key, time in ms.items()]),
        overhead_ms=median_overhead(run_times, [times.values() for times in runs]),
        run_ms=measured.run_ms,
        runs=len(runs),
        notes=(
            _delegated_note([op for op in file if op.index not in undelegated], file),
            _no_delegate_note(measured),
            *(
                f"the file has another entry point, which was not run: {graph.name}"
                for graph in graphs[1:]
            ),
        ),
        borders=_borders(measured.ops, graphs[:1]),
    )


def _borders(ops: Sequence[Op], graphs: Sequence[Graph]) -> tuple[Subgraph, ...]:
    """Return what enters and leaves each call of the delegate; empty if the file could not be read."""
    file = [op for op in ops if op.name != DELEGATE]
    index_sets = [replaced(op, file) for op in ops if op.name == DELEGATE]
    return tuple(
        border([n for n in graph.nodes if _index(n) in indices], graph.nodes, graph.outputs)
        for graph in graphs
        for indices in index_sets
    )


def _index(node: Node) -> int:
    return int(node.name.rpartition("_")[2])


def _by_key(run: Run) -> dict[Key, float]:
    """Return milliseconds per node. In each subgraph of the delegate, node indices begin at 0."""
    times: dict[Key, float] = {}
    for subgraph, event in _in_subgraphs(run.events):
        key = (subgraph, event.name, event.index)
        times[key] = times.get(key, 0.0) + event.ms
    return times


def _in_subgraphs(events: Sequence[Event]) -> Iterator[tuple[int, Event]]:
    subgraph, last = 0, None
    for event in events:
        if event.delegated:
            subgraph += last is None or not last.delegated or event.index <= last.index
        yield subgraph if event.delegated else 0, event
        last = event


def _graphs(path: Path) -> list[Graph]:
    """Read the graphs of the file, for node sizes and names of entry points; empty if that fails."""
    try:
        return read_tflite(path)
    except (
        ProgramError
    ):  # LiteRT reads more models than `whisperport check`; then no gain is estimated
        return []


def _node(
    key: Key, ms: float | None, node: Node | None = None, rate: Rates | None = None
) -> NodeProfile:
    """Return the profile of a node: of the delegate if it has a time, else of the file."""
    subgraph, name, index = key
    gain = (
        rate.estimated_gain_ms(node, ms)
        if rate and node and ms is not None and not subgraph
        else None
    )
    return NodeProfile(
        name=f"{name} #{index}" if subgraph and ms is not None else f"{name} [{index}]",
        operator=name,
        where=f"{XNNPACK} {subgraph}" if subgraph else NO_DELEGATE,
        delegated=bool(subgraph),
        ms=ms,
        reason="" if subgraph else NOT_DELEGATED,
        estimated_gain_ms=gain,
    )


def _delegated_note(delegated: Sequence[Op], file: Sequence[Op]) -> str:
    counts = Counter(op.name for op in delegated).most_common()
    listed = ", ".join(f"{n} {name}" for name, n in counts)
    return f"{len(delegated)} of the file's {len(file)} nodes run in {XNNPACK}: {listed or 'none'}"


def _no_delegate_note(measured: Measured) -> str:
    return f"time of a run without the delegate: {measured.no_delegate_ms:.3g} ms"


def _without_times(name: str, measured: Measured, repeat: int) -> Profile:
    file = [op for op in measured.ops if op.name != DELEGATE]
    calls = [op for op in measured.ops if op.name == DELEGATE]
    subgraphs = {
        index: number
        for number, call in enumerate(calls, start=1)
        for index in replaced(call, file)
    }
    nodes = [_node((subgraphs.get(op.index, 0), op.name, op.index), None) for op in file]
    return Profile(
        program=name,
        runtime="LiteRT",
        target=XNNPACK,
        subgraphs=len(calls),
        nodes=by_time(nodes),
        overhead_ms=None,
        run_ms=measured.run_ms,
        runs=repeat,
        notes=(
            f"the times of single nodes are not measured: {measured.profiler_error}",
            _no_delegate_note(measured),
        ),
    )


def replaced(call: Op, file: Sequence[Op]) -> set[int]:
    """Return the indices of the nodes between the inputs and the outputs of a delegate's call."""
    makers = {tensor: op for op in file for tensor in op.outputs}
    inputs = set(call.inputs)
    indices: set[int] = set()
    pending = list(call.outputs)
    while pending:
        tensor = pending.pop()
        op = makers.get(tensor)
        if op is None or tensor in inputs or op.index in indices:
            continue
        indices.add(op.index)
        pending += [t for t in op.inputs if t not in inputs]
    return indices
