"""Read a `.pt2` that `torch.export.save` wrote, without running code in it.

torch's loader unpickles unknown parts, evaluates symbolic sizes and guards as Python, and resolves
operators by any dotted path. Therefore this module checks the archive before it is loaded, and the graph
afterwards.
"""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from whisperport.errors import ProgramError
from whisperport.model.checkpoint.pickled_file import check_pickled_bytes
from whisperport.model.trace.program import Program, as_program
from whisperport.program.sizes import NO_SIZES, dynamic_shapes, fix_sizes
from whisperport.system.array_files import check_unpacked_size
from whisperport.system.child import first_line
from whisperport.system.regular_file import other_kind

MAX_GRAPH = 512 * 2**20  # bytes of JSON; the graph of the decoder of whisper-large has 3 MB
# Exceptions of reading a zip file of JSON that is incomplete, changed or encrypted.
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError),
    *(ValueError, LookupError, TypeError, AttributeError),
)
_NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_OPERATOR_SETS = frozenset({"aten", "prims"})  # of torch itself; all others are custom


def read_pt2(path: str | os.PathLike[str], sizes: Mapping[str, int] = NO_SIZES) -> Program:
    """Read the program of a file; its name is the file's name without suffix.

    Args:
        path: of the file.
        sizes: numbers for the dynamic sizes, as the file names them: {"s27": 128}.

    Raises:
        ProgramError: the file is missing, damaged, written by another torch version, or contains code; a
            shape is dynamic and has no number; or an operator is custom.
    """
    path = Path(path)
    try:
        if kind := other_kind(path):
            raise OSError(f"the path is {kind}, not a file")
        with zipfile.ZipFile(path) as archive:
            check_unpacked_size(archive, path.stat().st_size)
            graph = _checked_graph(path, archive, sizes)
    except OSError as error:
        raise ProgramError(
            f"cannot read `{path}`",
            why=error.strerror or str(error),
            hint="give a .pt2 file, as torch.export.save writes it",
        ) from error
    except _DAMAGED as error:
        raise ProgramError(
            f"`{path}` is not a program saved by torch.export",
            why=f"the file is damaged, incomplete, or of another kind: {error}",
            hint="write it with torch.export.save(torch.export.export(module, inputs), path)",
        ) from error
    exported = _with_sizes(path, graph) if sizes else _load(path)
    _check_graph(path, exported)
    _check_constants(path, exported)
    if exported.example_inputs is None or sizes:
        exported.example_inputs = _zeros(exported)
    again = sizes or any(node.target is _NO_GRAD for node in exported.graph.nodes)
    return as_program(path.stem, _exported_again(path, exported) if again else exported)


