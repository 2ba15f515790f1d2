"""Measure an ExecuTorch program with ETDump: every undelegated operator, and every node in the delegates.

Source: executorch/devtools/etdump/schema_flatcc.py. The runtime of the pip wheel is built with ETDump.
"""

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError
from whisperport.model.inspection.gain import Rates, xnnpack_rates
from whisperport.model.inspection.graph import Graph, Value
from whisperport.model.inspection.inputs import hint_for, inputs_for
from whisperport.model.inspection.node_modules import vocabulary_projection
from whisperport.model.inspection.quiet import quiet
from whisperport.model.inspection.read_pte import (
    BACKEND,
    Instruction,
    Method,
    needs_executorch,
    read_pte,
)
from whisperport.program.profiling import (
    NodeProfile,
    Profile,
    ProfileOptions,
    by_time,
    median_overhead,
)
from whisperport.program.runner import Array
from whisperport.program.spec import Rejection

Reasons = Callable[[Graph], Sequence[Rejection]]
"""Returns what a target rejects in a graph: `check.rejections` with the target's spec."""

Key = tuple[int, int, str]
"""Numbers of chain and instruction; for a node in a delegate, also the delegate's name of the node."""

WHOLE_RUN: Key = (-1, -1, "")
RUN_EVENT, OPERATOR, DELEGATE = "Method::execute", "OPERATOR_CALL", "DELEGATE_CALL"
NO_DELEGATE = "no delegate"
OTHER_BACKEND = "the reasons why nodes are undelegated are known for XNNPACK only"


def profile_pte(
    path: Path,
    options: ProfileOptions,
    reasons: Reasons,
    names: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Profile]:
    """Run methods of a .pte, and report where each node runs and how long it takes.

    Args:
        options: `options.programs` names the methods; empty: all.
        reasons: returns why XNNPACK rejects nodes of a graph.
        names: input names of each method, if known; the file does not contain them.

    Raises:
        ProgramError: the file is damaged, a method does not exist or cannot be loaded or run, or the
            runtime was built without ETDump.
        MissingPackageError: ExecuTorch is not installed.
    """
    with quiet():
        methods = read_pte(path.read_bytes(), path.name, options.programs)
    unknown = [name for name in options.programs if name not in methods]
    if unknown:
        raise ProgramError(
            f"{path.name} has no method `{unknown[0]}`",
            hint="remove --program to run all methods of the file",
        )
    if not options.programs:  # a method without instructions returns a constant, such as a size
        methods = {name: method for name, method in methods.items() if method.instructions}
    if options.threads:  # has an effect only before a method is loaded
        _portable_lib()._unsafe_reset_threadpool(options.threads)
    profiles = []
    for name, method in methods.items():
        feed = inputs_for(_named(method, (names or {}).get(name)), options.inputs)
        runs = _run(path, name, feed, options)
        profiles.append(_profile(method, runs, reasons))
    return profiles


def _named(method: Method, names: tuple[str, ...] | None) -> list[Value]:
    if any(value is None for value in method.inputs):
        raise ProgramError(
            f"method `{method.name}` has inputs that are not tensors",
            why="inspect passes tensors only",
            hint="name other methods of the file with --program",
        )
    values = [value for value in method.inputs if value is not None]
    chosen = names or tuple(f"input_{place}" for place in range(len(values)))
    return [replace(value, name=name) for value, name in zip(values, chosen, strict=True)]


def _run(path: Path, method: str, feed: list[Array], options: ProfileOptions) -> list[Any]:
    """Run a method and return ETDump's records of every run except the warm-up run."""
    from executorch.devtools.etdump.serialize import deserialize_from_etdump_flatcc
    from torch import from_numpy

    try:
        program = with_etdump(path)
        loaded = program.load_method(method)
        tensors = [from_numpy(array) for array in feed]
        for _ in range(options.repeat + 1):
            loaded.call(tensors)
        with tempfile.TemporaryDirectory() as folder, quiet():
            file = Path(folder) / "etdump"
            program.write_etdump_result_to_file(str(file))
            dump = deserialize_from_etdump_flatcc(file.read_bytes())
    except RuntimeError as error:
        raise ProgramError(
            f"ExecuTorch cannot run method `{method}` of {path.name}",
            why=str(error).strip().split("\n")[0],
            hint=hint_for(feed),
        ) from error
    runs = [run for run in dump.run_data if any(_is(event, RUN_EVENT) for event in run.events)]
    return runs[1:]


def with_etdump(path: Path, kept_bytes: int = 0) -> Any:
    """Load a file so that ETDump records its runs.

    Args:
        path: of the file.
        kept_bytes: of values that it keeps.

    Raises:
        ProgramError: the runtime was built without ETDump.
        RuntimeError: ExecuTorch cannot load the file.
    """
    program = _portable_lib()._load_program(
        str(path), enable_etdump=True, debug_buffer_size=kept_bytes
    )
    if not program.has_etdump():
        raise ProgramError(
            "this ExecuTorch installation cannot measure a program, or keep its values",
            why="its runtime was built without ETDump",
            hint='install a runtime with ETDump: pip install "whisperport[xnnpack]"',
        )
    return program


def _portable_lib() -> Any:
    """Import ExecuTorch's runtime."""
    with needs_executorch(), quiet():
        from executorch.extension.pybindings import portable_lib
    return portable_lib


