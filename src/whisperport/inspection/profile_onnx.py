"""Measure an ONNX model with ONNX Runtime's profiler: the provider of every node, and its time.

The nodes are those that are left after ONNX Runtime's own fusions. Source: the trace that
`SessionOptions.enable_profiling` writes; nodes are `cat: Node`, runs `model_run`.
"""

import json
import os
import re
import statistics
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from whisperport.errors import MissingPackageError, ProgramError, UsageError
from whisperport.inspection.gain import Rates, compute_and_bytes, is_compute_bound, rates
from whisperport.inspection.graph import Node, Value
from whisperport.inspection.inputs import hint_for, inputs_for
from whisperport.inspection.profile import (
    NodeProfile,
    Profile,
    ProfileOptions,
    by_time,
    median_overhead,
)
from whisperport.inspection.vocabulary import ONNX
from whisperport.runner import Array

CPU = "CPUExecutionProvider"
KERNEL = "_kernel_time"
CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
DTYPES = {"float": "float32", "double": "float64"}  # ONNX Runtime's words, where not numpy's


def profile_onnx(path: Path, options: ProfileOptions) -> Profile:
    """Run an ONNX model, and say which provider ran each node and for how long.

    Raises:
        ProgramError: it cannot be loaded or run, or has dynamic shapes and no inputs were given.
        UsageError: no such option or provider.
        MissingPackageError: ONNX Runtime is not installed.
    """
    ort = _onnxruntime()
    provider = _provider(ort, options)
    settings = ort.SessionOptions()
    settings.enable_profiling = True
    settings.intra_op_num_threads = options.threads or 0
    # As the target `onnxruntime` does.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 4  # it reports errors by exception as well
    arrays: list[Array] = []
    with tempfile.TemporaryDirectory() as folder:
        settings.profile_file_prefix = os.path.join(folder, "trace")
        try:
            session = ort.InferenceSession(os.fspath(path), settings, providers=[provider])
            wanted = [_value(i) for i in session.get_inputs()]
            arrays = inputs_for(wanted, options.inputs)
            feed = {value.name: array for value, array in zip(wanted, arrays, strict=True)}
            for _ in range(options.repeat + 1):
                session.run(None, feed)
            trace = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        except (ProgramError, UsageError):
            raise
        except Exception as error:  # its own exception classes have no common base but Exception
            raise ProgramError(
                f"ONNX Runtime cannot run {path.name}",
                why=_message(error),
                hint=hint_for(arrays),
            ) from error
    return _profile(path.stem, provider, trace)


def _message(error: Exception) -> str:
    """What went wrong, without where in ONNX Runtime's own sources it was noticed."""
    line = str(error).strip().split("\n")[0]
    return re.sub(r"/onnxruntime_src/\S+ [^)]*\) ", "", line)[:300]


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError(
            "cannot inspect an .onnx: ONNX Runtime is not installed",
            why=str(error),
            hint="pip install --upgrade whisperport",
        ) from error
    return onnxruntime


def _provider(ort: Any, options: ProfileOptions) -> str:
    unknown = [name for name in options.options if name != "provider"]
    if unknown:
        raise UsageError(f"ONNX Runtime has no run option `{unknown[0]}`", hint="known: provider")
    provider = options.options.get("provider", CPU)
    if provider not in ort.get_available_providers():
        raise UsageError(
            f"ONNX Runtime has no execution provider `{provider}` here",
            why=f"installed: {', '.join(ort.get_available_providers())}",
        )
    return provider


def _value(described: Any) -> Value:
    dtype = str(described.type)
    if dtype.startswith("tensor("):  # "tensor(float)"; not "seq(tensor(float))"
        dtype = dtype[len("tensor(") : -1]
    shape = tuple(axis if isinstance(axis, int) else str(axis) for axis in described.shape)
    return Value(described.name, shape, DTYPES.get(dtype, dtype))


