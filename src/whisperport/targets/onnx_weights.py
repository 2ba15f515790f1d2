"""Weights that several ONNX programs of a bundle use, in memory once for all of their sessions.

A session of ONNX Runtime keeps weights of its own: what it widened from float16, and what it packed
for its matrix products. `step`, every `prefill` and `align` use one decoder, which was in memory once
for each. Here their tensors are read into arrays that the sessions use in place, unpacked. A product
with one row, such as a step's, takes as long; those of a prefill take longer, once a window.

Source of the field numbers: onnx/onnx.proto.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whisperport.targets.protobuf import Field, message_class

FLOAT, HALF = 1, 10  # TensorProto.DataType
NUMBER = re.compile("[0-9]{1,18}")
MOST = 0.5  # of a program's weights: with less in common, packing them is worth a copy

# Only what is read or changed here: protobuf keeps the rest.
SCHEMA: dict[str, tuple[Field, ...]] = {
    "Model": (("graph", 7, "Graph"),),
    "Graph": (("node", 1, "[Node]"), ("initializer", 5, "[Tensor]")),
    "Node": (
        ("input", 1, "[string]"),
        ("output", 2, "[string]"),
        ("op_type", 4, "string"),
        ("attribute", 5, "[Attribute]"),
    ),
    "Attribute": (("i", 3, "int64"),),
    "Tensor": (("data_type", 2, "int32"), ("name", 8, "string"), ("external_data", 13, "[Entry]")),
    "Entry": (("key", 1, "string"), ("value", 2, "string")),
}


class _Place(NamedTuple):
    """Where a tensor is stored."""

    file: str
    offset: int
    length: int  # bytes
    half: bool  # in float16, which the graph widens


class OnnxWeights:
    """The tensors of those programs that have most of them in common, read when first asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """paths: graphs of one folder, and beside them the files of their weights."""
        used = {path: places for path in paths if (places := _places(_read(path)))}
        users = Counter(place for places in used.values() for place in set(places.values()))
        self._arrays: dict[_Place, NDArray[np.float32]] = {}
        self._sharing = set()
        for path, places in used.items():
            common = sum(place.length for place in places.values() if users[place] > 1)
            if common > MOST * sum(place.length for place in places.values()):
                self._sharing.add(path)

    def __contains__(self, path: Path) -> bool:
        """Whether the program at `path` is one of those."""
        return path in self._sharing

    def give(self, path: Path, settings: Any) -> bytes:
        """The graph at `path` as a session is to load it, with its weights in `settings`.

        The session uses the arrays in place: keep this object for as long.

        Raises:
            ValueError, OSError: a file of weights is missing or too short.
        """
        model = _read(path)
        places, widened = _places(model), _widened(model)
        files = {}
        for tensor in model.graph.initializer:
            if tensor.name not in places:
                continue
            place = places[tensor.name]
            array = self._array(path.parent, place).view(np.uint8)
            file = f"{place.offset} of {place.file}"  # to the session each tensor is a file
            files[file] = array
            del tensor.external_data[:]
            tensor.external_data.add(key="location", value=file)
            tensor.external_data.add(key="length", value=str(array.nbytes))
            tensor.data_type, tensor.name = FLOAT, widened.get(tensor.name, tensor.name)
        nodes = [node for node in model.graph.node if not widened.keys() & set(node.input)]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        settings.add_session_config_entry("session.disable_prepacking", "1")
        in_place = "session.use_external_initializer_file_buffers_directly"
        settings.add_session_config_entry(in_place, "1")
        settings.add_external_initializers_from_files_in_memory(
            list(files), list(files.values()), [array.nbytes for array in files.values()]
        )
        graph: bytes = model.SerializeToString()
        return graph

    def _array(self, folder: Path, place: _Place) -> NDArray[np.float32]:
        if place not in self._arrays:
            file = folder / place.file
            if place.offset + place.length > file.stat().st_size:
                raise ValueError(f"{place.file} is cut short")
            dtype = np.dtype(np.float16 if place.half else np.float32)
            count = place.length // dtype.itemsize
            stored = np.fromfile(file, dtype, count, offset=place.offset)
            self._arrays[place] = stored.astype(np.float32, copy=False)
        return self._arrays[place]


@cache
def _model_class() -> Any:
    return message_class(SCHEMA, "Model")


def _read(path: Path) -> Any:
    """The graph at `path`, or an empty one: what is wrong with it, the session will say."""
    from google.protobuf.message import DecodeError

    try:
        return _model_class().FromString(path.read_bytes())
    except (DecodeError, OSError):
        return _model_class()()


def _places(model: Any) -> dict[str, _Place]:
    """Tensors stored outside of the graph; none if one of them is no float32 when it is used."""
    widened = _widened(model)
    found = {}
    for tensor in _stored_outside(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        file = entries.get("location", "")
        offset, length = entries.get("offset", "0"), entries.get("length", "")
        plain = file == Path(file).name and NUMBER.fullmatch(offset) and NUMBER.fullmatch(length)
        if not plain or not (tensor.data_type == FLOAT or tensor.name in widened):
            return {}
        found[tensor.name] = _Place(file, int(offset), int(length), tensor.name in widened)
    return found


def _widened(model: Any) -> dict[str, str]:
    """float16 tensors that nothing but a Cast to float32 uses: name -> name of its output."""
    uses = Counter(name for node in model.graph.node for name in node.input)
    half = {t.name for t in _stored_outside(model) if t.data_type == HALF and uses[t.name] == 1}
    casts = (node for node in model.graph.node if node.op_type == "Cast")
    return {
        node.input[0]: node.output[0]
        for node in casts
        if len(node.input) == len(node.output) == 1
        and half.issuperset(node.input)
        and [a.i for a in node.attribute] == [FLOAT]
    }


def _stored_outside(model: Any) -> Iterator[Any]:
    return (tensor for tensor in model.graph.initializer if tensor.external_data)
