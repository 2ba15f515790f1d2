"""Write patterns of nodes into an OpenVINO file (.xml), so that the pipelines of an NPU find them.

No weight is changed. OpenVINO computes the sizes in the file again when it loads it, and leaves out nodes
that nothing reads.
"""

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from whisperport.targets.cpu.openvino.ir import DTYPES, IrGraph, read_ir

Output = tuple[int, int]
"""Index of a node, and which of its outputs."""
EARLY, LATE = ("Unsqueeze", "Range"), ("Unsqueeze", "Add", "Range")  # of positions, before a Tile
ATTENTION, READ = "ScaledDotProductAttention", "ReadValue"
PARTS = ("key", "value")  # of attention, at its inputs 1 and 2
MASK = 3  # the input of attention
FRAMES = 3000
EVERYTHING = {"begin": 0, "end": 2**63 - 1, "step": 1, "axis": -1}  # inputs of a Slice


class EditedIr:
    """A file that is read, changed and written again.

    Attributes:
        graph: what was read; it does not follow the changes.

    Raises:
        ProgramError: the file cannot be read, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.graph = read_ir(path)  # allows no entities, and limits the number of elements
        self._tree = ET.parse(path)
        parts = {part.tag: part for part in self._tree.getroot()}
        self._layers, self._edges = parts["layers"], parts["edges"]
        self.layers = {int(layer.get("id", "")): layer for layer in self._layers}

    def add(
        self, name: str, kind: str, data: dict[str, str], inputs: Sequence[Output], dtype: str
    ) -> Output:
        """Add a node of one output; `kind` is its version and type, such as "opset1 Add"."""
        index = max(self.layers) + 1
        version, type_ = kind.split()
        named = {"id": str(index), "name": name, "type": type_, "version": version}
        layer = self.layers[index] = ET.SubElement(self._layers, "layer", named)
        ET.SubElement(layer, "data", data)
        ports = ET.SubElement(layer, "input") if inputs else layer
        for place, source in enumerate(inputs):
            identifier, precision = self._port(source)
            ET.SubElement(ports, "port", {"id": str(place), "precision": precision})
            ends = (source[0], identifier, index, place)
            keys = ("from-layer", "from-port", "to-layer", "to-port")
            ET.SubElement(self._edges, "edge", dict(zip(keys, map(str, ends), strict=True)))
        port = {"id": str(len(inputs)), "precision": dtype}
        ET.SubElement(ET.SubElement(layer, "output"), "port", port)
        return index, 0

    def add_integer(self, name: str, value: int) -> Output:
        """Add a constant (1,) int64, whose value is appended to the .bin file."""
        with self.path.with_suffix(".bin").open("ab") as weights:
            start = weights.tell()
            weights.write(np.int64(value).tobytes())
        place = {"element_type": "i64", "shape": "1", "offset": str(start), "size": "8"}
        output = self.add(name, "opset1 Const", place, (), "I64")
        ET.SubElement(self.layers[output[0]].findall("output/port")[0], "dim").text = "1"
        return output

    def replace_input(self, index: int, place: int, source: Output) -> None:
        """Let a node read another output at one of its places."""
        port = self.layers[index].findall("input/port")[place].get("id")
        for edge in self._edges:
            if edge.get("to-layer") == str(index) and edge.get("to-port") == port:
                edge.set("from-layer", str(source[0]))
                edge.set("from-port", self._port(source)[0])

    def set_data(self, index: int, key: str, value: str) -> None:
        """Change an attribute of a node."""
        for data in self.layers[index].iterfind("data"):
            data.set(key, value)

    def write(self) -> None:
        """Write the file."""
        self._tree.write(self.path, encoding="utf-8", xml_declaration=True)

    def _port(self, source: Output) -> tuple[str, str]:
        """Return the id and the dtype of the port of an output."""
        port = self.layers[source[0]].findall("output/port")[source[1]]
        return port.get("id", ""), port.get("precision", "")


def write_positions(ir: EditedIr) -> bool:
    """Write Range + past as Range(past, past + n), the form of transformers before version 5.

    Returns:
        Whether the later form was there: Range from 0, Add, Unsqueeze, Tile.
    """
    changed = False
    for tile, _ in ir.graph.of_type("Tile"):
        chain = position_chain(ir.graph, tile, LATE)
        if not chain:
            continue
        unsqueeze, add, range_ = chain
        past = next(source for source in ir.graph.nodes[add].inputs if source[0] != range_)
        start, stop, step = ir.graph.nodes[range_].inputs
        is_length = ir.graph.nodes[past[0]].type == "Gather" and ir.graph.nodes[past[0]].sizes == [
            []
        ]
        if is_length and is_zero(ir, start[0]):
            end = ir.add(
                "positions.end", "opset1 Add", {"auto_broadcast": "numpy"}, (past, stop), "I64"
            )
            inputs = (past, end, step)
            positions = ir.add("positions", "opset4 Range", {"output_type": "i64"}, inputs, "I64")
            ET.SubElement(ir.layers[positions[0]].findall("output/port")[0], "dim").text = "-1"
            ir.replace_input(unsqueeze, 0, positions)
            changed = True
    return changed


def write_mask(ir: EditedIr) -> bool:
    """Let the mask of self-attention pass a Slice that leaves nothing out."""
    n_before = len(ir.layers)
    sliced: dict[Output, Output] = {}
    for index, _ in _attentions(ir.graph, of_audio=False):
        inputs = ir.graph.nodes[index].inputs
        if len(inputs) <= MASK or ir.graph.nodes[inputs[MASK][0]].type in ("Select", "Slice"):
            continue
        mask = inputs[MASK]
        if mask not in sliced:
            ends = [ir.add_integer(f"mask.{name}", value) for name, value in EVERYTHING.items()]
            sliced[mask] = ir.add("mask", "opset8 Slice", {}, (mask, *ends), "FP32")
        ir.replace_input(index, MASK, sliced[mask])
    return len(ir.layers) > n_before


def write_layer_names(ir: EditedIr) -> bool:
    """Name the node before each state of cross-attention after its layer."""
    states = list(_states(ir.graph, of_audio=True))
    for layer, part, state in states:
        before = ir.graph.nodes[state].inputs[0][0]
        ir.layers[before].set("name", f"decoder.layers.{layer}.encoder_attn.{part}")
    return bool(states)


def write_state_names(ir: EditedIr) -> bool:
    """Name each state of self-attention after its layer and part, where it is read and where assigned."""
    names = {
        ir.graph.nodes[state].attributes.get("variable_id", ""): (
            f"past_key_values.{layer}.decoder.{part}present.{layer}.decoder.{part}"
        )
        for layer, part, state in _states(ir.graph, of_audio=False)
    }
    for index, node in ir.graph.of_type(READ, "Assign"):
        if name := names.get(node.attributes.get("variable_id", "")):
            ir.set_data(index, "variable_id", name)
    return bool(names)


def write_frames(ir: EditedIr) -> bool:
    """Fix the last axis of `input_features`."""
    for index, node in ir.graph.of_type("Parameter"):
        sizes = ir.layers[index].findall("output/port/dim")
        if "input_features" in node.names and len(sizes) == 3:
            sizes[2].text = str(FRAMES)
            stated = ["?" if int(size.text or -1) < 0 else str(size.text) for size in sizes]
            ir.set_data(index, "shape", ",".join(stated))
            return True
    return False


def audio_states(graph: IrGraph) -> set[int]:
    """Return each state of cross-attention: its first value is computed from the encoder's output."""
    features = {
        i for i, node in graph.of_type("Parameter") if "encoder_hidden_states" in node.names
    }
    # A self-attention state begins empty, with the batch size of the encoder's output.
    stop = frozenset({"ShapeOf"})
    return {index for index, _ in graph.of_type(READ) if features & graph.before(index, stop)}


