"""Read the signature of a lowered program from its file, and find the files that belong to it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from whisperport.errors import BundleError, ProgramError
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.listed_files import ListedFiles
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.host_part import HostPart
from whisperport.program.json_records import from_json
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.program.strict_json import plain
from whisperport.system.regular_file import other_kind

if TYPE_CHECKING:  # boards do not compile
    from whisperport.model.inspection.graph import Value

T = TypeVar("T")


def read_lowered(file: Path, placement: Placement) -> ProgramEntry:
    """Return the entry of a lowered program; its files are relative to the folder of `file`.

    Raises:
        BundleError, ProgramError: the file is missing or damaged, has several programs, or a shape that is
            not static.
        MissingPackageError: the reader of its format is not installed.
    """
    if kind := other_kind(file) or ("" if file.is_file() else "missing"):
        raise ProgramError(
            f"{file} cannot be compiled",
            why=f"the path is {kind}",
            hint="give the file that `whisperport lower` wrote",
        )
    spec, files = READERS[file.suffix](file)
    return ProgramEntry(spec=spec, placement=placement, method=spec.name, files=files)


def host_part(file: Path) -> HostPart:
    """Return the steps that the host computes, from the files that `lower` wrote beside a program."""
    path = file.with_name(f"{file.stem}.host.json")
    return HostPart.read(path) if path.exists() else HostPart()


def _onnx(file: Path) -> tuple[ProgramSpec, tuple[str, ...]]:
    from whisperport.model.inspection.read_onnx import read_onnx

    graph = read_onnx(file)
    beside = frozenset(path.name for path in file.parent.iterdir() if path.is_file())
    tensors = OnnxGraph(ListedFiles(file.parent, beside), file.name).external_tensors()
    locations = dict.fromkeys(
        entry.value
        for tensor in tensors
        for entry in tensor.external_data
        if entry.key == "location"
    )
    inputs, outputs = (tuple(map(static_tensor, side)) for side in (graph.inputs, graph.outputs))
    return ProgramSpec(file.stem, inputs, outputs), (file.name, *locations)


def _pt2(file: Path) -> tuple[ProgramSpec, tuple[str, ...]]:
    from whisperport.model.trace.pt2 import read_pt2

    return replace(read_pt2(file).spec, name=file.stem), (file.name,)


def _tflite(file: Path) -> tuple[ProgramSpec, tuple[str, ...]]:
    from whisperport.model.inspection.tflite_signatures import read_signatures

    signature = _only(file, read_signatures(file))[1]
    return ProgramSpec(file.stem, signature.inputs, signature.outputs), (file.name,)


def _described(file: Path) -> tuple[ProgramSpec, tuple[str, ...]]:
    """Read a description of modules; the weights are beside it."""
    try:
        programs = json.loads(file.read_text(encoding="utf-8"))["programs"]
        name, program = _only(file, programs)
        signature = {"name": name, "inputs": program["inputs"], "outputs": program["outputs"]}
        spec = from_json(ProgramSpec, plain(signature, file.name))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, BundleError) as error:
        raise ProgramError(
            f"{file.name} is not the description of a program",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="create it again with `whisperport lower`",
        ) from error
    return spec, (file.name, file.with_suffix(".safetensors").name)


# Suffix of a lowered file -> what reads its signature, and the names of all files of the program.
READERS: Mapping[str, Callable[[Path], tuple[ProgramSpec, tuple[str, ...]]]] = {
    ".onnx": _onnx,
    ".pt2": _pt2,
    ".tflite": _tflite,
    ".json": _described,
}


def _only(file: Path, programs: Mapping[str, T]) -> tuple[str, T]:
    if len(programs) != 1:
        raise ProgramError(
            f"{file.name} has {len(programs)} programs; expected one",
            hint="lower each program to a file of its own with `whisperport lower`",
        )
    return next(iter(programs.items()))


def static_tensor(value: "Value") -> TensorSpec:
    if value.size is None:
        raise ProgramError(
            f"`{value.name[:80]}` has no static shape",
            why=f"its shape is {value.shape}; compilers for NPUs need numbers",
            hint="lower the program with `whisperport lower`, or fix its shapes",
        )
    return TensorSpec(value.name, tuple(int(axis) for axis in value.shape or ()), value.dtype)
