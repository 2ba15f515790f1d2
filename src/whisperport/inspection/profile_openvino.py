"""Measure an OpenVINO model with its performance counters: the kernel and time of every node.

The nodes are those of the graph after OpenVINO's fusions.
Source: openvino `InferRequest.get_profiling_info`, with `PERF_COUNT` on.
"""

import statistics
import time
from pathlib import Path
from typing import Any

from whisperport.errors import MissingPackageError, ProgramError
from whisperport.inspection.graph import Value
from whisperport.inspection.inputs import inputs_for
from whisperport.inspection.profile import (
    NodeProfile,
    Profile,
    ProfileOptions,
    by_time,
    median_overhead,
)

CPU = "CPU"
EXECUTED = "EXECUTED"
DTYPES = {"f32": "float32", "f16": "float16", "f64": "float64", "boolean": "bool"}
DTYPES |= {
    f"{sign}{bits}": f"{word}{bits}"
    for sign, word in (("i", "int"), ("u", "uint"))
    for bits in (8, 16, 32, 64)
}


def profile_openvino(path: Path, options: ProfileOptions, weights: Path | None = None) -> Profile:
    """Run an OpenVINO IR, and report which kernel runs each node and how long it takes.

    Args:
        path: the .xml file.
        options: its runtime options are `device` (default: CPU) and every property of OpenVINO, such as
            INFERENCE_PRECISION_HINT.
        weights: the .bin file. Default: None, the file of the same name.

    Raises:
        ProgramError: the model cannot be read, compiled or run, or has dynamic shapes and no inputs were
            given.
        MissingPackageError: OpenVINO is not installed.
    """
    openvino = _openvino()
    properties: dict[str, Any] = {
        name: v for name, v in options.options.items() if name != "device"
    }
    device = options.options.get("device", CPU)
    if options.threads:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    try:
        core = openvino.Core()
        model = core.read_model(path, weights or path.with_suffix(".bin"))
        compiled = core.compile_model(model, device, {**properties, "PERF_COUNT": True})
        wanted = [_value(port) for port in compiled.inputs]
        feed = inputs_for(wanted, options.inputs)
        request = compiled.create_infer_request()
        request.infer(feed)
        runs = [_one_run(request, feed) for _ in range(options.repeat)]
        return _profile(path.stem, device, runs)
    except (RuntimeError, ValueError) as error:  # ValueError: a name is not UTF-8
        raise ProgramError(
            f"OpenVINO cannot run {path.name} on {device}",
            why=first_line(error),
            hint="check the file, and the device and properties given with --runtime-option",
        ) from error


def _openvino() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingPackageError(
            "cannot inspect an OpenVINO model: OpenVINO is not installed",
            why=str(error),
            hint='pip install "whisperport[openvino]"',
        ) from error
    return openvino


def first_line(error: Exception) -> str:
    """Return the first line that explains the error; earlier lines name a place in OpenVINO's sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line for line in lines if not line.startswith(("Exception from", "Check '"))]
    return (explained or lines or ["OpenVINO gave no reason"])[0][:200]


def _value(port: Any) -> Value:
    shape = tuple(
        str(axis) if axis.is_dynamic else axis.get_length() for axis in port.get_partial_shape()
    )
    kind = port.get_element_type().get_type_name()
    return Value(port.get_any_name(), shape, DTYPES.get(kind, kind))


def _one_run(request: Any, feed: list[Any]) -> tuple[float, list[Any]]:
    started = time.perf_counter()
    request.infer(feed)
    run_ms = 1e3 * (time.perf_counter() - started)
    return run_ms, request.get_profiling_info()


def _profile(name: str, device: str, runs: list[tuple[float, list[Any]]]) -> Profile:
    run_times = [run_ms for run_ms, _ in runs]
    counters = [{info.node_name: info for info in infos} for _, infos in runs]
    last = counters[-1]
    ran = {name: info for name, info in last.items() if info.status.name == EXECUTED}
    nodes = [
        _node(info, device, [_ms(run[name]) for run in counters if name in run])
        for name, info in ran.items()
    ]
    notes = [
        f"{len(last) - len(ran)} nodes were fused into others, or folded when the model was compiled"
    ]
    if any(node.where.endswith("bf16") for node in nodes):
        notes.append(
            "some nodes compute in bfloat16, OpenVINO's default on processors that support it; for float32 "
            "use --runtime-option INFERENCE_PRECISION_HINT=f32"
        )
    return Profile(
        program=name,
        runtime="OpenVINO",
        target=device,
        subgraphs=1,
        nodes=by_time(nodes),
        overhead_ms=median_overhead(
            run_times, [[_ms(info) for info in infos] for _, infos in runs]
        ),
        run_ms=statistics.median(run_times),
        runs=len(runs),
        notes=tuple(notes),
    )


def _ms(info: Any) -> float:
    return 1e3 * float(info.real_time.total_seconds())


def _node(info: Any, device: str, times: list[float]) -> NodeProfile:
    reference = info.exec_type.startswith("ref")
    return NodeProfile(
        name=info.node_name,
        operator=info.node_type,
        where=f"{device} {info.exec_type}",
        delegated=True,  # OpenVINO rejects a model if its device cannot run every node
        ms=statistics.median(times),
        reason="a slow reference kernel: OpenVINO has no optimized kernel for this node on this device"
        if reference
        else "",
    )
