"""The named parts of written files, so that what has changed in one can be named.

A part is a key of a JSON file, a line of a text file, or a tensor, a node, a layer or the header of a
model. Of a long list, the parts are its entries, with numbers. The record holds 16 bits of each part: the
hash of the whole file tells that it has changed, and these tell where.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from whisperport.targets.cpu.openvino.ir import read_ir, stored_bytes

LONGEST = 1000  # members of a JSON object that have names; those of a longer one have numbers
DIGITS = 4  # of a part's checksum


@dataclass(frozen=True, slots=True)
class FileParts:
    """The parts of a file.

    Attributes:
        names: of the parts, in the file's order; none: they have numbers.
        checksums: of each part 4 hexadecimal digits, joined.
    """

    names: tuple[str, ...]
    checksums: str

    def by_name(self) -> dict[str, str]:
        """Return part -> its checksum, in the file's order."""
        starts = range(0, len(self.checksums), DIGITS)
        checksums = [self.checksums[i : i + DIGITS] for i in starts]
        numbers = (f"entry {i + 1}" for i in range(len(checksums)))
        return dict(zip(self.names or numbers, checksums, strict=False))


def parts_of(path: Path) -> FileParts | None:
    """Return the parts of a file; None: it is of no known format, or damaged, or its reader is missing."""
    try:
        return _file_parts(path)
    except Exception:  # a damaged file makes its reader raise any class
        return None


def _file_parts(path: Path) -> FileParts | None:
    """Return the parts of a file; None: two have one name."""
    parts = list(_parts(path))
    names = () if any(not name for name, _ in parts) else tuple(name for name, _ in parts)
    if len(set(names)) != len(names):
        return None
    return FileParts(names, "".join(f"{crc32(data) & 0xFFFF:04x}" for _, data in parts))


def changed_part(path: Path, known: FileParts) -> str:
    """Return which part of a file has changed, as a sentence; empty: what is outside of them."""
    try:
        current = _file_parts(path)
    except Exception as error:  # a damaged file makes its reader raise any class
        return f"it can no longer be read: {getattr(error, 'why', error)}"
    if current is None:
        return "two of its parts have one name"
    before, after = known.by_name(), current.by_name()
    for name, checksum in before.items():
        if after.get(name, checksum) != checksum:
            return f"{name} has changed"
    for name in before:
        if name not in after:
            return f"{name} is missing"
    for name in after:
        if name not in before:
            return f"{name} was added"
    moved = next((pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]), None)
    return f"{moved[1]} is at the place of {moved[0]}" if moved else ""


def _parts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each part; of a numbered part, an empty name."""
    beside = path.with_suffix(".xml")
    match path.suffix:
        case ".json":
            yield from _json_parts(json.loads(path.read_bytes()))
        case ".txt":
            yield from (("", line) for line in path.read_bytes().split(b"\n"))
        case ".onnx":
            yield from _onnx_parts(path)
        case ".onnx_data":
            yield from _outside_parts(path)
        case ".xml":
            yield from _layers(path)
        case ".bin" if beside.is_file():
            yield from _constants(beside, path)
        case ".bin":
            yield from _variables(path)
        case _:
            raise ValueError(f"{path.name} is of no known format")


def _json_parts(value: Any, name: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield the members of objects by their path; of a long list or object, the entries."""
    if isinstance(value, dict) and value and len(value) <= LONGEST:
        for key, member in value.items():
            yield from _json_parts(member, f"{name}.{key}" if name else key)
    elif name or not isinstance(value, dict | list):
        yield name, json.dumps(value).encode()
    else:
        entries = value.items() if isinstance(value, dict) else value
        yield from (("", json.dumps(entry).encode()) for entry in entries)


def _onnx_parts(path: Path) -> Iterator[tuple[str, bytes]]:
    import onnx

    model = onnx.load(path, load_external_data=False)
    for entry in model.metadata_props:
        yield f"metadata {entry.key}", entry.value.encode()
    for side in (model.graph.input, model.graph.output):
        for value in side:
            yield f"value {value.name}", value.SerializeToString(deterministic=True)
    for node in model.graph.node:
        yield f"node {node.output[0]}", node.SerializeToString(deterministic=True)
    for tensor in model.graph.initializer:
        yield f"tensor {tensor.name}", tensor.raw_data or tensor.SerializeToString()
    for named in ("graph", "metadata_props"):
        model.ClearField(named)
    yield "header", model.SerializeToString(deterministic=True)


def _outside_parts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the tensors that are in the second file of an ONNX file."""
    import onnx

    model = onnx.load(path.with_name(path.name.removesuffix("_data")), load_external_data=False)
    with path.open("rb") as file:
        for tensor in model.graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                file.seek(int(place["offset"]))
                yield f"tensor {tensor.name}", file.read(int(place["length"]))


def _layers(path: Path) -> Iterator[tuple[str, bytes]]:
    graph, data = read_ir(path), path.read_bytes()
    for name, span in graph.sections.items():
        yield name, data[span]
    for node in graph.nodes.values():
        yield f"layer {node.name}", data[node.span]


def _constants(graph: Path, path: Path) -> Iterator[tuple[str, bytes]]:
    for node, data in stored_bytes(read_ir(graph), path):
        yield f"tensor {node.name}", data.tobytes()


def _variables(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the tensors of a file whose format a reader of checkpoints knows, and what else it holds."""
    from whisperport.model.checkpoint import ctranslate2_file, ggml

    if ggml.is_ggml(path):
        tensors = ggml.read_weights(path)
        filters, tokens = ggml.read_sound_and_text(path)
        with path.open("rb") as file:
            yield "header", file.read(ggml.HEADER_BYTES)
        yield "table of mel filters", filters.numpy().tobytes()
        yield "list of tokens", b"\n".join(tokens)
    else:
        variables = ctranslate2_file.read_model_bin(path)
        tensors = variables.tensors
        for alias, name in variables.aliases.items():
            yield f"alias {alias}", name.encode()
    for name, tensor in tensors.items():
        yield f"tensor {name}", tensor.numpy().tobytes()
