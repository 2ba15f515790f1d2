"""Measure an ONNX model with ONNX Runtime's profiler: the execution provider and time of every node.

The nodes are those of the graph after ONNX Runtime's fusions. Source: the trace that
`SessionOptions.enable_profiling` writes. Its entries with `cat: Node` are nodes, those named `model_run`
are runs.
"""

import json
import os
import re
import statistics
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError, UsageError, WhisperportError
from whisperport.model.inspection.gain import Rates, compute_and_bytes, is_compute_bound, rates
from whisperport.model.inspection.graph import Node, Value
from whisperport.model.inspection.inputs import hint_for, inputs_for
from whisperport.model.inspection.node_modules import (
    filled,
    module_of,
    onnx_modules,
    vocabulary_projection,
)
from whisperport.model.inspection.vocabulary import ONNX
from whisperport.program.execution_providers import CPU, Provider
from whisperport.program.profiling import (
    NodeProfile,
    Profile,
    ProfileOptions,
    by_time,
    median_overhead,
)
from whisperport.program.runner import Array

OPTIONS = ("provider", "device", "library")  # runtime options
KERNEL = "_kernel_time"
CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
DTYPES = {
    "float": "float32",
    "double": "float64",
}  # ONNX Runtime's name -> numpy's, where they differ


def profile_onnx(path: Path, options: ProfileOptions) -> Profile:
    """Run an ONNX model, and report which execution provider runs each node and how long it takes.

    Args:
        options: its runtime options are `provider`, `device` and `library`, as of a `Provider`.

    Raises:
        ProgramError: the model cannot be loaded or run, or has dynamic shapes and no inputs were given.
        UsageError: the runtime option does not exist.
        LoweringError: the provider or its device is not on this machine.
        MissingPackageError: ONNX Runtime is not installed.
    """
    provider = _provider(options)
    ort = provider.require()
    settings = ort.SessionOptions()
    settings.enable_profiling = True
    settings.intra_op_num_threads = options.threads or 0
    # The target `onnxruntime` sets the same.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 4  # errors are raised as exceptions too
    arrays: list[Array] = []
    with tempfile.TemporaryDirectory() as folder:
        settings.profile_file_prefix = os.path.join(folder, "trace")
        try:
            session = provider.session(ort, os.fspath(path), settings)
            values = [_value(i) for i in session.get_inputs()]
            arrays = inputs_for(values, options.inputs)
            feed = {value.name: array for value, array in zip(values, arrays, strict=True)}
            for _ in range(options.repeat + 1):
                session.run(None, feed)
            trace = _trace(Path(session.end_profiling()))
        except WhisperportError:
            raise
        except Exception as error:  # its exception classes have no common base other than Exception
            raise ProgramError(
                f"ONNX Runtime cannot run {path.name}",
                why=_message(error),
                hint=hint_for(arrays),
            ) from error
    return _profile(path.stem, session.get_providers()[0], trace, onnx_modules(path))


def _trace(file: Path) -> Any:
    """Read what ONNX Runtime measured.

    Raises:
        ProgramError: the file is incomplete. ONNX Runtime reports no error if the disk is full.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ProgramError(
            "what ONNX Runtime measured could not be stored",
            why=f"{file} is incomplete, as on a full disk",
            hint="free some space on the disk of the temporary folder, or name another folder in TMPDIR",
        ) from error


def _message(error: Exception) -> str:
    """Return the first line of the error, without the location in ONNX Runtime's sources."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"/onnxruntime_src/\S+ [^)]*\) ", "", line)[:300]


def _provider(options: ProfileOptions) -> Provider:
    unknown = [name for name in options.options if name not in OPTIONS]
    if unknown:
        raise UsageError(
            f"ONNX Runtime has no runtime option `{unknown[0]}`",
            hint=f"use {', '.join(f'--runtime-option {name}=VALUE' for name in OPTIONS)}",
        )
    name, device, library = (options.options.get(option, "") for option in OPTIONS)
    return Provider(name=name or CPU, device=device, library=library)


def _value(described: Any) -> Value:
    dtype = str(described.type)
    if dtype.startswith("tensor("):  # "tensor(float)"; not "seq(tensor(float))"
        dtype = dtype[len("tensor(") : -1]
    shape = tuple(axis if isinstance(axis, int) else str(axis) for axis in described.shape)
    return Value(described.name, shape, DTYPES.get(dtype, dtype))


