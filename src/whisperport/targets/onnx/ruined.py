"""Find what a compiler that quantizes to 8 bits should compute in another precision, from its samples.

samples ─► activations that one 8-bit scale ruins ─► operators that compute or read one
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport.targets.activations import MIN_SQNR_DB, SAMPLES, Activation
from whisperport.targets.compiler import Layout, same_layout, undone
from whisperport.targets.onnx.activations import MOVES, OnnxActivations

if TYPE_CHECKING:  # boards have no package onnx
    import onnx


@dataclass(frozen=True, slots=True)
class Ruined:
    """What one 8-bit scale ruins in a program.

    Attributes:
        activations: the ruined activations, the one that loses most first.
        names: names of the operators that compute or read one, and of the tensors that they compute,
            sorted. A compiler names the layers of its own graph after one of them.
    """

    activations: tuple[Activation, ...]
    names: tuple[str, ...]

    def notes(self, precision: str) -> tuple[str, ...]:
        """Return a sentence about them for the user, or none.

        Args:
            precision: in which the operators are computed instead.
        """
        if not self.activations:
            return ()
        worst, *further = self.activations
        named = dict.fromkeys(activation.name for activation in further)
        also = f"; also: {', '.join(named)}" if named else ""
        return (f"in {precision} instead, with the operators that read it: {worst}{also}",)


def ruined(
    path: Path,
    arrays: Mapping[str, Path],
    *,
    kinds: Collection[str] = (),
    layout: Layout = same_layout,
) -> Ruined:
    """Run a program on a few samples, and return what one 8-bit scale ruins.

    Args:
        path: the ONNX file in float32, with static shapes.
        arrays: name of an input -> `.npy` file of its samples, (samples, ...).
        kinds: ONNX operators whose activations are examined. Default: all.
        layout: of the samples.
    """
    program = OnnxActivations.read(path)
    examined = [tensor for tensor, kind in program.operators.items() if not kinds or kind in kinds]
    shapes = {
        tensor.name: [axis.dim_value for axis in tensor.type.tensor_type.shape.dim]
        for tensor in program.model.graph.input
    }
    mapped = {name: np.load(file, mmap_mode="r") for name, file in arrays.items()}
    samples = [
        {name: undone(layout, array[sample], shapes[name]) for name, array in mapped.items()}
        for sample in range(min(SAMPLES, *map(len, mapped.values())))
    ]
    measured = program.measured(examined, samples)
    lossy = {
        tensor: activation
        for tensor, activation in measured.items()
        if activation.sqnr_db() < MIN_SQNR_DB
    }
    worst = sorted(lossy.values(), key=Activation.sqnr_db)
    return Ruined(tuple(worst), tuple(sorted(set(_around(program.model.graph, set(lossy))))))


def _around(graph: "onnx.GraphProto", tensors: Collection[str]) -> Iterator[str]:
    """Yield the names of the operators that compute or read a tensor, and of what they compute.

    An operator that moves values is followed to those that read them. A bias is added in the same step of
    an accelerator as the multiplication before it.
    """
    depends = {tensor.name for tensor in graph.input}
    read = set(tensors)
    added: set[str] = set()
    for node in graph.node:
        if not depends.isdisjoint(node.input):
            depends.update(node.output)
        if (
            node.op_type == "Add"
            and node.output[0] in tensors
            and not depends.issuperset(node.input)
        ):
            added.update(depends.intersection(node.input))
        if node.op_type in MOVES and not read.isdisjoint(node.input):
            read.update(node.output)
    for node in graph.node:
        if not read.isdisjoint((*node.input, *node.output)) or not added.isdisjoint(node.output):
            yield from filter(None, (node.name, *node.output))  # optional outputs have no name
