"""Run a program, of a file or of a bundle, and keep its inner values."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.errors import MissingPackageError, ProgramError, WhisperportError
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.profiling import Profiler, readable_formats
from whisperport.program.runner import Array
from whisperport.system.child import first_line
from whisperport.system.regular_file import other_kind
from whisperport.targets import PROFILERS

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.model.inspection.graph import Graph, Node, Value
    from whisperport.model.inspection.read_pte import Method
    from whisperport.model.trace.program import Program

HINT = f"give a .pt2, {readable_formats(PROFILERS)} file, BUNDLE:PROGRAM, or a folder of a device's arrays"
PTE_SPARE = 16 * 2**20  # bytes of ETDump's buffer beside the values
PARTLY = "{}: a .pte keeps only the values at the borders of its delegates; those inside are not compared."
DELEGATE = "delegate"
CALLS = ("OPERATOR_CALL", "DELEGATE_CALL")


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The values of one run.

    Attributes:
        values: name -> floating-point value that depends on an input, in the order of the graph;
            integers of a quantized tensor are dequantized.
        outputs: in the order of the signature.
    """

    values: Mapping[str, Array]
    outputs: tuple[Array, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recordable:
    """A program that can be run once, with its inner values kept.

    Attributes:
        graph: its nodes; `graph.inputs` are in the order of `record`'s argument.
        record: runs it.
        random: returns random inputs from a seed; None: any random inputs will do.
        note: what of its inner values is not kept; empty: all are.
    """

    graph: "Graph"
    record: Callable[[Sequence[Array]], Recording]
    random: Callable[[int], list[Array]] | None = None
    note: str = ""


def split_name(argument: str) -> tuple[Path, str]:
    """Return the path, and the name of the program behind `BUNDLE:PROGRAM`; empty: none is given."""
    path, colon, program = argument.rpartition(":")
    return (Path(path), program) if colon and not Path(argument).exists() else (Path(argument), "")


@contextmanager
def opened(argument: str) -> Iterator[Recordable]:
    """Open a program: a file, or `BUNDLE:PROGRAM`; of a .pte file, `FILE:METHOD`.

    Raises:
        ProgramError: it is missing, damaged, of an unknown format, or holds several programs and none is
            named.
        BundleError: the bundle is damaged, or has no such program.
        MissingPackageError: torch, or the runtime of its format, is not installed.
    """
    path, program = split_name(argument)
    if (kind := other_kind(path)) and not path.is_dir():
        raise ProgramError(f"{path} is not a program", why=f"the path is {kind}", hint=HINT)
    with TemporaryDirectory(prefix="whisperport-") as folder:
        if path.is_dir():
            yield _of_bundle(path, program, Path(folder))
        else:
            yield _of_file(path, program)


def _of_file(path: Path, method: str = "") -> Recordable:
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        why = error.strerror or str(error)
        raise ProgramError(f"cannot read a program from {path}", why=why, hint=HINT) from error
    try:
        if head[4:6] == b"ET" and head[6:8].isdigit():
            return _pte(path, method)
        if head.startswith(b"PK\x03\x04"):
            return _pt2(path)
        if head[4:8] == b"TFL3":
            return _tflite(path)
        if own := next((profiler for profiler in PROFILERS if profiler.recognizes(head)), None):
            return _own(own, [path])
        if head.startswith(b"\x08") or path.suffix == ".onnx":
            return _onnx(path)
    except ImportError as error:
        raise MissingPackageError(
            f"cannot compare {path.name}: a package is not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error
    raise ProgramError(
        f"{path.name} is not a program of a format that can be compared",
        why="the file is empty" if not head else f"the file begins with {head!r}",
        hint=HINT,
    )


def _of_bundle(folder: Path, program: str, work: Path) -> Recordable:
    if not (folder / MANIFEST).is_file():
        raise ProgramError(f"{folder} is not a bundle", why=f"it has no {MANIFEST}", hint=HINT)
    bundle = Bundle.open(folder)
    names = [entry.spec.name for entry in bundle.manifest.programs]
    if not program:
        raise ProgramError(
            f"{folder} holds {len(names)} programs, and none is named",
            why=f"it holds {', '.join(names)}",
            hint=f"name one: {folder}:{names[0]}",
        )
    entry = bundle.manifest.program(program)
    file = bundle.path(entry.files[0])
    if file.suffix == ".onnx":
        OnnxGraph.of(bundle.folder, entry).read()  # checks the paths of its external data
        return _onnx(file)
    if file.suffix == ".tflite":
        from whisperport.model.inspection.tflite_signatures import copy_of_program, read_signatures

        signature = read_signatures(file).get(entry.method)
        if signature is not None and signature.subgraph:
            copy_of_program(file, signature.subgraph, work / "program.tflite")
            file = work / "program.tflite"
        return _tflite(file)
    if file.suffix == ".pte":
        return _pte(file, entry.method)
    if own := next((profiler for profiler in PROFILERS if file.suffix == profiler.suffix), None):
        return _own(own, [bundle.path(name) for name in entry.files])
    raise ProgramError(
        f"the program `{program}` of {folder} cannot be run with its inner values kept",
        why=f"its file is {file.name}, which its vendor's runtime reads",
        hint="let the device write its arrays into a folder, and give the folder",
    )


def _pt2(path: Path) -> Recordable:
    from whisperport.model.inspection.read_exported import read_exported
    from whisperport.model.trace.pt2 import read_pt2
    from whisperport.model.trace.trial import random_inputs

    program = read_pt2(path)
    graph = read_exported(path.stem, program.exported)
    return Recordable(
        graph,
        lambda inputs: _recorded(graph, *_torch_values(program, inputs)),
        lambda seed: [_as_array(tensor) for tensor in random_inputs(program, seed)],
    )


def _torch_values(
    program: "Program", inputs: Sequence[Array]
) -> tuple[dict[str, Array], list[Array]]:
    """Run a program in torch's interpreter of graphs."""
    import torch
    from torch.fx import Interpreter, Node

    values: dict[str, Array] = {}

    class Keeping(Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                values[n.name] = _as_array(result.clone())  # later nodes may write to it
            return result

    exported = program.exported
    stored = {**exported.state_dict, **exported.constants}
    arrays = iter(inputs)
    arguments = [
        torch.from_numpy(np.array(next(arrays))).to(node.meta["val"].dtype)
        if spec.target is None
        else stored[spec.target]
        for spec, node in zip(
            exported.graph_signature.input_specs,
            exported.graph.find_nodes(op="placeholder"),
            strict=True,
        )
    ]
    try:
        with torch.no_grad():
            results = Keeping(exported.graph_module).run(*arguments, enable_io_processing=False)
    except (RuntimeError, MemoryError, IndexError) as error:
        raise _cannot_run("torch", program.name, error, inputs) from error
    outputs = [result for result in results if isinstance(result, torch.Tensor)]
    count = len(program.spec.outputs)  # in front of them are buffers that the program writes to
    return values, [_as_array(tensor) for tensor in outputs[len(outputs) - count :]]


def _as_array(tensor: Any) -> Array:
    """Convert a tensor of torch; bfloat16, which numpy does not have, becomes float32."""
    import torch

    plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    array: Array = plain.detach().contiguous().numpy()
    return array


def _onnx(path: Path) -> Recordable:
    from whisperport.model.inspection.read_onnx import read_onnx
    from whisperport.targets.onnx.activations import OnnxActivations

    graph = read_onnx(path)
    model = OnnxActivations.read(path)

    def record(inputs: Sequence[Array]) -> Recording:
        names = [value.name for value in _kept(graph)]
        feed = {value.name: array for value, array in zip(graph.inputs, inputs, strict=True)}
        try:
            ((outputs, values),) = model.run(names, [feed])
        except WhisperportError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            raise _cannot_run("ONNX Runtime", path.name, error, inputs) from error
        return _recorded(graph, dict(zip(names, values, strict=True)), outputs)

    return Recordable(graph, record)


def _tflite(path: Path) -> Recordable:
    from whisperport.model.inspection.read_tflite import read_tflite
    from whisperport.targets.tflite.runner import RUNTIME, run_keeping

    graph = read_tflite(path)[0]
    places = {value.name: int(value.name.partition(":")[0]) for value in _kept(graph)}

    def record(inputs: Sequence[Array]) -> Recording:
        try:
            return _recorded(graph, *run_keeping(path, inputs, places))
        except (RuntimeError, ValueError) as error:
            raise _cannot_run(RUNTIME, path.name, error, inputs) from error

    return Recordable(graph, record)


def _own(profiler: Profiler, files: Sequence[Path]) -> Recordable:
    """Open a program of a format that only one target has."""
    graph: Graph = profiler.read_graph(files[0])

    def record(inputs: Sequence[Array]) -> Recording:
        names = {value.name for value in _kept(graph)}
        return _recorded(graph, *profiler.run_keeping(files, inputs, names))

    return Recordable(graph, record)


def _pte(path: Path, method: str) -> Recordable:
    from whisperport.model.inspection.quiet import quiet
    from whisperport.model.inspection.read_pte import read_pte

    with quiet():
        methods = {
            name: parsed
            for name, parsed in read_pte(path.read_bytes(), path.name).items()
            if parsed.instructions
        }
    if method not in methods and (method or len(methods) != 1):
        raise ProgramError(
            f"{path.name} has no method `{method}`"
            if method
            else f"{path.name} has several methods",
            why=f"it has {', '.join(methods)}",
            hint=f"name one: {path}:{next(iter(methods), 'forward')}",
        )
    chosen = methods[method or next(iter(methods))]
    values = [value for value in chosen.inputs if value is not None]
    inputs = tuple(replace(value, name=f"input_{place}") for place, value in enumerate(values))
    size = sum(output.n_bytes or 0 for node in chosen.graph.nodes for output in node.outputs)
    graph = replace(border_graph(chosen), name=path.stem, inputs=inputs)

    def record(arrays: Sequence[Array]) -> Recording:
        try:
            values, outputs = dumped_values(path, chosen, arrays, 3 * size + PTE_SPARE)
        except RuntimeError as error:
            raise _cannot_run("ExecuTorch", path.name, error, arrays) from error
        return _recorded(graph, values, outputs)

    return Recordable(graph, record, note=PARTLY.format(path.name))


def _cannot_run(
    runtime: str, name: str, error: BaseException, inputs: Sequence[Array]
) -> ProgramError:
    from whisperport.model.inspection.inputs import hint_for

    return ProgramError(
        f"{runtime} cannot run {name}",
        why=first_line(error)[:300],
        hint=hint_for(inputs) or "if you trust its source, `--trust` runs it without limits",
    )


def _recorded(graph: "Graph", values: Mapping[str, Array], outputs: Sequence[Array]) -> Recording:
    """Return the values that are floating-point, in the order of the graph."""
    names = [value.name for value in _kept(graph)]
    kept = {name: values[name] for name in names if name in values}
    floats = {name: array for name, array in kept.items() if array.dtype.kind == "f" and array.size}
    return Recording(floats, tuple(outputs))


def _kept(graph: "Graph") -> Iterator["Value"]:
    """Yield the values that nodes compute from the inputs, and that are or represent real numbers."""
    for node in dependent(graph):
        for value in node.outputs:
            quantized = value.quantization is not None and bool(value.quantization.scale)
            if "float" in value.dtype or quantized or not value.dtype:
                yield value


def dependent(graph: "Graph") -> Iterator["Node"]:
    """Yield the nodes that depend on an input."""
    known = {tensor.name for tensor in graph.inputs}
    for node in graph.nodes:
        if any(tensor.name in known for tensor in node.tensors):
            known.update(output.name for output in node.outputs)
            yield node


def border_graph(method: "Method") -> "Graph":
    """Return the calls of a method as nodes; each is taken to read what the call before it computes.

    ETDump tells the last output of a delegate, and all outputs of another operator.
    """
    from whisperport.model.inspection.graph import Node, Value

    read = tuple(value for value in method.inputs if value is not None)[:1]
    read = tuple(replace(value, name="input_0") for value in read)
    nodes = []
    for (chain, place), call in method.instructions.items():
        if call.backend:
            outputs: tuple[Value, ...] = (Value(f"{DELEGATE} {chain}.{place}", None, "float32"),)
            node = Node(outputs[0].name, DELEGATE, call.backend, read, outputs)
        elif call.node is not None:
            node = replace(call.node, inputs=read)
        else:
            continue
        nodes.append(node)
        read = node.outputs[:1] or read
    return replace(method.graph, nodes=tuple(nodes))


def dumped_values(
    path: Path, method: "Method", inputs: Sequence[Array], buffer_bytes: int
) -> tuple[dict[str, Array], list[Array]]:
    """Run a method, and return the values that ETDump kept by their names, and the outputs.

    Raises:
        ProgramError: the runtime was built without ETDump.
        RuntimeError: ExecuTorch cannot load or run the method.
    """
    from torch import Tensor, from_numpy

    from whisperport.model.inspection.profile_pte import with_etdump
    from whisperport.model.inspection.quiet import quiet

    with quiet():
        program = with_etdump(path, buffer_bytes)
        results = program.load_method(method.name).call([from_numpy(np.array(a)) for a in inputs])
        outputs = [
            np.array(result.float() if _is_bfloat16(result) else result)
            for result in results
            if isinstance(result, Tensor)
        ]
        with tempfile.TemporaryDirectory(prefix="whisperport-") as folder:
            dump, values = Path(folder, "etdump"), Path(folder, "values")
            program.write_etdump_result_to_file(str(dump), str(values))
            return _named(method, _events(dump, values)), outputs


def _is_bfloat16(tensor: Any) -> bool:
    return str(tensor.dtype) == "torch.bfloat16"


def _events(dump: Path, values: Path) -> list[Any]:
    from executorch.devtools.inspector import Inspector

    inspector = Inspector(etdump_path=str(dump), debug_buffer_path=str(values))
    return [event for block in inspector.event_blocks for event in block.events]


def _named(method: "Method", events: Sequence[Any]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for event in events:
        data = event.debug_data
        call = method.instructions.get((0, event._instruction_id))
        if event.name not in CALLS or call is None or data is None or not len(data):
            continue
        names = [f"{DELEGATE} 0.{event._instruction_id}"]
        if call.node is not None and not call.backend:
            names = [output.name for output in call.node.outputs]
        for name, tensor in zip(reversed(names), reversed(list(data)), strict=False):
            arrays[name] = np.array(tensor.float() if _is_bfloat16(tensor) else tensor)
    return arrays