def _checked_graph(
    path: Path, archive: zipfile.ZipFile, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Reject everything that would make torch's loader run code; return the graph with fixed sizes."""
    names = archive.namelist()
    compiled = [name for name in names if "/data/aotinductor/" in f"/{name}"]
    if compiled:
        raise _code(path, "compiled code, `data/aotinductor`")
    graphs = [name for name in names if "/models/" in f"/{name}" and name.endswith(".json")]
    if len(graphs) != 1:
        raise ValueError(f"it contains {len(graphs)} programs; expected 1")
    if archive.getinfo(graphs[0]).file_size > MAX_GRAPH:
        raise ValueError(f"its graph has more than {MAX_GRAPH} bytes")
    graph = json.loads(archive.read(graphs[0]))
    _check_version(path, graph)
    if sizes:
        graph = fix_sizes(str(path), graph, sizes)
    if any(_find(graph, "as_expr")) or graph.get("range_constraints"):
        raise dynamic_shapes(str(path), graph)
    for config in (name for name in names if name.endswith("_config.json")):
        for tensor, entry in json.loads(archive.read(config)).get("config", {}).items():
            if entry.get("use_pickle"):
                raise _code(path, f"`{tensor}` as a pickle")
    for name in names:
        if "/data/sample_inputs/" in f"/{name}":
            _check_plain(path, archive.read(name))
    return dict(graph)


def _with_sizes(path: Path, graph: Mapping[str, Any]) -> ExportedProgram:
    """Load a copy of the file with this graph."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        try:
            with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as written:
                for entry in archive.infolist():
                    is_graph = "/models/" in f"/{entry.filename}" and entry.filename.endswith(
                        ".json"
                    )
                    written.writestr(entry, json.dumps(graph) if is_graph else archive.read(entry))
        except (OSError, *_DAMAGED) as error:
            raise ProgramError(
                f"cannot copy `{path}` to fix its sizes",
                why=str(error),
                hint="free some space for temporary files, or choose another folder with TMPDIR",
            ) from error
        return _load(copy)


def _exported_again(path: Path, exported: ExportedProgram) -> ExportedProgram:
    """Export again without gradients, so that no node computes a fixed size or turns gradients off."""
    args, kwargs = exported.example_inputs or ((), {})
    try:
        with torch.no_grad():
            return torch.export.export(exported.module(check_guards=False), args, kwargs)
    except Exception as error:  # torch.export raises any class
        raise ProgramError(
            f"torch cannot export `{path}` again",
            why=first_line(error),
            hint="export the model under `torch.no_grad()`, and without `dynamic_shapes`",
        ) from error


def _check_version(path: Path, graph: Mapping[str, Any]) -> None:
    from torch._export.serde.schema import SCHEMA_VERSION

    major = graph["schema_version"]["major"]
    if major != SCHEMA_VERSION[0]:
        raise ProgramError(
            f"`{path}` was saved by an incompatible version of torch",
            why=f"torch {graph.get('torch_version', '(unknown)')} wrote schema {major}; "
            f"torch {torch.__version__} reads schema {SCHEMA_VERSION[0]}",
            hint="export the module again with the installed torch, and save it",
        )


def _check_plain(path: Path, data: bytes) -> None:
    """Check that the pickle of example inputs contains tensors and plain data only."""
    if not data:
        return
    try:
        check_pickled_bytes(data)
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's restricted unpickler raises any class
        raise _code(path, "example inputs that are more than tensors") from error


def _find(data: Any, key: str) -> Iterator[Any]:
    """Yield every non-empty value that is stored under `key`, at any depth."""
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
    except Exception as error:  # torch's reader raises any class on a damaged file
        raise ProgramError(
            f"torch cannot load `{path}`",
            why=str(error).strip().split("\n")[0][:300] or type(error).__name__,
            hint="replace custom operators, if there are any; otherwise save the program again",
        ) from error
    exported._guards_code = []  # Python source that `module()` would run; static shapes do not need it
    return exported


def _check_graph(path: Path, exported: ExportedProgram) -> None:
    """Reject operators that torch does not define: a name in the file can refer to any function."""
    for module in exported.graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op != "call_function" or _is_known(node.target):
                continue
            raise ProgramError(
                f"`{path}` uses `{node.target}`, which is not a standard operator of torch",
                why=f"node `{node.name}` calls a custom operator or a function; it was not run",
                hint="replace it by standard operators of torch before the export",
            )


def _is_known(target: Any) -> bool:
    if target is _NO_GRAD:
        return True  # it calls a graph of the same file
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _OPERATOR_SETS
    return getattr(target, "__module__", "") == "_operator"


def _check_constants(path: Path, exported: ExportedProgram) -> None:
    for name, value in {**exported.state_dict, **exported.constants}.items():
        if not isinstance(value, torch.Tensor):
            raise _code(path, f"`{name}`, an object of type {type(value).__name__}")


def _zeros(exported: ExportedProgram) -> tuple[Any, ...]:
    """Return zeros as example inputs, for a file without them; rewrites need them for the next export."""
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if "val" in node.meta}
    inputs = [values[str(name)] for name in exported.graph_signature.user_inputs]
    zeros = [torch.zeros(tuple(value.shape), dtype=value.dtype) for value in inputs]
    args, kwargs = pytree.tree_unflatten(zeros, exported.call_spec.in_spec)
    return args, kwargs


def _code(path: Path, what: str) -> ProgramError:
    return ProgramError(
        f"`{path}` contains code, which was not run",
        why=f"the file contains {what}",
        hint="save the program again with torch.export.save, with tensors as its only inputs",
    )


def weight_bytes(program: Program) -> int:
    """Return the bytes of all weights and constants; each storage is counted once."""
    exported = program.exported
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in {**exported.state_dict, **exported.constants}.values()
    }
    return sum(storages.values())
