"""Read the graph of an OpenVINO model (.xml) and its constants (.bin), without OpenVINO.

Source: OpenVINO's documentation, "Operation Set and Intermediate Representation", IR version 10 and 11.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from xml.parsers import expat

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import ProgramError
from whisperport.system.regular_file import other_kind
from whisperport.targets.cpu.openvino.runtime import TYPES

# The decoder of large-v3 has 2 MB, and 70,000 elements.
MAX_BYTES = 64 << 20
MAX_ELEMENTS = 1_000_000
MAX_DEPTH = 32
MAX_RANK = 32  # of an array of numpy 1; numpy 2 has 64
DTYPES = {kind: dtype for dtype, kind in TYPES.items()}  # OpenVINO's name of a dtype -> numpy's
NO_BYTES = np.empty(0, np.uint8)
HINT = "export the model again"
# What expat says of a file that ends before its last element does.
ENDS = [
    expat.errors.codes[text]
    for text in (expat.errors.XML_ERROR_NO_ELEMENTS, expat.errors.XML_ERROR_UNCLOSED_TOKEN)
]


@dataclass(slots=True)
class IrNode:
    """One operation.

    Attributes:
        name: its friendly name.
        type: of the operation, such as "MatMul".
        opset: that the operation is of, such as "opset1"; empty: not stated.
        attributes: of its element `data`.
        sizes: of each output, the sizes of its axes; -1: not fixed.
        precisions: of each output, such as "FP32".
        tensors: of each output, the names of the tensor.
        inputs: (index of a node, which of its outputs), in the order of the node's input ports.
        span: of its bytes in the file: where they begin, and end.
    """

    name: str
    type: str
    opset: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    sizes: list[list[int]] = field(default_factory=list)
    precisions: list[str] = field(default_factory=list)
    tensors: list[list[str]] = field(default_factory=list)
    inputs: list[tuple[int, int]] = field(default_factory=list)
    span: slice = field(default_factory=lambda: slice(0))

    @property
    def names(self) -> set[str]:
        """Names of the tensors that it computes."""
        return {name for names in self.tensors for name in names}


@dataclass(frozen=True, slots=True)
class IrGraph:
    """The nodes of one file by their ids, the arrows between them, and where its other sections are."""

    nodes: Mapping[int, IrNode]
    sections: Mapping[str, slice]

    def of_type(self, *types: str) -> Iterator[tuple[int, IrNode]]:
        """Yield the index of each node of some types, and the node."""
        return ((i, node) for i, node in self.nodes.items() if node.type in types)

    def source(self, index: int, place: int) -> IrNode | None:
        """Return the node that computes an input of a node; None if it has no such input."""
        inputs = self.nodes[index].inputs
        return self.nodes[inputs[place][0]] if place < len(inputs) else None

    def before(self, index: int, stop: frozenset[str] = frozenset()) -> set[int]:
        """Return the indices of all nodes that a node's inputs are computed from.

        Args:
            index: of the node.
            stop: types of nodes; what is before them is left out.
        """
        seen: set[int] = set()
        waiting = [source for source, _ in self.nodes[index].inputs]
        while waiting:
            current = waiting.pop()
            if current in seen:
                continue
            seen.add(current)
            if self.nodes[current].type not in stop:
                waiting += [source for source, _ in self.nodes[current].inputs]
        return seen


def is_ir(head: bytes) -> bool:
    """Return whether a file is an OpenVINO model; `head` is its first bytes."""
    return head.lstrip().startswith((b"<?xml", b"<net"))


def read_ir(path: Path) -> IrGraph:
    """Read the graph in an OpenVINO file; a body inside a node, as of a loop, is left out.

    Raises:
        ProgramError: the file cannot be read, is damaged or is too large.
    """
    if kind := other_kind(path):
        raise ProgramError(f"cannot read {path}", why=f"the path is {kind}, not a file")
    reader = _Reader()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
        with path.open("rb") as file:
            reader.parser.ParseFile(file)
        return reader.graph()
    except OSError as error:
        raise ProgramError(f"cannot read {path}", why=error.strerror or str(error)) from error
    except (expat.ExpatError, ValueError, KeyError) as error:
        size = path.stat().st_size
        ends_early = getattr(error, "code", 0) in ENDS
        state = "cut off" if ends_early else "damaged, or is not an OpenVINO model"
        raise ProgramError(
            f"{path.name} is {state if size else 'empty'}",
            why=f"{type(error).__name__}: {error}"[:200],
            hint=HINT,
        ) from error


def places(graph: IrGraph, name: str) -> Iterator[tuple[IrNode, slice]]:
    """Yield each constant of a graph, and its bytes in the .bin file `name`.

    Raises:
        ProgramError: a place is none.
    """
    for _, node in graph.of_type("Const"):
        try:
            start, n_bytes = int(node.attributes["offset"]), int(node.attributes["size"])
            if not 0 <= start <= start + n_bytes:
                raise ValueError(f"it begins at byte {start} and has {n_bytes} bytes")
        except (KeyError, ValueError) as error:
            raise ProgramError(
                f"the constant `{node.name[:80]}` in {name} is damaged",
                why=f"{type(error).__name__}: {error}"[:200],
                hint=HINT,
            ) from error
        yield node, slice(start, start + n_bytes)


def stored_bytes(graph: IrGraph, weights: Path) -> Iterator[tuple[IrNode, NDArray[np.uint8]]]:
    """Yield each constant of a graph and its bytes, which are mapped.

    Args:
        weights: the .bin file.

    Raises:
        ProgramError: the file cannot be read, or a constant is outside of it.
    """
    if kind := other_kind(weights):
        raise ProgramError(f"cannot read {weights}", why=f"the path is {kind}, not a file")
    try:
        mapped = np.memmap(weights, np.uint8, "r") if weights.stat().st_size else NO_BYTES
    except (OSError, ValueError) as error:
        raise ProgramError(f"cannot read {weights}", why=str(error)) from error
    for node, place in places(graph, weights.name):
        if place.stop > len(mapped):
            raise ProgramError(
                f"{weights.name} is {'cut off, or of another .xml' if len(mapped) else 'empty'}",
                why=f"it has {len(mapped):,} bytes; the constant `{node.name[:80]}` ends at byte "
                f"{place.stop:,}",
                hint=f"download both files again, or {HINT}",
            )
        yield node, mapped[place]


def constants(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the values of each constant of a file; those that numpy lacks are left out.

    Raises:
        ProgramError: a file cannot be read, or a constant is outside of the .bin file beside it.
    """
    for node, data in stored_bytes(read_ir(path), path.with_suffix(".bin")):
        sizes = node.sizes[0] if node.sizes else []
        dtype = DTYPES.get(node.attributes.get("element_type", ""))
        if dtype is None or min(sizes, default=1) < 1 or len(sizes) > MAX_RANK:
            continue
        if math.prod(sizes) * np.dtype(dtype).itemsize == len(data):
            yield node.name, data.view(dtype).reshape(sizes)


