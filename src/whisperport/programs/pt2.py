"""Read a `.pt2` that `torch.export.save` wrote, without running anything in it.

torch's own loader unpickles what it does not know, evaluates symbolic sizes and guards as Python, and
resolves operators by any dotted path. So the archive is looked through first, and the graph after.
"""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from whisperport.checkpoint.pickle_size import check_pickled_bytes
from whisperport.errors import ProgramError
from whisperport.programs.program import Program, as_program
from whisperport.regular_file import other_kind
from whisperport.unpacking import check_unpacked_size

MAX_GRAPH = 512 * 2**20  # bytes of JSON; the graph of whisper-large's decoder takes 3 MB
# What reading a zip file of JSON raises if it was cut, changed, or is encrypted.
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError),
    *(ValueError, LookupError, TypeError, AttributeError),
)
_OPERATOR_SETS = frozenset({"aten", "prims"})  # what torch itself defines; others are custom


def read_pt2(path: str | os.PathLike[str]) -> Program:
    """The one program of a file; it is named after the file.

    Raises:
        ProgramError: the file is missing, damaged, of another torch, or holds code; its shapes are
            dynamic; or it uses operators that are not torch's own.
    """
    path = Path(path)
    try:
        if kind := other_kind(path):
            raise OSError(f"it is {kind}, not a file")
        with zipfile.ZipFile(path) as archive:
            check_unpacked_size(archive, path.stat().st_size)
            _check_archive(path, archive)
    except OSError as error:
        raise ProgramError(
            f"cannot read `{path}`",
            why=error.strerror or str(error),
            hint="give a .pt2 file, as torch.export.save writes it",
        ) from error
    except _DAMAGED as error:
        raise ProgramError(
            f"`{path}` is not a program saved by torch.export",
            why=f"it is damaged, cut short, or another kind of file: {error}",
            hint="write it with torch.export.save(torch.export.export(module, inputs), path)",
        ) from error
    exported = _load(path)
    _check_graph(path, exported)
    _check_constants(path, exported)
    if exported.example_inputs is None:
        exported.example_inputs = _zeros(exported)
    return as_program(path.stem, exported)


def _check_archive(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse whatever would make torch's loader run code."""
    names = archive.namelist()
    compiled = [name for name in names if "/data/aotinductor/" in f"/{name}"]
    if compiled:
        raise _code(path, "compiled code, `data/aotinductor`")
    graphs = [name for name in names if "/models/" in f"/{name}" and name.endswith(".json")]
    if len(graphs) != 1:
        raise ValueError(f"it holds {len(graphs)} programs; expected 1")
    if archive.getinfo(graphs[0]).file_size > MAX_GRAPH:
        raise ValueError("its graph is larger than any program's")
    graph = json.loads(archive.read(graphs[0]))
    _check_version(path, graph)
    if any(_find(graph, "as_expr")) or graph.get("range_constraints"):
        raise ProgramError(
            f"`{path}` has dynamic shapes",
            why="a size in it is a symbol, and accelerators take static shapes",
            hint="export again without `dynamic_shapes`",
        )
    for config in (name for name in names if name.endswith("_config.json")):
        for tensor, entry in json.loads(archive.read(config)).get("config", {}).items():
            if entry.get("use_pickle"):
                raise _code(path, f"`{tensor}` as a pickle")
    for name in names:
        if "/data/sample_inputs/" in f"/{name}":
            _check_plain(path, archive.read(name))


def _check_version(path: Path, graph: Mapping[str, Any]) -> None:
    from torch._export.serde.schema import SCHEMA_VERSION

    major = graph["schema_version"]["major"]
    if major != SCHEMA_VERSION[0]:
        raise ProgramError(
            f"`{path}` was saved by another version of torch",
            why=f"torch {graph.get('torch_version', '(unknown)')} wrote schema {major}; "
            f"torch {torch.__version__} reads schema {SCHEMA_VERSION[0]}",
            hint="export the module again with this torch, and save it",
        )


def _check_plain(path: Path, data: bytes) -> None:
    """The example inputs are a pickle: tensors and plain data only."""
    if not data:
        return
    try:
        check_pickled_bytes(data)
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch's restricted unpickler meets
        raise _code(path, "example inputs that are more than tensors") from error


def _find(data: Any, key: str) -> Iterator[Any]:
    """Every non-empty value stored under `key`, however deep."""
    pending = [data]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if item.get(key):
                yield item[key]
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def _load(path: Path) -> ExportedProgram:
    from torch.export.pt2_archive._package import load_pt2

    try:
        with path.open("rb") as file:
            exported = next(iter(load_pt2(file).exported_programs.values()))
    except Exception as error:  # a damaged file fails anywhere inside torch's reader
        raise ProgramError(
            f"torch cannot load `{path}`",
            why=str(error).strip().split("\n")[0][:300] or type(error).__name__,
            hint="if its operators are custom ones, replace them; else save the program again",
        ) from error
    exported._guards_code = []  # Python source, which `module()` would run; of no use to static shapes
    return exported


def _check_graph(path: Path, exported: ExportedProgram) -> None:
    """Only operators that torch itself defines: a name in the file may lead to any function."""
    for module in exported.graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op != "call_function" or _is_known(node.target):
                continue
            raise ProgramError(
                f"`{path}` uses `{node.target}`, which is not an operator of torch",
                why=f"node `{node.name}` is a custom operator or a function, and was not run",
                hint="replace it by operators of torch before exporting",
            )


def _is_known(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _OPERATOR_SETS
    return getattr(target, "__module__", "") == "_operator"


def _check_constants(path: Path, exported: ExportedProgram) -> None:
    for name, value in {**exported.state_dict, **exported.constants}.items():
        if not isinstance(value, torch.Tensor):
            raise _code(path, f"`{name}`, an object of {type(value).__name__}")


def _zeros(exported: ExportedProgram) -> tuple[Any, ...]:
    """Stand-ins for example inputs that were not saved: rewriting exports again with them."""
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if "val" in node.meta}
    inputs = [values[str(name)] for name in exported.graph_signature.user_inputs]
    zeros = [torch.zeros(tuple(value.shape), dtype=value.dtype) for value in inputs]
    args, kwargs = pytree.tree_unflatten(zeros, exported.call_spec.in_spec)
    return args, kwargs


def _code(path: Path, what: str) -> ProgramError:
    return ProgramError(
        f"`{path}` holds code, which was not run",
        why=f"it holds {what}",
        hint="save the program again with torch.export.save, with tensors as its only inputs",
    )


def weight_bytes(program: Program) -> int:
    """Bytes of all weights and constants, each storage counted once."""
    exported = program.exported
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in {**exported.state_dict, **exported.constants}.values()
    }
    return sum(storages.values())
