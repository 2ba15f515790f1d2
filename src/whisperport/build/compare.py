"""Compare two programs: run both on the same inputs, and find the layer at which they diverge."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from whisperport.build.inspect import size_of
from whisperport.errors import ProgramError, UsageError
from whisperport.program.bundle import MANIFEST
from whisperport.program.json_records import from_json
from whisperport.program.runner import Array
from whisperport.program.strict_json import Field
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.option import Option
from whisperport.system.progress import begin_stage
from whisperport.verification.array_comparison import Comparison, compare_output
from whisperport.verification.diagnosis.divergence import (
    ComparedPrograms,
    ComparedValue,
    divergence,
    matched_values,
    with_errors_before,
)
from whisperport.verification.diagnosis.layers import compared_layer
from whisperport.verification.diagnosis.matching import arrangements
from whisperport.verification.diagnosis.raw_files import SUFFIXES
from whisperport.verification.diagnosis.recording import Recordable, Recording, opened, split_name
from whisperport.verification.tolerances import GATES, LOWERED, gate_for

if TYPE_CHECKING:  # torch may be missing at run time
    from whisperport.model.inspection.graph import Graph

BASE_BYTES = 8 * 2**30  # the inner values of Whisper's small encoder, twice
MEMORY = 4.0  # times the bytes of the files
SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of `compare`.

    Args:
        trust: run the programs in this process, without limits on memory and time. Default: False.
    """

    inputs: Annotated[
        Path | None,
        Option(
            "Inputs of both programs: an .npz file of an array per input of A, a folder of files NAME.npy, "
            "or audio, if A reads a spectrogram",
            metavar="PATH",
            exists=True,
            default="random values",
        ),
    ] = None
    seed: Annotated[int, Option("Seed of the random inputs", 0, 999_999)] = 0
    trust: bool = False


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    options: CompareOptions | None = None,
) -> ComparedPrograms:
    """Run two programs on the same inputs, and find the first layer at which they diverge.

    Inner values are matched by their names, modules, operators and order, and by their similarity. The
    programs run in a child process with limits on memory and time.

    Args:
        a: a `.pt2`, `.onnx`, `.tflite` or `.pte` file, `BUNDLE:PROGRAM`, or a folder of the arrays that a
            device wrote, `NAME.npy` or `NAME.bin`, named after the values of the other program.
        b: the same. Errors are relative to A; if A is a device's folder, to B.
        options: see `CompareOptions`. Default: None, all defaults.

    Returns:
        The error of every matched value and output; true if all outputs are within the limits.

    Raises:
        ProgramError: a program is missing, damaged, of an unknown format, cannot be run, or exceeded a
            limit; or the two have different inputs or no value in common.
        BundleError: a bundle is damaged, or has no such program.
        UsageError: both are folders of a device, or a device's folder is compared without inputs.
        MissingPackageError: torch, or the runtime of a format, is not installed.
    """
    options = options or CompareOptions()
    a, b = os.fspath(a), os.fspath(b)
    if options.trust:
        return _compare(a, b, options)
    size = sum(size_of(split_name(name)[0]) for name in (a, b))
    limits = Limits(round(BASE_BYTES + MEMORY * size), SECONDS)
    inputs = None if options.inputs is None else os.fspath(options.inputs)
    arguments = {"a": a, "b": b, "inputs": inputs, "seed": options.seed}
    try:
        result = run_limited("whisperport.build.compare:compare_in_child", arguments, limits)
    except StoppedError as error:
        raise ProgramError(
            f"{a} and {b} cannot be compared",
            why=str(error),
            hint=f"they ran with at most {limits}; if you trust their source, `--trust` removes the limits",
        ) from error
    return from_json(ComparedPrograms, Field(result, "", "the answer of the child process"))


def compare_in_child(*, a: str, b: str, inputs: str | None, seed: int) -> dict[str, Any]:
    """Run `compare` in the child process, and return the result as JSON."""
    inputs_path = None if inputs is None else Path(inputs)
    return asdict(_compare(a, b, CompareOptions(inputs=inputs_path, seed=seed)))


