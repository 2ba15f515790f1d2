"""Read an ONNX file of a bundle, and check that it refers only to files of its own program.

An ONNX file may store tensors in other files, and ONNX Runtime opens every file that it names. Tensors
occur in many places: dense and sparse initializers, attributes of nodes, the graphs inside If, Loop and
Scan, functions, and training graphs. All of them are checked before a session is created.

Source of the field numbers: onnx/onnx.proto. Source of the keys: onnx/docs/ExternalData.md.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from whisperport.errors import BundleError
from whisperport.program.bundle.listed_files import ListedFiles
from whisperport.program.bundle.program_entry import ProgramEntry
from whisperport.system.protobuf import Field, message_class

LARGEST = 2**31 - 1  # bytes; the size limit of a protobuf message
EXTERNAL = 1  # TensorProto.DataLocation
KEYS = {"location", "offset", "length", "checksum"}  # of TensorProto.external_data
NUMBER = re.compile("[0-9]{1,18}")
# Denotations of axes with N tokens and with N + P tokens, on whose sizes nothing else in a graph depends;
# `model/trace/onnx_cache_length.py` writes them.
CACHED, CACHED_AND_NEW = "CACHED_TOKENS", "CACHED_AND_NEW_TOKENS"
COMPILED = "EPContext"  # operator of some execution providers; such a node may name another file

# The fields that are read or changed here; protobuf keeps all others.
SCHEMA: dict[str, tuple[Field, ...]] = {
    "Model": (
        ("ir_version", 1, "int64"),
        ("graph", 7, "Graph"),
        ("opset_import", 8, "[Opset]"),
        ("training_info", 20, "[Training]"),
        ("functions", 25, "[Function]"),
    ),
    "Opset": (("domain", 1, "string"), ("version", 2, "int64")),
    "Training": (("initialization", 1, "Graph"), ("algorithm", 2, "Graph")),
    "Function": (("node", 7, "[Node]"), ("attribute_proto", 11, "[Attribute]")),
    "Graph": (
        ("node", 1, "[Node]"),
        ("initializer", 5, "[Tensor]"),
        ("sparse_initializer", 15, "[Sparse]"),
        ("input", 11, "[Value]"),
        ("output", 12, "[Value]"),
        ("value_info", 13, "[Value]"),
    ),
    "Node": (
        ("input", 1, "[string]"),
        ("output", 2, "[string]"),
        ("op_type", 4, "string"),
        ("attribute", 5, "[Attribute]"),
        ("domain", 7, "string"),
    ),
    "Attribute": (
        ("name", 1, "string"),
        ("f", 2, "float"),
        ("i", 3, "int64"),
        ("t", 5, "Tensor"),
        ("g", 6, "Graph"),
        ("ints", 8, "[int64]"),
        ("tensors", 10, "[Tensor]"),
        ("graphs", 11, "[Graph]"),
        ("sparse_tensor", 22, "Sparse"),
        ("sparse_tensors", 23, "[Sparse]"),
        ("type", 20, "int32"),
    ),
    "Sparse": (("values", 1, "Tensor"), ("indices", 2, "Tensor")),
    "Tensor": (
        ("dims", 1, "[int64]"),
        ("data_type", 2, "int32"),
        ("name", 8, "string"),
        ("raw_data", 9, "bytes"),
        ("external_data", 13, "[Entry]"),
        ("data_location", 14, "int32"),
    ),
    "Entry": (("key", 1, "string"), ("value", 2, "string")),
    "Value": (("name", 1, "string"), ("type", 2, "Type")),
    "Type": (("tensor_type", 1, "TensorType"),),
    "TensorType": (("elem_type", 1, "int32"), ("shape", 2, "Shape")),
    "Shape": (("dim", 1, "[Axis]"),),
    "Axis": (("dim_value", 1, "int64"), ("dim_param", 2, "string"), ("denotation", 3, "string")),
}


@dataclass(slots=True, eq=False)
class OnnxGraph:
    """An ONNX file of a program; it is parsed when it is first needed."""

    files: ListedFiles  # the files of the program
    name: str  # path of the ONNX file, relative to the bundle
    _model: Any = field(default=None, init=False, repr=False)
    _external: list[Any] = field(default_factory=list, init=False, repr=False)
    _found: dict[str, Path] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, folder: Path, entry: ProgramEntry, name: str | None = None) -> "OnnxGraph":
        """Make the graph of one file of a program.

        Args:
            folder: of the bundle.
            name: one of the entry's files; None: the first.
        """
        return cls(ListedFiles(folder, frozenset(entry.files)), name or entry.files[0])

    @property
    def path(self) -> Path:
        """Path of the ONNX file.

        Raises:
            BundleError: it is not a regular file of the program.
        """
        return self.files.path(self.name)

    def read(self) -> Any:
        """Return the parsed model. It is parsed once and kept in memory until `detach` is called.

        Raises:
            BundleError: the file is not an ONNX file, or refers to a file that is not part of the program.
        """
        if self._model is None:
            model = self._parsed()
            self._external = self._checked(model)
            self._model = model
        return self._model

    def opset(self) -> int:
        """Return the version of ONNX's own operators that the graph uses; 0 if it does not state it.

        Raises:
            BundleError: see `read`.
        """
        stated = [
            entry.version for entry in self.read().opset_import if entry.domain in ("", "ai.onnx")
        ]
        return max(stated, default=0)

    def operators(self) -> dict[str, int]:
        """Return the operators of the main graph by name -> number of nodes, the most frequent first.

        Raises:
            BundleError: see `read`.
        """
        return dict(Counter(node.op_type for node in self.read().graph.node).most_common())

    def detach(self) -> Any:
        """Return the parsed model and keep no reference to it, so that the caller may change it.

        Raises:
            BundleError: see `read`.
        """
        model, self._model, self._external = self.read(), None, []
        return model

    def external_tensors(self) -> list[Any]:
        """Return all tensors that are stored in other files, from every part of the graph."""
        self.read()
        return self._external

    def external_file(self, location: str) -> Path:
        """Return the path of a file that a tensor names as its location.

        Raises:
            BundleError: it is not a file of the program.
        """
        if location not in self._found:
            self._found[location] = self.files.beside(self.name, location)
        return self._found[location]

    def _parsed(self) -> Any:
        from google.protobuf.message import DecodeError

        path = self.path
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError(f"the file has more than {LARGEST} bytes")
            model = _model_class().FromString(path.read_bytes())
        except (DecodeError, OSError, ValueError) as error:
            raise self._error("cannot be read as ONNX", str(error)) from error
        if not model.HasField("graph"):
            raise self._error("cannot be read as ONNX", "the file has no graph")
        return model

    def _checked(self, model: Any) -> list[Any]:
        """Check the tensors that are stored in other files, and return them."""
        external = []
        for message in _messages(model):
            kind = message.DESCRIPTOR.name
            if kind == "Node" and message.op_type == COMPILED:
                raise self._error(
                    f"has a node of the operator `{COMPILED}`, which is not supported",
                    "such a node may read any file",
                )
            if kind == "Tensor" and (message.external_data or message.data_location == EXTERNAL):
                self._check_external(message)
                external.append(message)
        return external

    def _check_external(self, tensor: Any) -> None:
        entries = external_entries(tensor)
        described = tensor.data_location == EXTERNAL and "location" in entries
        if not described or len(entries) < len(tensor.external_data) or not entries.keys() <= KEYS:
            raise self._error(
                f"has no valid location for the tensor {tensor.name[:80]!r}",
                "the location is missing or has repeated or unknown keys",
            )
        file = self.external_file(entries["location"])
        offset, length = entries.get("offset", "0"), entries.get("length", "0")
        if not (NUMBER.fullmatch(offset) and NUMBER.fullmatch(length)):
            raise self._error(
                f"has no valid location for the tensor {tensor.name[:80]!r}",
                f"its offset is {offset[:80]!r} and its length {length[:80]!r}; expected numbers of bytes",
            )
        end, size = int(offset) + int(length), file.stat().st_size
        if end > size:
            raise self._error(
                f"has a tensor {tensor.name[:80]!r} beyond the end of {file.name}",
                f"the tensor ends at byte {end}; the file has {size} bytes",
            )

    def _error(self, what: str, why: str) -> BundleError:
        return BundleError(
            f"{self.name} {what}",
            why=why,
            hint="export the bundle again with `whisperport export`",
        )


def external_entries(tensor: Any) -> dict[str, str]:
    """Return where a tensor is stored in another file: `location`, `offset`, `length`."""
    return {entry.key: entry.value for entry in tensor.external_data}


def _messages(root: Any) -> Iterator[Any]:
    """Yield a message and all messages inside it. Protobuf's parser limits the depth."""
    waiting = [root]
    while waiting:
        message = waiting.pop()
        yield message
        for part, value in message.ListFields():
            if part.message_type is not None and part.name not in _WITHOUT_TENSORS:
                waiting.extend(value if part.name in _REPEATED else (value,))


_WITHOUT_TENSORS = {"external_data", "input", "output", "value_info"}
_REPEATED = {name for fields in SCHEMA.values() for name, _, kind in fields if kind.startswith("[")}


def new_model(opset: int) -> Any:
    """Return a model without nodes."""
    model = _model_class()(ir_version=9)
    model.graph.SetInParent()
    model.opset_import.add(version=opset)
    return model


@cache
def _model_class() -> Any:
    return message_class(SCHEMA, "Model")