def _profile(name: str, provider: str, trace: list[dict[str, Any]]) -> Profile:
    runs = sorted((e["ts"], e["dur"]) for e in trace if e["name"] == "model_run")[1:]
    events = [e for e in trace if e["cat"] == "Node" and e["name"].endswith(KERNEL)]
    starts, wholes = [start for start, _ in runs], [duration / 1e3 for _, duration in runs]
    by_run, first = _times(events, starts)
    times = {key: statistics.median(of_runs.values()) for key, of_runs in by_run.items()}
    inside = [[r[run] for r in by_run.values() if run in r] for run in range(1, len(runs) + 1)]
    rate = _rates(provider, times, first)
    nodes = [_node(first[key], ms, provider, rate) for key, ms in times.items()]
    return Profile(
        program=name,
        runtime="ONNX Runtime",
        target=provider,
        subgraphs=_pieces(provider, first.values()),
        nodes=by_time(nodes),
        overhead_ms=median_overhead(wholes, inside),
        run_ms=statistics.median(wholes),
        runs=len(runs),
        notes=("nodes are those left after ONNX Runtime's own fusions",),
    )


def _times(
    events: list[dict[str, Any]], starts: list[int]
) -> tuple[dict[str, dict[int, float]], dict[str, dict[str, Any]]]:
    """Milliseconds by run, counted from 1, and one event, of each node; the first run does not count.

    The time of nodes in the body of a Loop is in that of the Loop.
    """
    by_run: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    first: dict[str, dict[str, Any]] = {}
    body_until = 0
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        inside = event["ts"] < body_until
        if not inside and event["args"]["op_name"] in CONTROL_FLOW:
            body_until = event["ts"] + event["dur"]
        run = bisect_right(starts, event["ts"])
        if run and not inside:
            key = f"{event['args']['node_index']} {event['name']}"
            by_run[key][run] += event["dur"] / 1e3
            first.setdefault(key, event)
    return by_run, first


def _rates(
    provider: str, times: Mapping[str, float], events: Mapping[str, dict[str, Any]]
) -> Rates:
    products: list[Node] = []
    others: list[Node] = []
    spent = {True: 0.0, False: 0.0}
    for key, event in events.items():
        if event["args"]["provider"] == provider:
            node = _graph_node(event)
            (products if is_compute_bound(node) else others).append(node)
            spent[is_compute_bound(node)] += times[key]
    return rates(
        (compute_and_bytes(products)[0], spent[True]), (compute_and_bytes(others)[1], spent[False])
    )


def _graph_node(event: Mapping[str, Any]) -> Node:
    """In the vocabulary of the other readers, with the shapes that were met."""
    args = event["args"]
    inputs, outputs = (_values(args.get(f"{side}_type_shape", ())) for side in ("input", "output"))
    written = args["op_name"]
    return Node(event["name"], ONNX.get(written, written), written, inputs, outputs)


def _values(described: Iterable[Mapping[str, Any]]) -> tuple[Value, ...]:
    return tuple(
        Value(f"{place}", tuple(shape), DTYPES.get(dtype, dtype))
        for place, entry in enumerate(described)
        for dtype, shape in entry.items()
    )


def _node(event: Mapping[str, Any], ms: float, provider: str, rate: Rates) -> NodeProfile:
    args = event["args"]
    delegated = args["provider"] == provider
    return NodeProfile(
        name=event["name"].removesuffix(KERNEL) or f"node {args['node_index']}",
        operator=args["op_name"],
        where=args["provider"],
        delegated=delegated,
        ms=ms,
        reason="" if delegated else f"not delegated to {provider}",
        estimated_gain_ms=None if delegated else rate.estimated_gain_ms(_graph_node(event), ms),
    )


def _pieces(provider: str, events: Iterable[Mapping[str, Any]]) -> int:
    """How often running nodes enters the provider, in the order in which they ran."""
    inside = [False, *(event["args"]["provider"] == provider for event in events)]
    return sum(now and not before for before, now in pairwise(inside))