def _profile(
    name: str, provider: str, trace: list[dict[str, Any]], modules: dict[str, str]
) -> Profile:
    runs = sorted((e["ts"], e["dur"]) for e in trace if e["name"] == "model_run")[1:]
    events = [e for e in trace if e["cat"] == "Node" and e["name"].endswith(KERNEL)]
    starts, run_times = [start for start, _ in runs], [duration / 1e3 for _, duration in runs]
    by_run, examples = _times(events, starts)
    times = {key: statistics.median(of_runs.values()) for key, of_runs in by_run.items()}
    inside = [[r[run] for r in by_run.values() if run in r] for run in range(1, len(runs) + 1)]
    rate = _rates(provider, times, examples)
    nodes = [_node(examples[key], ms, provider, rate, modules) for key, ms in times.items()]
    inferred = filled([node.module for node in nodes])
    nodes = [replace(node, module=module) for node, module in zip(nodes, inferred, strict=True)]
    return Profile(
        program=name,
        runtime="ONNX Runtime",
        target=provider,
        subgraphs=_subgraphs(provider, examples.values()),
        nodes=by_time(nodes),
        overhead_ms=median_overhead(run_times, inside),
        run_ms=statistics.median(run_times),
        runs=len(runs),
        notes=("the nodes are those of the graph after ONNX Runtime's fusions",),
        on_cpu=provider == CPU,
    )


def _times(
    events: list[dict[str, Any]], starts: list[int]
) -> tuple[dict[str, dict[int, float]], dict[str, dict[str, Any]]]:
    """Return for each node its milliseconds per run, and one of its events.

    Runs are numbered from 1; events of the warm-up run are ignored. The time of nodes in the body of a Loop
    is part of the Loop's time.
    """
    by_run: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    examples: dict[str, dict[str, Any]] = {}
    body_until = 0
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        inside = event["ts"] < body_until
        if not inside and event["args"]["op_name"] in CONTROL_FLOW:
            body_until = event["ts"] + event["dur"]
        run = bisect_right(starts, event["ts"])
        if run and not inside:
            key = f"{event['args']['node_index']} {event['name']}"
            by_run[key][run] += event["dur"] / 1e3
            examples.setdefault(key, event)
    return by_run, examples


def _rates(
    provider: str, times: Mapping[str, float], events: Mapping[str, dict[str, Any]]
) -> Rates:
    """Compute the provider's rates from the nodes that it ran."""
    compute: list[Node] = []
    memory: list[Node] = []
    spent = {True: 0.0, False: 0.0}
    for key, event in events.items():
        if event["args"]["provider"] == provider:
            node = _graph_node(event)
            (compute if is_compute_bound(node) else memory).append(node)
            spent[is_compute_bound(node)] += times[key]
    return rates(
        (compute_and_bytes(compute)[0], spent[True]), (compute_and_bytes(memory)[1], spent[False])
    )


def _graph_node(event: Mapping[str, Any]) -> Node:
    """Return the event's node with aten's operator name, and with the shapes of this run."""
    args = event["args"]
    inputs, outputs = (_values(args.get(f"{side}_type_shape", ())) for side in ("input", "output"))
    operator = args["op_name"]
    return Node(event["name"], ONNX.get(operator, operator), operator, inputs, outputs)


def _values(described: Iterable[Mapping[str, Any]]) -> tuple[Value, ...]:
    return tuple(
        Value(f"{place}", tuple(shape), DTYPES.get(dtype, dtype))
        for place, entry in enumerate(described)
        for dtype, shape in entry.items()
    )


def _node(
    event: Mapping[str, Any],
    ms: float,
    provider: str,
    rate: Rates,
    modules: dict[str, str],
) -> NodeProfile:
    args, node = event["args"], _graph_node(event)
    name = event["name"].removesuffix(KERNEL)
    delegated = args["provider"] == provider
    return NodeProfile(
        name=name or f"node {args['node_index']}",
        operator=args["op_name"],
        where=args["provider"],
        delegated=delegated,
        ms=ms,
        reason=""
        if delegated
        else f"not delegated to {provider}; ONNX Runtime does not report why",
        estimated_gain_ms=None if delegated else rate.estimated_gain_ms(node, ms),
        module=vocabulary_projection(node) or module_of(name, modules),
    )


def _subgraphs(provider: str, events: Iterable[Mapping[str, Any]]) -> int:
    """Count how often execution changes from another provider to `provider`."""
    inside = [False, *(event["args"]["provider"] == provider for event in events)]
    return sum(now and not before for before, now in pairwise(inside))