def _is(event: Any, name: str) -> bool:
    return event.profile_event is not None and event.profile_event.name == name


def _profile(method: Method, runs: Sequence[Any], reasons: Reasons) -> Profile:
    measured = [_times(run) for run in runs]
    run_times = [times.pop(WHOLE_RUN) for times in measured]
    keys = dict.fromkeys(key for times in measured for key in times)
    ms = {key: statistics.median(times.get(key, 0.0) for times in measured) for key in keys}
    backends = dict.fromkeys(i.backend for i in method.instructions.values() if i.backend)
    rejected = _rejected(method.graph, reasons) if BACKEND in backends or not backends else {}
    inner = [node for i in method.instructions.values() for node in i.inner]
    rate = xnnpack_rates(inner, [(key[2], time) for key, time in ms.items() if key[2]])
    delegates = (place for place, i in method.instructions.items() if i.backend)
    calls = {place: number for number, place in enumerate(delegates, start=1)}
    nodes = []
    for key, time in sorted(ms.items(), key=lambda item: item[0][:2]):  # as instructions run
        place = key[:2]
        instruction = method.instructions[place]
        if instruction.backend:
            nodes.append(_delegated(key, time, instruction, calls[place]))
        else:
            nodes.append(_undelegated(place, time, instruction, rejected, rate))
    return Profile(
        program=method.name,
        runtime="ExecuTorch",
        target=", ".join(backends) or "no delegate",
        subgraphs=len(calls),
        nodes=by_time(nodes),
        overhead_ms=median_overhead(run_times, [times.values() for times in measured]),
        run_ms=statistics.median(run_times),
        runs=len(runs),
        notes=() if BACKEND in backends or not backends else (OTHER_BACKEND,),
        borders=method.borders,
    )


def _rejected(graph: Graph, reasons: Reasons) -> dict[str, Rejection]:
    """Return why XNNPACK rejects nodes, by node name: a rule, or an operator unknown to its partitioner."""
    unknown = {
        node.name: Rejection(node.name, why)
        for node in graph.nodes
        if (why := _unknown_to_partitioner(node.original_op))
    }
    return unknown | {rejection.node: rejection for rejection in reasons(graph)}


def _times(run: Any) -> dict[Key, float]:
    """Return milliseconds per node of one run; a delegate without reported nodes counts as one node."""
    times: dict[Key, float] = defaultdict(float)
    delegate_calls: dict[Key, float] = defaultdict(float)
    for event in (event.profile_event for event in run.events if event.profile_event):
        ms = (event.end_time - event.start_time) / 1e6
        place = (event.chain_index, event.instruction_id)
        if event.name == RUN_EVENT:
            times[WHOLE_RUN] += ms
        elif event.name == OPERATOR:
            times[*place, ""] += ms
        elif event.name == DELEGATE:
            delegate_calls[*place, ""] += ms
        elif event.delegate_debug_id_str is not None or event.delegate_debug_id_int >= 0:
            inner = event.delegate_debug_id_str or str(event.delegate_debug_id_int)
            times[*place, inner] += ms
    seen = {key[:2] for key in times}
    return times | {key: ms for key, ms in delegate_calls.items() if key[:2] not in seen}


def _delegated(key: Key, ms: float, instruction: Instruction, number: int) -> NodeProfile:
    return NodeProfile(
        name=key[2] or "all nodes of the subgraph",
        operator=key[2].split(" #")[0],
        where=f"{instruction.backend} {number}",
        delegated=True,
        ms=ms,
    )


def _undelegated(
    place: tuple[int, int],
    ms: float,
    instruction: Instruction,
    rejected: Mapping[str, Rejection],
    rate: Rates,
) -> NodeProfile:
    """Return the profile of an undelegated node, with ETDump's name for it."""
    name = instruction.operator.removeprefix("aten::").replace("::", ".")
    rejection = rejected.get(instruction.node.name) if instruction.node else None
    return NodeProfile(
        name=f"native_call_{name} [{place[1]}]",
        operator=instruction.operator,
        where=NO_DELEGATE,
        delegated=False,
        ms=ms,
        rule=rejection.rule if rejection else "",
        reason=rejection.reason if rejection else "",
        estimated_gain_ms=rate.estimated_gain_ms(instruction.node, ms)
        if instruction.node
        else None,
        module=vocabulary_projection(instruction.node) if instruction.node else "",
    )


def _unknown_to_partitioner(operator: str) -> str:
    """Return a reason if XNNPACK's partitioner has no configuration for the operator; otherwise empty.

    Args:
        operator: such as "aten.mul.Scalar_out"; for an operator of XNNPACK ("XNNAdd") the result is empty.

    Source: executorch/backends/xnnpack/partition/config/__init__.py.
    """
    parts = operator.split(".")
    if len(parts) < 3:
        return ""
    name = f"{parts[1]}.{parts[2].removesuffix('_out').removesuffix('out') or 'default'}"
    return (
        ""
        if name in _partitioned()
        else (
            f"XNNPACK's partitioner has no configuration for {name}; write the layer with other operators"
        )
    )


@cache
def _partitioned() -> frozenset[str]:
    with quiet():
        from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS

    return frozenset(config.target_name for config in ALL_PARTITIONER_CONFIGS)
