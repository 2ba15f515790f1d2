"""Run one ONNX program in one session of ONNX Runtime, and report where its nodes ran. Runs in a child.

A provider may crash when a session is created, or may decline nodes, which ONNX Runtime then runs on the
CPU without a message. The nodes' places are therefore read from ONNX Runtime's own trace of the first run.
This uses only what ONNX Runtime 1.20 and 1.31 have.
"""

import json
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import BundleError, WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.execution_providers import Provider
from whisperport.program.runner import Array
from whisperport.system.child import first_line
from whisperport.system.progress import begin_stage
from whisperport.targets.onnx.runner import session_settings

CREATING, FIRST_RUN, RUNNING = "creating the session", "first run", "repeated runs"
LOCATION = re.compile(r"/\S+\.(?:cc|cpp|h):[0-9]+ [^)\n]*\) ?")  # file, line and C++ function
KERNEL = "_kernel_time"  # the end of the name of a node's entry in the trace


def run_session(
    *,
    folder: str,
    program: str,
    provider: dict[str, Any],
    inputs: str,
    outputs: str,
    log: str,
    repeat: int,
    threads: int | None,
) -> dict[str, Any]:
    """Create a session, run it, and measure.

    Args:
        folder: of the bundle.
        program: name of the program.
        provider: the fields of a `Provider`.
        inputs: `.npz` file with one array per input.
        outputs: `.npz` file to write, with one array per output of the first run.
        log: file to write the native messages to.
        repeat: number of measured runs after the first one.
        threads: CPU threads; None: ONNX Runtime chooses.

    Returns:
        JSON: `failed` and `stage` if an exception was raised; otherwise the nodes, times and deviation.
    """
    chosen = Provider(**provider)
    ort = chosen.require()
    graph = _graph(Path(folder), program)
    with np.load(inputs, allow_pickle=False) as stored:
        feed = {name: stored[name] for name in stored.files}
    _redirect_messages(log)
    stage = CREATING
    try:
        begin_stage(stage)
        with tempfile.TemporaryDirectory() as traces:
            settings = session_settings(ort, threads)
            settings.log_severity_level = 2  # warnings: providers tell there why they decline nodes
            settings.enable_profiling = True
            settings.profile_file_prefix = os.path.join(traces, "trace")
            started = time.perf_counter()
            session = chosen.session(ort, os.fspath(graph.path), settings)
            create_s = time.perf_counter() - started
            stage = FIRST_RUN
            begin_stage(stage)
            names = [value.name for value in session.get_outputs()]
            first = dict(zip(names, session.run(names, feed), strict=True))
            trace = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        np.savez(outputs, **first)
        stage = RUNNING
        begin_stage(stage)
        times, deviation = _repeated(session, names, feed, first, repeat)
    except WhisperportError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common base class but Exception
        return {"failed": f"{type(error).__name__}: {_message(error)}", "stage": stage}
    return {
        "nodes": _nodes(trace),
        "create_s": create_s,
        "ms": statistics.median(times),
        "deviation": deviation,
    }


def _message(error: Exception) -> str:
    """Return the first line of an error, without the place in the runtime's sources that raised it."""
    return first_line(Exception(re.sub(LOCATION, "", str(error))))


def _graph(folder: Path, program: str) -> OnnxGraph:
    """Return the program's checked graph."""
    bundle = Bundle.open(folder, check_hashes=False)
    for entry in bundle.manifest.programs:
        if entry.spec.name == program:
            graph = OnnxGraph.of(folder, entry)
            graph.detach()
            return graph
    raise BundleError(f"the bundle {folder} was replaced while it was verified")


def _redirect_messages(log: str) -> None:
    """Write what native libraries print to a file, so that its end explains a crash."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _repeated(
    session: Any, names: list[str], feed: dict[str, Array], first: dict[str, Array], repeat: int
) -> tuple[list[float], float]:
    """Run again on the same inputs.

    Returns:
        Milliseconds of each run; and the largest difference from the first run, divided by the largest
        value of the same output; 0 if all outputs are identical.
    """
    times: list[float] = []
    deviation = 0.0
    for _ in range(repeat):
        started = time.perf_counter()
        outputs = session.run(names, feed)
        times.append(1e3 * (time.perf_counter() - started))
        for name, array in zip(names, outputs, strict=True):
            if not np.array_equal(array, first[name], equal_nan=array.dtype.kind == "f"):
                deviation = max(deviation, _difference(array, first[name]))
    return times, deviation


def _difference(array: Array, first: Array) -> float:
    """Return max|array − first| / max|first|; infinity if it is not a finite number."""
    with np.errstate(all="ignore"):
        difference = np.abs(array.astype(np.float64) - first.astype(np.float64)).max()
        relative = float(difference / np.abs(first.astype(np.float64)).max())
    return relative if np.isfinite(relative) else float("inf")


def _nodes(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the executed nodes of a trace by execution provider and operator, with their counts and times.

    Source: the trace that `SessionOptions.enable_profiling` writes; its entries with `cat: Node` are nodes.
    A provider that compiles subgraphs has one node for each of them.
    """
    counts: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for event in trace:
        if event.get("cat") == "Node" and event["name"].endswith(KERNEL):
            key = (str(event["args"]["provider"]), str(event["args"]["op_name"]))
            counts[key] += 1
            times[key] += event["dur"]
    return [
        {
            "provider": provider,
            "operator": operator,
            "count": n,
            "ms": times[provider, operator] / 1e3,
        }
        for (provider, operator), n in counts.most_common()
    ]
