"""Lay out the weights of matrix multiplications in blocks of columns, in graphs for ONNX Runtime's CPU.

    x (1, P, K) ─ MatMul, W (N/32, K, 32) ─ (N/32, P, 32) ─ Transpose ─ (P, N/32, 32) ─ Reshape ─ (1, P, N)

A multiplication with one token takes as long as reading its weights W (K, N). Each thread computes some of
the columns, so it reads a short part of each row. A block of 32 columns is consecutive in memory. With the
sizes of Whisper tiny this takes 55 to 85 % of the time, as much as with weights that ONNX Runtime has
packed; but packed weights are a copy for each session. With one token there is no Transpose.

This is done when programs are loaded, because only those that share their weights read them so. The
encoder, `step_B` and other execution providers read plain matrices from the same file.
"""

import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from whisperport.targets.onnx.graph import (
    INTS_ATTRIBUTE,
    add_integers,
    forget,
    has_inner_graphs,
    stated_shapes,
)

# Of a block. With 64, a step takes 1.05 times as long; 16 is better for several tokens.
COLUMNS = 32
PLAIN = {
    "alpha": 1.0,
    "beta": 1.0,
    "transA": 0,
    "transB": 0,
}  # attributes of a Gemm that is x W + bias


class Matrix(NamedTuple):
    """The weight of matrix multiplications."""

    rows: int  # K
    columns: int  # N

    @property
    def in_blocks_shape(self) -> tuple[int, int, int]:
        return self.columns // COLUMNS, self.rows, COLUMNS

    def in_blocks(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Return a view of R rows, R·N values, as blocks (N/32, R, 32)."""
        return flat.reshape(-1, self.columns // COLUMNS, COLUMNS).transpose(1, 0, 2)


def matrices(model: Any, sizes: Mapping[str, int]) -> dict[str, Matrix]:
    """Return the weights of a graph that can be laid out in blocks, by name.

    Args:
        model: a parsed ONNX model.
        sizes: number of values of each weight, by its name where it is used.
    """
    if has_inner_graphs(model):
        return {}  # an inner graph may use the weights too
    shapes = stated_shapes(model, _multiplied(model, sizes))
    usable: dict[str, Matrix] = {}
    unusable: set[str] = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name in sizes:
                # A node of a damaged file may have no output.
                matrix = _matrix(node, index, shapes, sizes[name]) if node.output else None
                if matrix is None or usable.setdefault(name, matrix) != matrix:
                    unusable.add(name)
    return {name: matrix for name, matrix in usable.items() if name not in unusable}


def use_blocks(model: Any, blocked: Mapping[str, Matrix]) -> None:
    """Change the nodes of a graph so that they read weights in blocks.

    Args:
        model: a parsed ONNX model, whose nodes are changed.
        blocked: some of its `matrices`, each of which is now (N/32, K, 32).
    """
    graph, shapes, nodes = model.graph, stated_shapes(model, _multiplied(model, blocked)), []
    for node in graph.node:
        nodes.append(node)
        if len(node.input) > 1 and node.input[1] in blocked:
            nodes += _joined(model, node, shapes[node.input[0]], blocked[node.input[1]].columns)
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    forget(model, blocked)


def _joined(model: Any, node: Any, shape: tuple[int, ...], columns: int) -> list[Any]:
    """Make a node multiply by blocks, and return the nodes that join its results."""
    output, bias, make = node.output[0], list(node.input[2:]), type(node)
    del node.input[2:], node.attribute[:]
    node.op_type = "MatMul"
    names = iter(f"{output}/{step}" for step in ("blocks", "rows", "sum"))
    node.output[0] = next(names)
    nodes, last = [], node.output[0]

    def add(operator: str, *further: str, to: str) -> Any:
        nonlocal last
        added = make(op_type=operator, input=[last, *further], output=[to])
        nodes.append(added)
        last = to
        return added

    if math.prod(shape[:-1]) > 1:
        transpose = add("Transpose", to=next(names))
        transpose.attribute.add(name="perm", ints=[1, 0, 2], type=INTS_ATTRIBUTE)
    sizes = add_integers(model, f"{output}/shape", [*shape[:-1], columns])
    add("Reshape", sizes, to=next(names) if bias else output)
    if bias:
        add("Add", *bias, to=output)
    return nodes


def _multiplied(model: Any, weights: Container[str]) -> set[str]:
    """Return the names of what is multiplied by some weights."""
    pairs = (node.input[:2] for node in model.graph.node if len(node.input) > 1)
    return {x for x, weight in pairs if weight in weights}


def _matrix(
    node: Any, index: int, shapes: Mapping[str, tuple[int, ...]], size: int
) -> Matrix | None:
    """Return the matrix that an input of a node is; None if the node cannot use it in blocks."""
    shape = shapes.get(node.input[0], ())
    if index != 1 or len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != 1):
        return None
    if node.op_type == "Gemm":
        attributes = {attribute.name: attribute.f or attribute.i for attribute in node.attribute}
        if attributes.items() - PLAIN.items() or len(shape) != 2:
            return None
    elif node.op_type != "MatMul":
        return None
    rows, columns = shape[-1], size // max(1, shape[-1])
    fits = min(shape) > 0 and rows * columns == size and columns > 0 and columns % COLUMNS == 0
    return Matrix(rows, columns) if fits else None