def _compare(a: str, b: str, options: CompareOptions) -> ComparedPrograms:
    dumps = [Path(name).is_dir() and not (Path(name) / MANIFEST).is_file() for name in (a, b)]
    if all(dumps):
        raise UsageError(
            "two folders of arrays hold no program to compare",
            hint=f"whisperport diagnose {a} {b}",
        )
    if any(dumps):
        program, folder = (b, a) if dumps[0] else (a, b)
        return _with_device(program, Path(folder), options)
    with opened(a) as first_program, opened(b) as second_program:
        begin_stage(f"running {a}")
        arrays = _inputs(first_program, second_program, options)
        first = first_program.record(arrays)
        begin_stage(f"running {b}")
        second = second_program.record(
            _inputs_of(second_program.graph, first_program.graph, arrays)
        )
        begin_stage("comparing their values")
        values = matched_values((first_program.graph, first), (second_program.graph, second))
        outputs = _outputs((first_program.graph, first), (second_program.graph, second))
    if not values:
        raise _nothing_matched(a, b, first, second)
    kept = len(first.values), len(second.values)
    dtypes = {str(array.dtype) for run in (first, second) for array in run.values.values()}
    places = divergence(values, dtypes)
    notes = tuple(filter(None, (first_program.note, second_program.note)))
    return ComparedPrograms(
        a=a,
        b=b,
        values=values,
        kept=kept,
        outputs=outputs,
        first=places[0],
        worst=places[1],
        notes=notes,
    )


def _inputs(first: Recordable, second: Recordable, options: CompareOptions) -> list[Array]:
    """Return the inputs of the first program, in its order."""
    from whisperport.model.inspection.inputs import inputs_for, table_rows

    if options.inputs is not None:
        return _given(first.graph, options.inputs)
    if first.random is not None:
        return first.random(options.seed)
    if second.random is not None:
        return _inputs_of(first.graph, second.graph, second.random(options.seed))
    rows = table_rows(first.graph)
    return inputs_for(first.graph.inputs, None, seed=options.seed, rows=rows)


def _given(graph: "Graph", path: Path) -> list[Array]:
    """Return the first sample of inputs in a file or folder; of dynamic shapes, the arrays of a file."""
    from whisperport.build.compile.lowered_file import static_tensor
    from whisperport.model.inspection.inputs import inputs_for, read_inputs
    from whisperport.program.host_part import HostPart
    from whisperport.program.spec import ProgramSpec
    from whisperport.verification.recording.given_inputs import GivenInputs

    if path.suffix == ".npz" and any(tensor.size is None for tensor in graph.inputs):
        return inputs_for(graph.inputs, read_inputs(path))
    spec = ProgramSpec(graph.name, tuple(map(static_tensor, graph.inputs)), ())
    return next(GivenInputs.find(path, spec, HostPart(), force=True).read([0]))


def _inputs_of(graph: "Graph", source: "Graph", arrays: Sequence[Array]) -> list[Array]:
    """Return arrays for the inputs of another program: by name, or else in their order.

    Raises:
        ProgramError: the two have inputs of other numbers, shapes or dtypes.
    """
    from whisperport.model.inspection.inputs import has_shape

    names = [tensor.name for tensor in source.inputs]
    by_name = dict(zip(names, arrays, strict=True))
    input_names = [tensor.name for tensor in graph.inputs]
    ordered = (
        [by_name[name] for name in input_names] if set(input_names) == set(names) else list(arrays)
    )
    shown = [
        ", ".join(f"{tensor.name} {tensor.shape} {tensor.dtype}" for tensor in of.inputs)
        for of in (source, graph)
    ]
    error = ProgramError(
        f"{source.name} and {graph.name} have different inputs",
        why=f"{shown[0]}; and {shown[1]}"[:400],
        hint="compare two forms of one program",
    )
    if len(input_names) != len(ordered):
        raise error
    fitted = []
    for value, array in zip(graph.inputs, ordered, strict=True):
        shape = tuple(n for n in value.shape or () if isinstance(n, int))
        forms = [array] if has_shape(array, value.shape) else list(arrangements(shape, array))[-1:]
        same_kind = (array.dtype.kind == "f") == ("float" in value.dtype)
        if not forms or not (same_kind or value.quantization):
            raise error
        dtype = value.dtype if same_kind and value.dtype != "bfloat16" else array.dtype
        fitted.append(np.ascontiguousarray(forms[0], dtype))
    return fitted


