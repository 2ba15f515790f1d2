"""Measure an OpenVINO model with its performance counters, read its graph, and keep its inner values.

The nodes that are measured are those of the graph after OpenVINO's fusions.
Source: openvino `InferRequest.get_profiling_info`, with `PERF_COUNT` on.
"""

import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from whisperport.errors import ProgramError, needs
from whisperport.program.profiling import (
    NodeProfile,
    Profile,
    ProfileOptions,
    Profiler,
    by_time,
    median_overhead,
)
from whisperport.program.runner import Array
from whisperport.targets.cpu.openvino.ir import DTYPES, is_ir, read_ir
from whisperport.targets.cpu.openvino.ir_graph import graph_of, ports_of, without_states
from whisperport.targets.cpu.openvino.runtime import CPU, FLOAT32, first_line, shared_core

if TYPE_CHECKING:  # the build layer needs torch
    from whisperport.model.inspection.graph import Graph, Value

EXECUTED = "EXECUTED"
WEIGHTS = "weights.bin"  # of all programs of a bundle


@final
class OpenVinoProfiler(Profiler):
    """Runs an OpenVINO IR, and reports which kernel runs each node.

    The runtime options are `device` (default: CPU) and every property of OpenVINO, such as
    INFERENCE_PRECISION_HINT.
    """

    title: ClassVar[str] = "OpenVINO .xml"
    suffix: ClassVar[str] = ".xml"
    files: ClassVar[int] = 2

    def recognizes(self, head: bytes) -> bool:
        return is_ir(head)

    def profile(self, files: Sequence[Path], options: ProfileOptions) -> Profile:
        """Run a model; without its .bin file in `files`, that is the file of the same name."""
        from whisperport.model.inspection.inputs import inputs_for

        model, weights = with_weights(files)
        device = options.options.get("device", CPU)
        with needs("cannot inspect an OpenVINO model: OpenVINO is not installed", extra="openvino"):
            core = shared_core()
        try:
            compiled = core.compile_model(
                core.read_model(model, weights), device, _properties(options)
            )
            feed = inputs_for([_value(port) for port in compiled.inputs], options.inputs)
            request = compiled.create_infer_request()
            request.infer(feed)
            runs = [_one_run(request, feed) for _ in range(options.repeat)]
            return _profile(model.stem, device, runs)
        except (RuntimeError, ValueError) as error:  # ValueError: a name is not UTF-8
            raise ProgramError(
                f"OpenVINO cannot run {model.name} on {device}",
                why=first_line(error),
                hint="check the file, and the device and properties given with --runtime-option",
            ) from error

    def read_graph(self, path: Path) -> "Graph":
        return graph_of(path.stem, read_ir(path))

    def without_states(self, path: Path, folder: Path) -> Path:
        return without_states(path, folder)

    def run_keeping(
        self, files: Sequence[Path], inputs: Sequence[Array], names: Collection[str]
    ) -> tuple[dict[str, Array], list[Array]]:
        path, weights = with_weights(files)
        ir = read_ir(path)
        graph, places = graph_of(path.stem, ir), ports_of(ir)
        with needs("cannot run an OpenVINO model: OpenVINO is not installed", extra="openvino"):
            core = shared_core()
        try:
            model = core.read_model(path, weights)
            nodes = {node.get_friendly_name(): node for node in model.get_ops()}
            sources = [result.get_node().input_value(0) for result in model.outputs]
            rows = [(port.get_node().get_friendly_name(), port.get_index()) for port in sources]
            added = [place for name, place in places.items() if name in names and place not in rows]
            model.add_outputs([nodes[node].output(index) for node, index in added])
            feed = {
                places[value.name][0]: array
                for value, array in zip(graph.inputs, inputs, strict=True)
            }
            ordered = [feed[port.get_node().get_friendly_name()] for port in model.inputs]
            results = core.compile_model(model, CPU, FLOAT32)(ordered)
            arrays = dict(zip([*rows, *added], results.values(), strict=True))
        except (RuntimeError, ValueError, KeyError) as error:  # ValueError: a name is not UTF-8
            raise ProgramError(
                f"OpenVINO cannot run {path.name}",
                why=first_line(error),
                hint="check the file, and its inputs",
            ) from error
        values = {name: arrays[place] for name, place in places.items() if name in names}
        return values, [arrays[places[value.name]] for value in graph.outputs]


def with_weights(files: Sequence[Path]) -> tuple[Path, Path]:
    """Return the .xml file and the .bin file of a program, which a bundle's programs share."""
    if len(files) == 2:
        return files[0], files[1]
    own, shared = files[0].with_suffix(".bin"), files[0].with_name(WEIGHTS)
    return files[0], shared if shared.is_file() and not own.is_file() else own


def _properties(options: ProfileOptions) -> dict[str, Any]:
    """Return the properties that the user chose, and those that measuring needs."""
    properties: dict[str, Any] = {
        name: value for name, value in options.options.items() if name != "device"
    }
    if options.threads:
        properties["INFERENCE_NUM_THREADS"] = options.threads
    return {**properties, "PERF_COUNT": True}


def _value(port: Any) -> "Value":
    from whisperport.model.inspection.graph import Value

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
        on_cpu=device == CPU,
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