class _Reader:
    """Collects nodes and edges while expat reads the file. Entities are not allowed."""

    def __init__(self) -> None:
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.StartDoctypeDeclHandler = _no_document_type
        self.path: list[str] = []
        self.elements = 0
        self.nodes: dict[int, IrNode] = {}
        self.sections: dict[str, slice] = {}
        self.ports: dict[tuple[int, int], tuple[str, int]] = {}  # (node, port) -> side, place
        self.edges: list[tuple[int, int, int, int]] = []
        self.node = -1
        self.begin = 0  # byte of the section or node
        self.n_inputs = 0  # of the node
        self.size = ""

    def graph(self) -> IrGraph:
        """Return the graph of a file that was read to its end."""
        if not self.nodes:
            raise ValueError("it has no layers")
        sources: dict[int, dict[int, tuple[int, int]]] = {index: {} for index in self.nodes}
        for source, source_port, target, target_port in self.edges:
            side, place = self.ports[source, source_port]
            if side != "output" or self.ports[target, target_port][0] != "input":
                raise ValueError(f"an edge from layer {source} to layer {target} ends at no port")
            sources[target][self.ports[target, target_port][1]] = source, place
        for index, inputs in sources.items():
            if sorted(inputs) != list(range(len(inputs))):
                raise ValueError(f"layer {index} lacks an input")
            self.nodes[index].inputs = [inputs[place] for place in range(len(inputs))]
        return IrGraph(self.nodes, self.sections)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self.path.append(tag)
        self.elements += 1
        if len(self.path) > MAX_DEPTH or self.elements > MAX_ELEMENTS:
            raise ValueError(
                f"it has more than {MAX_ELEMENTS} elements, or they are nested more than {MAX_DEPTH} deep"
            )
        match self.path:
            case ["net", "layers", "layer"]:
                self.node = int(attributes["id"])
                if self.node in self.nodes:
                    raise ValueError(f"two layers have the id {self.node}")
                opset = attributes.get("version", "")
                self.nodes[self.node] = IrNode(attributes["name"], attributes["type"], opset)
                self.begin, self.n_inputs = self.parser.CurrentByteIndex, 0
            case ["net", "layers", "layer", "data"]:
                self.nodes[self.node].attributes = attributes
            case ["net", "layers", "layer", "input" | "output" as side, "port"]:
                self._port(side, attributes)
            case ["net", "edges", "edge"]:
                keys = ("from-layer", "from-port", "to-layer", "to-port")
                source, source_port, target, target_port = (int(attributes[key]) for key in keys)
                self.edges.append((source, source_port, target, target_port))
            case ["net", _]:
                self.begin = self.parser.CurrentByteIndex
            case _:
                pass

    def _port(self, side: str, attributes: dict[str, str]) -> None:
        node = self.nodes[self.node]
        if side == "input":
            place = self.n_inputs
            self.n_inputs += 1
        else:
            place = len(node.sizes)
            node.sizes.append([])
            node.precisions.append(attributes.get("precision", ""))
            node.tensors.append([name for name in attributes.get("names", "").split(",") if name])
        self.ports[self.node, int(attributes["id"])] = side, place

    def _text(self, text: str) -> None:
        if self.path[-1] == "dim":
            self.size += text

    def _end(self, _tag: str) -> None:
        span = slice(self.begin, self.parser.CurrentByteIndex)  # without the closing tag
        match self.path:
            case ["net", "layers", "layer", "output", "port", "dim"]:
                self.nodes[self.node].sizes[-1].append(int(self.size))
            case ["net", "layers", "layer"]:
                self.nodes[self.node].span = span
            case ["net", section] if section != "layers":
                self.sections[section] = span
            case _:
                pass
        self.size = ""
        self.path.pop()


def _no_document_type(*_: object) -> NoReturn:
    raise ValueError("it declares a document type, which no OpenVINO model does")
