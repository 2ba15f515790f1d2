"""Read the graph of a `.pt2` file from its JSON, without weights, without unpickling and without torch.

A `.pt2` is a zip archive. `torch.export.load` also unpickles its example inputs, which can run code.
Source: torch 2.13 torch/export/pt2_archive/_package.py and torch/_export/serde/schema.py.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError
from whisperport.model.inspection.graph import Graph, Node, Value, build
from whisperport.model.inspection.torch_nodes import Argument, torch_node
from whisperport.model.inspection.written_views import follow_writes
from whisperport.program.sizes import NO_SIZES, fix_sizes

SCHEMA = 8  # major version, written by torch 2.8 to 2.13; another major version has another layout
SYMBOL = re.compile(r"Symbol\('(\w+)'[^()]*\)")  # as sympy writes one
NO_GRAD = "torch.ops.higher_order.wrap_with_set_grad_enabled"
MAX_GRAPH_BYTES = 1 << 28  # bytes of JSON; the decoder of Whisper large has 5 MB

# Source: torch/_export/serde/schema.py, ScalarType.
DTYPES = dict(
    enumerate(
        [
            "unknown",
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "float32",
            "float64",
            "complex32",
            "complex64",
            "complex128",
            "bool",
            "bfloat16",
        ]
    )
)
DTYPES[28] = "uint16"


def read_pt2(path: Path, sizes: Mapping[str, int] = NO_SIZES) -> list[Graph]:
    """Read the graph of every program in the file.

    Args:
        path: of the file.
        sizes: numbers for the dynamic sizes, as the file names them; without any, they stay symbols.

    Raises:
        ProgramError: the file is damaged, contains no exported program, or was written by another torch
            version; or it has no such sizes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return [_graph(path, name, text, sizes) for name, text in _models(path, archive)]
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise _damaged(path, error) from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(path, error) from error


def _models(path: Path, archive: zipfile.ZipFile) -> list[tuple[str, bytes]]:
    """Return name and JSON text of each program."""
    entries = {
        entry.filename.split("/models/")[-1].removesuffix(".json"): entry
        for entry in archive.infolist()
        if "/models/" in entry.filename and entry.filename.endswith(".json")
    }
    if not entries:
        raise _not_exported(path, archive.namelist())
    for entry in entries.values():
        if entry.file_size > MAX_GRAPH_BYTES:
            raise ProgramError(
                f"{path.name} is too large to read",
                why=f"its graph has {entry.file_size} bytes; the limit is {MAX_GRAPH_BYTES}",
                hint="export a smaller part of the model",
            )
    alone = len(entries) == 1  # torch.export.save calls it "model"
    return [(path.stem if alone else n, archive.read(entry)) for n, entry in entries.items()]


def _not_exported(path: Path, names: list[str]) -> ProgramError:
    if any(name.endswith("serialized_exported_program.json") for name in names):
        return ProgramError(
            f"{path.name} was written by torch 2.7 or earlier",
            why="the layout of its archive is not supported",
            hint="export it again with torch 2.8 or later",
        )
    return ProgramError(
        f"{path.name} contains no exported program",
        why="the file is a zip archive without models/*.json",
        hint="write one with `torch.export.save(torch.export.export(module, inputs), path)`",
    )


def _damaged(path: Path, error: Exception) -> ProgramError:
    return ProgramError(
        f"{path.name} is damaged, or was not written by torch.export.save",
        why=f"{type(error).__name__}: {error}"[:200],
        hint="save the program again with torch.export.save",
    )


def _graph(path: Path, name: str, text: bytes, sizes: Mapping[str, int]) -> Graph:
    program = json.loads(text)
    version = program["schema_version"]["major"]
    if version != SCHEMA:
        raise ProgramError(
            f"{path.name} was written by an unsupported torch version, "
            f"{program.get('torch_version', 'unknown')}",
            why=f"its schema version is {version}; supported: {SCHEMA}, from torch 2.8 to 2.13",
            hint="export the model again with torch 2.8 to 2.13",
        )
    program = fix_sizes(path.name, program, sizes) if sizes else program
    module = program["graph_module"]
    graph, signature = _flat(module["graph"]), module["signature"]
    constants, input_names = _stored(signature)
    values = {
        key: _value(key, meta, key in constants) for key, meta in graph["tensor_values"].items()
    }
    nodes = [_node(node, values, index) for index, node in enumerate(graph["nodes"])]
    inputs = [values[key] for key in input_names if key in values]
    returned = [values[key] for key in _returned(signature) if key in values]
    newest_nodes, newest = follow_writes([node for node in nodes if node], returned)
    return build(name, "torch", newest_nodes, inputs, newest)