def position_chain(graph: IrGraph, tile: int, types: Sequence[str]) -> list[int]:
    """Return the nodes before a Tile, the nearest first, if they have these types; else none."""
    nodes, index = [], tile
    for type_ in types:
        before = [
            source for source, _ in graph.nodes[index].inputs if graph.nodes[source].type == type_
        ]
        if not before:
            return []
        index = before[0]
        nodes.append(index)
    return nodes


def _attentions(graph: IrGraph, *, of_audio: bool) -> list[tuple[int, int]]:
    """Return each self- or cross-attention of the decoder, and its layer: how many are before it."""
    states = audio_states(graph)
    nodes = {index: graph.before(index) for index, _ in graph.of_type(ATTENTION)}
    chosen = [
        index
        for index in nodes
        if of_audio == bool({_state(graph, index, place) for place in (1, 2)} & states)
    ]
    return [(index, len(nodes[index] & set(chosen))) for index in chosen]


def _states(graph: IrGraph, *, of_audio: bool) -> Iterator[tuple[int, str, int]]:
    """Yield layer, part and index of the state of each key and value."""
    for index, layer in _attentions(graph, of_audio=of_audio):
        for place, part in enumerate(PARTS, 1):
            state = _state(graph, index, place)
            if state is not None:
                yield layer, part, state


def _state(graph: IrGraph, attention: int, place: int) -> int | None:
    """Return the state that keys or values are read from, with nothing but changes of shape between."""
    waiting = [graph.nodes[attention].inputs[place][0]]
    for index in waiting:  # which grows: the nearest nodes come first
        if graph.nodes[index].type == READ:
            return index
        if graph.nodes[index].type not in ("MatMul", "ShapeOf", ATTENTION):
            waiting += [source for source, _ in graph.nodes[index].inputs if source not in waiting]
    return None


def is_zero(ir: EditedIr, index: int) -> bool:
    """Return whether a node is an integer constant of value 0."""
    attributes = ir.graph.nodes[index].attributes
    if ir.graph.nodes[index].type != "Const" or attributes.get("element_type") not in (
        "i32",
        "i64",
    ):
        return False
    with ir.path.with_suffix(".bin").open("rb") as weights:
        weights.seek(int(attributes.get("offset", "0")))
        values = np.frombuffer(weights.read(8), DTYPES[attributes["element_type"]])
    return bool(values.size) and int(values[0]) == 0
