"""An ONNX file of a bundle, checked: whatever it refers to is one of the files of its program.

An ONNX file names other files that hold its tensors, and ONNX Runtime opens whatever it names. Tensors
occur in many places: initializers, dense or sparse, attributes of nodes, and graphs inside of If, Loop
and Scan, in functions, and for training. All of them are checked before a session is created.

Source of the field numbers: onnx/onnx.proto. Source of the keys: onnx/docs/ExternalData.md.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from whisperport.bundle.listed_files import ListedFiles
from whisperport.bundle.program_entry import ProgramEntry
from whisperport.errors import BundleError
from whisperport.protobuf import Field, message_class

LARGEST = 2**31 - 1  # bytes: no protobuf message has more
EXTERNAL = 1  # TensorProto.DataLocation
KEYS = {"location", "offset", "length", "checksum"}
NUMBER = re.compile("[0-9]{1,18}")
COMPILED = "EPContext"  # of some execution providers: a node that may name a file of its own

# Only what is read or changed: protobuf keeps the other fields.
SCHEMA: dict[str, tuple[Field, ...]] = {
    "Model": (
        ("graph", 7, "Graph"),
        ("training_info", 20, "[Training]"),
        ("functions", 25, "[Function]"),
    ),
    "Training": (("initialization", 1, "Graph"), ("algorithm", 2, "Graph")),
    "Function": (("node", 7, "[Node]"), ("attribute_proto", 11, "[Attribute]")),
    "Graph": (
        ("node", 1, "[Node]"),
        ("initializer", 5, "[Tensor]"),
        ("sparse_initializer", 15, "[Sparse]"),
    ),
    "Node": (
        ("input", 1, "[string]"),
        ("output", 2, "[string]"),
        ("op_type", 4, "string"),
        ("attribute", 5, "[Attribute]"),
    ),
    "Attribute": (
        ("i", 3, "int64"),
        ("t", 5, "Tensor"),
        ("g", 6, "Graph"),
        ("tensors", 10, "[Tensor]"),
        ("graphs", 11, "[Graph]"),
        ("sparse_tensor", 22, "Sparse"),
        ("sparse_tensors", 23, "[Sparse]"),
    ),
    "Sparse": (("values", 1, "Tensor"), ("indices", 2, "Tensor")),
    "Tensor": (
        ("data_type", 2, "int32"),
        ("name", 8, "string"),
        ("external_data", 13, "[Entry]"),
        ("data_location", 14, "int32"),
    ),
    "Entry": (("key", 1, "string"), ("value", 2, "string")),
}


@dataclass(slots=True, eq=False)
class OnnxGraph:
    """An ONNX file among the files of a program."""

    files: ListedFiles
    name: str
    _model: Any = field(default=None, init=False, repr=False)
    _external: list[Any] = field(default_factory=list, init=False, repr=False)
    _found: dict[str, Path] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, folder: Path, entry: ProgramEntry, name: str | None = None) -> "OnnxGraph":
        """name: which of the entry's files it is; None: the first."""
        return cls(ListedFiles(folder, frozenset(entry.files)), name or entry.files[0])

    @property
    def path(self) -> Path:
        """Raises BundleError if it is no regular file of the program."""
        return self.files.path(self.name)

    def read(self) -> Any:
        """The parsed model, by `SCHEMA`; parsed once, and kept until `detach`.

        Raises:
            BundleError: it is no ONNX file, or refers to a file that is not one of the program's.
        """
        if self._model is None:
            model = self._parsed()
            self._external = self._checked(model)
            self._model = model
        return self._model

    def detach(self) -> Any:
        """As `read`, and let go of it: the caller may change it, and decides how long it is in memory."""
        model, self._model, self._external = self.read(), None, []
        return model

    def external_tensors(self) -> list[Any]:
        """All tensors that are stored in other files, wherever in the graph they occur."""
        self.read()
        return self._external

    def external_file(self, location: str) -> Path:
        """Where the file is that a tensor names.

        Raises:
            BundleError: it is not one of the program's files.
        """
        if location not in self._found:
            self._found[location] = self.files.beside(self.name, location)
        return self._found[location]

    def _parsed(self) -> Any:
        from google.protobuf.message import DecodeError

        path = self.path
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError(f"it has more than {LARGEST} bytes")
            model = _model_class().FromString(path.read_bytes())
        except (DecodeError, OSError, ValueError) as error:
            raise self._error("cannot be read as ONNX", str(error)) from error
        if not model.HasField("graph"):
            raise self._error("cannot be read as ONNX", "it has no graph")
        return model

    def _checked(self, model: Any) -> list[Any]:
        """The tensors that are stored in other files, all of which are the program's."""
        external = []
        for message in _messages(model):
            kind = message.DESCRIPTOR.name
            if kind == "Node" and message.op_type == COMPILED:
                raise self._error(f"has a node `{COMPILED}`", "such a node may read any file")
            if kind == "Tensor" and (message.external_data or message.data_location == EXTERNAL):
                self._check_external(message)
                external.append(message)
        return external

    def _check_external(self, tensor: Any) -> None:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        described = tensor.data_location == EXTERNAL and "location" in entries
        if not described or len(entries) < len(tensor.external_data) or not entries.keys() <= KEYS:
            raise self._error(
                f"does not say where the tensor {tensor.name[:80]!r} is stored",
                "its location is missing, given twice, or has keys that the format does not have",
            )
        file = self.external_file(entries["location"])
        offset, length = entries.get("offset", "0"), entries.get("length", "0")
        if not (NUMBER.fullmatch(offset) and NUMBER.fullmatch(length)):
            raise self._error(
                f"does not say where the tensor {tensor.name[:80]!r} is stored",
                f"it has offset {offset[:80]!r} and length {length[:80]!r}; expected bytes",
            )
        end, size = int(offset) + int(length), file.stat().st_size
        if end > size:
            raise self._error(
                f"has a tensor {tensor.name[:80]!r} beyond the end of {file.name}",
                f"it ends at {end}, and the file has {size} bytes",
            )

    def _error(self, what: str, why: str) -> BundleError:
        return BundleError(
            f"{self.name} {what}",
            why=why,
            hint="export the bundle again, with its weights in files beside the graph",
        )


def _messages(root: Any) -> Iterator[Any]:
    """A message and all that are inside of it; the depth is limited by protobuf's parser."""
    waiting = [root]
    while waiting:
        message = waiting.pop()
        yield message
        for part, value in message.ListFields():
            if part.message_type is not None and part.name != "external_data":
                waiting.extend(value if part.name in _REPEATED else (value,))


_REPEATED = {name for fields in SCHEMA.values() for name, _, kind in fields if kind.startswith("[")}


@cache
def _model_class() -> Any:
    return message_class(SCHEMA, "Model")
