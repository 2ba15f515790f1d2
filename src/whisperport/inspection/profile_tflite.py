"""Measure a .tflite with LiteRT's profiler: the file's nodes that no delegate took, and the delegate's own.

XNNPACK fuses nodes and adds some, so that its nodes are not the file's; which of the file's it took is said
beside. Where this LiteRT's profiler cannot be asked, nodes are those of the file, and have no times.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from whisperport.errors import ProgramError, UsageError
from whisperport.inspection.gain import XNNPACK_COMPUTE_BOUND, Rates, compute_and_bytes, rates
from whisperport.inspection.graph import Graph, Node
from whisperport.inspection.litert_profiler import Event, Run
from whisperport.inspection.litert_run import Measured, Op, run_litert
from whisperport.inspection.profile import (
    NodeProfile,
    Profile,
    ProfileOptions,
    by_time,
    median_overhead,
)
from whisperport.inspection.read_tflite import read_tflite

XNNPACK = "XNNPACK"  # what LiteRT applies on its own
DELEGATE = "DELEGATE"
NO_DELEGATE = "no delegate"
NOT_TAKEN = "not delegated"

Key = tuple[int, str, int]
"""The subgraph of the delegate, 0 outside; a node's name and index."""


def profile_tflite(path: Path, options: ProfileOptions) -> Profile:
    """Run a .tflite, and say which of its nodes the delegate took, and how long each took.

    Raises:
        ProgramError: it cannot be loaded or run, or has dynamic shapes and no inputs were given.
        UsageError: `options.options` is not empty: LiteRT has none here.
        MissingPackageError: LiteRT is not installed.
    """
    if options.options:
        raise UsageError(f"LiteRT has no run option `{next(iter(options.options))}`")
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
    left = {index for subgraph, _, index in ms if not subgraph}
    nodes = {int(n.name.rpartition("_")[2]): n for graph in graphs[:1] for n in graph.nodes}
    rate = _rates(ms, [node for index, node in nodes.items() if index not in left])
    wholes = [run.ms for run in measured.runs]
    return Profile(
        program=path.stem,
        runtime="LiteRT",
        target=XNNPACK,
        subgraphs=max((subgraph for subgraph, _, _ in ms), default=0),
        nodes=by_time([_node(key, time, nodes.get(key[2]), rate) for key, time in ms.items()]),
        overhead_ms=median_overhead(wholes, [times.values() for times in runs]),
        run_ms=measured.run_ms,
        runs=len(runs),
        notes=(
            _taken([op for op in file if op.index not in left], file),
            _alone(measured),
            *(f"an entry point that was not run: {graph.name}" for graph in graphs[1:]),
        ),
    )


def _by_key(run: Run) -> dict[Key, float]:
    """Milliseconds by node. A delegate's subgraph counts its nodes from 0 again."""
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
    """For the sizes of nodes, by their places in the file, and for entry points that were not run."""
    try:
        return read_tflite(path)
    except (
        ProgramError
    ):  # LiteRT reads what `whisperport check` does not: there is no estimate then
        return []


def _rates(ms: dict[Key, float], taken: Sequence[Node]) -> Rates:
    flops, size = compute_and_bytes(taken)
    delegated = {key: time for key, time in ms.items() if key[0]}
    products = sum(
        time for key, time in delegated.items() if key[1].startswith(XNNPACK_COMPUTE_BOUND)
    )
    return rates((flops, products), (size, sum(delegated.values()) - products))


def _node(key: Key, ms: float, node: Node | None, rate: Rates) -> NodeProfile:
    subgraph, name, index = key
    return NodeProfile(
        name=f"{name} #{index}" if subgraph else f"{name} [{index}]",
        operator=name,
        where=f"{XNNPACK} {subgraph}" if subgraph else NO_DELEGATE,
        delegated=bool(subgraph),
        ms=ms,
        reason="" if subgraph else NOT_TAKEN,
        estimated_gain_ms=rate.estimated_gain_ms(node, ms) if node and not subgraph else None,
    )


def _taken(taken: Sequence[Op], file: Sequence[Op]) -> str:
    kinds = ", ".join(f"{n} {name}" for name, n in Counter(op.name for op in taken).most_common())
    return f"{XNNPACK} took {len(taken)} of the file's {len(file)} nodes: {kinds or 'none'}"


def _alone(measured: Measured) -> str:
    return f"the whole without its delegate takes {measured.alone_ms:.3g} ms"


def _without_times(name: str, measured: Measured, repeat: int) -> Profile:
    file = [op for op in measured.ops if op.name != DELEGATE]
    calls = [op for op in measured.ops if op.name == DELEGATE]
    subgraphs = {
        index: number
        for number, call in enumerate(calls, start=1)
        for index in _replaced(call, file)
    }
    nodes = [_untimed(op, subgraphs.get(op.index, 0)) for op in file]
    return Profile(
        program=name,
        runtime="LiteRT",
        target=XNNPACK,
        subgraphs=len(calls),
        nodes=by_time(nodes),
        overhead_ms=None,
        run_ms=measured.run_ms,
        runs=repeat,
        notes=(f"the time of a node is not measured: {measured.why}", _alone(measured)),
    )


def _untimed(op: Op, subgraph: int) -> NodeProfile:
    return NodeProfile(
        name=f"{op.name} [{op.index}]",
        operator=op.name,
        where=f"{XNNPACK} {subgraph}" if subgraph else NO_DELEGATE,
        delegated=bool(subgraph),
        ms=None,
        reason="" if subgraph else NOT_TAKEN,
    )


def _replaced(call: Op, file: Sequence[Op]) -> set[int]:
    """Indices of the nodes that lead from the inputs of a delegate's call to its outputs."""
    makers = {tensor: op for op in file for tensor in op.outputs}
    given = set(call.inputs)
    found: set[int] = set()
    pending = list(call.outputs)
    while pending:
        tensor = pending.pop()
        op = makers.get(tensor)
        if op is None or tensor in given or op.index in found:
            continue
        found.add(op.index)
        pending += [t for t in op.inputs if t not in given]
    return found