def _outputs(a: tuple["Graph", Recording], b: tuple["Graph", Recording]) -> tuple[Comparison, ...]:
    """Compare the outputs in their order. Integers and floats of other widths are converted first."""
    graphs, runs = (a[0], b[0]), (a[1], b[1])
    dtypes = {value.dtype for graph in graphs for node in graph.nodes for value in node.outputs}
    quantized = any(_is_quantized(graph) for graph in graphs)
    gate = GATES["w8a8"] if quantized else gate_for(LOWERED, dtypes)
    names = [value.name for value in (graphs[0].outputs or graphs[1].outputs)]
    count = max(len(run.outputs) for run in runs)
    names += [f"output {place}" for place in range(len(names), count)]
    comparisons = []
    for place in range(count):
        x, y = (run.outputs[place] if place < len(run.outputs) else None for run in runs)
        if x is not None and y is not None:
            if x.shape != y.shape:
                y = next(iter(arrangements(x.shape, y)), y)
            y = y.astype(x.dtype) if x.dtype.kind == y.dtype.kind else y
        comparisons.append(compare_output(names[place], y, x, gate))
    return tuple(comparisons)


def _is_quantized(graph: "Graph") -> bool:
    return any(
        "quantize" in node.original_op.lower() or any(value.quantization for value in node.outputs)
        for node in graph.nodes
    )


def _with_device(program: str, folder: Path, options: CompareOptions) -> ComparedPrograms:
    """Compare the arrays that a device wrote with the values of the same names."""
    if options.inputs is None:
        raise UsageError(
            f"the inputs of the arrays in {folder} are not known",
            why="a device's arrays can be compared only with a run on the same inputs",
            hint="give them with --inputs FILE.npz",
        )
    with opened(program) as recordable:
        begin_stage(f"running {program}")
        run = recordable.record(_given(recordable.graph, options.inputs))
        graph = recordable.graph
    outputs = zip(graph.outputs, run.outputs, strict=False)
    arrays = {**run.values, **{value.name: array for value, array in outputs}}
    compared: dict[str, ComparedValue] = {}
    nodes = {value.name: node for node in graph.nodes for value in node.outputs}
    for name, array in arrays.items():
        stem = name.replace("/", "_")
        file = next((p for s in SUFFIXES if (p := folder / f"{stem}{s}").is_file()), None)
        if file is None or array.dtype.kind != "f":
            continue
        begin_stage(f"comparing {name}")
        node = nodes.get(name)
        layer = compared_layer(name, file, array)
        source = node.source if node else None
        compared[name] = ComparedValue(
            name=name,
            other=file.name,
            operator=node.op if node else "",
            other_operator="",
            module=node.module if node else "",
            line=f"{source.package_path}:{source.line}" if source else "",
            error=float("inf") if layer.problem else 10 ** (-layer.sqnr_db / 20),
        )
    if not compared:
        examples = ", ".join(list(arrays)[:4])
        raise ProgramError(
            f"no value of {program} is in {folder}",
            why=f"its values are {examples} and others",
            hint="name each file after its value: NAME.npy or NAME.bin, with _ for /",
        )
    values = with_errors_before(graph, compared)
    first, worst = divergence(values, ["float32"])
    ends = [value for value in values if value.name in {out.name for out in graph.outputs}]
    kept = len(arrays), sum(file.is_file() for file in folder.iterdir())
    return ComparedPrograms(
        a=program,
        b=str(folder),
        values=values,
        kept=kept,
        outputs=tuple(map(_device_output, ends or values[-1:])),
        first=first,
        worst=worst,
        notes=()
        if ends
        else ("The device wrote no output of the program; its last value decides.",),
    )


def _device_output(value: ComparedValue) -> Comparison:
    gate = GATES["w8a8"]
    good = value.sqnr_db >= gate.min_sqnr_db
    reason = "" if good else f"SQNR {value.sqnr_db:.1f} dB is below {gate.min_sqnr_db:g} dB"
    return Comparison(output=value.name, rule=gate.rule, reason=reason, sqnr_db=value.sqnr_db)


def _nothing_matched(a: str, b: str, first: Recording, second: Recording) -> ProgramError:
    return ProgramError(
        f"no value of {a} was matched with a value of {b}",
        why=f"{len(first.values)} and {len(second.values)} values were kept; none has the same name, or "
        "the same operator and size",
        hint="compare two forms of one program; for a difference of outputs only, use `whisperport verify`",
    )
