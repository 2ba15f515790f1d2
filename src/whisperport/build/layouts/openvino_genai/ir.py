"""Read the nodes of an OpenVINO file (.xml), without weights and without OpenVINO.

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

MAX_BYTES = 256 << 20  # the decoder of large-v3 has 2 MB
MAX_DEPTH = 32


@dataclass(slots=True)
class IrNode:
    """One operation.

    Attributes:
        name: its friendly name.
        type: of the operation, such as "MatMul".
        attributes: of its element `data`.
        sizes: of each output, the sizes of its axes; -1: not fixed.
        names: of the tensors that it computes.
        inputs: (index of a node, which of its outputs), in the order of the node's input ports.
    """

    name: str
    type: str
    attributes: dict[str, str] = field(default_factory=dict)
    sizes: list[list[int]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    inputs: list[tuple[int, int]] = field(default_factory=list)


class IrGraph:
    """The nodes of one file, and the arrows between them."""

    def __init__(self, nodes: Mapping[int, IrNode]) -> None:
        self.nodes = nodes

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


def read_ir(path: Path) -> IrGraph:
    """Read the graph in an OpenVINO file; a body inside a node, as of a loop, is left out.

    Raises:
        ProgramError: the file cannot be read, is damaged or is too large.
    """
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
        raise ProgramError(
            f"{path.name} is damaged, or is not an OpenVINO model",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="export the model again",
        ) from error


class _Reader:
    """Collects nodes and edges while expat reads the file. Entities are not allowed."""

    def __init__(self) -> None:
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.StartDoctypeDeclHandler = _no_document_type
        self.path: list[str] = []
        self.nodes: dict[int, IrNode] = {}
        self.ports: dict[tuple[int, int], tuple[str, int]] = {}  # (node, port) -> side, place
        self.edges: list[tuple[int, int, int, int]] = []
        self.node = -1
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
        return IrGraph(self.nodes)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self.path.append(tag)
        if len(self.path) > MAX_DEPTH:
            raise ValueError(f"its elements are nested more than {MAX_DEPTH} deep")
        match self.path:
            case ["net", "layers", "layer"]:
                self.node = int(attributes["id"])
                if self.node in self.nodes:
                    raise ValueError(f"two layers have the id {self.node}")
                self.nodes[self.node] = IrNode(attributes["name"], attributes["type"])
            case ["net", "layers", "layer", "data"]:
                self.nodes[self.node].attributes = attributes
            case ["net", "layers", "layer", "input" | "output" as side, "port"]:
                self._port(side, attributes)
            case ["net", "edges", "edge"]:
                keys = ("from-layer", "from-port", "to-layer", "to-port")
                source, source_port, target, target_port = (int(attributes[key]) for key in keys)
                self.edges.append((source, source_port, target, target_port))
            case _:
                pass

    def _port(self, side: str, attributes: dict[str, str]) -> None:
        node = self.nodes[self.node]
        if side == "input":
            place = sum(
                1 for (i, _), (kind, _) in self.ports.items() if i == self.node and kind == side
            )
        else:
            place = len(node.sizes)
            node.sizes.append([])
            node.names |= set(filter(None, attributes.get("names", "").split(",")))
        self.ports[self.node, int(attributes["id"])] = side, place

    def _text(self, text: str) -> None:
        if self.path[-1] == "dim":
            self.size += text

    def _end(self, _tag: str) -> None:
        if self.path == ["net", "layers", "layer", "output", "port", "dim"]:
            self.nodes[self.node].sizes[-1].append(int(self.size))
        self.size = ""
        self.path.pop()


def _no_document_type(*_: object) -> NoReturn:
    raise ValueError("it declares a document type, which no OpenVINO model does")


# OpenVINO's name of a dtype -> numpy's
DTYPES = {"f32": "<f4", "f16": "<f2", "i8": "i1", "u8": "u1", "i32": "<i4", "i64": "<i8"}


def constants(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the name and the values of each constant of a file; the .bin file beside it is mapped.

    Raises:
        ProgramError: a file cannot be read, or a constant is outside of the .bin file.
    """
    graph, weights = read_ir(path), path.with_suffix(".bin")
    try:
        mapped = np.memmap(weights, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise ProgramError(f"cannot read {weights}", why=str(error)) from error
    for _, node in graph.of_type("Const"):
        dtype = np.dtype(DTYPES.get(node.attributes.get("element_type", ""), "V1"))
        sizes = node.sizes[0] if node.sizes else []
        try:
            start, n_bytes = int(node.attributes["offset"]), int(node.attributes["size"])
            if not 0 <= start <= start + n_bytes <= len(mapped):
                raise ValueError(f"it ends at byte {start + n_bytes} of {len(mapped)}")
            if (
                dtype.kind != "V"
                and math.prod(sizes) * dtype.itemsize == n_bytes
                and min(sizes, default=1) > 0
            ):
                yield node.name, mapped[start : start + n_bytes].view(dtype).reshape(sizes)
        except (KeyError, ValueError) as error:
            raise ProgramError(
                f"the constant `{node.name[:80]}` of {path.name} is damaged", why=str(error)
            ) from error