def _flat(graph: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the nodes that run with gradients on or off in place of the node that runs their graph."""
    nodes, values = [], dict(graph["tensor_values"])
    for node in graph["nodes"]:
        if node["target"] != NO_GRAD:
            nodes.append(node)
            continue
        _, body, *arguments = (argument["arg"] for argument in node["inputs"])
        inner = _flat(body["as_graph"]["graph"])
        names = {name: f"{body['as_graph']['name']}.{name}" for name in inner["tensor_values"]}
        names |= dict(zip(_names(inner["inputs"]), _names(arguments), strict=True))
        names |= dict(zip(_names(inner["outputs"]), _names(node["outputs"]), strict=True))
        nodes += [_renamed(inner_node, names) for inner_node in inner["nodes"]]
        values = {names[name]: meta for name, meta in inner["tensor_values"].items()} | values
    return {**graph, "nodes": nodes, "tensor_values": values}


def _names(arguments: Iterable[Mapping[str, Any]]) -> list[str]:
    return [argument["as_tensor"]["name"] for argument in arguments if "as_tensor" in argument]


def _renamed(node: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a node of an inner graph with the names of the outer one."""

    def rename(data: Any) -> Any:
        if isinstance(data, list):
            return [rename(item) for item in data]
        if not isinstance(data, dict):
            return data
        return {key: names.get(x, x) if key == "name" else rename(x) for key, x in data.items()}

    inputs = [{**argument, "arg": rename(argument["arg"])} for argument in node["inputs"]]
    return {**node, "inputs": inputs, "outputs": rename(node["outputs"])}


def _stored(signature: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """Return the names of constants, and the names of inputs that the caller passes."""
    written_to = {
        spec["buffer_mutation"]["buffer_name"]
        for spec in signature["output_specs"]
        if "buffer_mutation" in spec
    }
    constants, arguments = set(), []
    for spec in signature["input_specs"]:
        ((kind, body),) = spec.items()
        if kind == "user_input":
            arguments.append(next(iter(body["arg"].values())))
        elif kind in ("parameter", "tensor_constant") or (
            kind == "buffer" and body["buffer_name"] not in written_to
        ):
            constants.add(body["arg"]["name"])
    return constants, [arg["name"] for arg in arguments if isinstance(arg, dict) and "name" in arg]


def _returned(signature: Mapping[str, Any]) -> list[str]:
    """Return the names of results, and of tensors written back to buffers and inputs."""
    names = []
    for spec in signature["output_specs"]:
        ((_, body),) = spec.items()
        names.append(body["arg"].get("as_tensor", body["arg"]).get("name"))
    return names


def _value(name: str, meta: Mapping[str, Any], constant: bool) -> Value:
    shape = tuple(
        size["as_int"] if "as_int" in size else _expression(size["as_expr"]["expr_str"])
        for size in meta["sizes"]
    )
    if not all(isinstance(axis, str) or (type(axis) is int and axis >= 0) for axis in shape):
        raise ValueError(f"the shape of {name} is {shape}")
    return Value(name, shape, DTYPES.get(meta["dtype"], "unknown"), constant)


def _expression(text: str) -> str:
    """Return how a size is computed, with the names of its symbols alone: `4*s10`."""
    return SYMBOL.sub(r"\1", text)


def _node(node: Mapping[str, Any], values: Mapping[str, Value], index: int) -> Node | None:
    outputs = []
    for output in node["outputs"]:
        content = _plain(output, values)
        outputs += content if isinstance(content, list) else [content]
    results = [value for value in outputs if isinstance(value, Value)]
    arguments: list[Argument] = [
        (str(argument["name"]), _plain(argument["arg"], values)) for argument in node["inputs"]
    ]
    name = node.get("name") or (results[0].name if results else f"node_{index}")
    metadata = node.get("metadata", {})
    module, trace = _module(metadata.get("nn_module_stack", "")), metadata.get("stack_trace", "")
    return torch_node(str(name), str(node["target"]), arguments, results, module, trace)


def _module(stack: str) -> tuple[str, str]:
    """Return path and class of the innermost module in `key,path,class;key,path,class`."""
    parts = stack.split(";")[-1].split(",")
    return (parts[1], parts[2]) if len(parts) == 3 else ("", "")


def _plain(argument: Mapping[str, Any], values: Mapping[str, Value]) -> Any:
    """Convert an argument: `{"as_tensor": {"name": "x"}}` to the value x, `{"as_int": 3}` to 3."""
    ((kind, body),) = argument.items()
    if kind == "as_tensor":
        return values[body["name"]]
    if kind == "as_tensors":
        return [values[member["name"]] for member in body]
    if kind == "as_optional_tensor":
        return None if "as_none" in body else values[body["as_tensor"]["name"]]
    if kind == "as_optional_tensors":
        return [values[m["as_tensor"]["name"]] if "as_tensor" in m else None for m in body]
    if kind == "as_none":
        return None
    if kind == "as_scalar_type":
        return DTYPES.get(body, "unknown")
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
        return next(iter(body.values()))
    return body
