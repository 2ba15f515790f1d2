"""Yield the arrays of an ONNX file, one at a time."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.onnx_graph.header import read_header, text
from whisperport.build.layouts.reading import Files, StoredArray, in_steps
from whisperport.errors import ProgramError, needs

LARGEST_SCALE = 1 << 22  # elements; one of each 32 of the largest embedding are 2 million
OF_NAME = -1  # axis of a scale that no node states: the name of the matrix does
NO_ZERO = "-"  # in place of the name of a zero point: the node has none, and computes with 0
ZERO = 128  # of 8 bits without a sign, where the file does not say it
# Ends of the name of a matrix of 8 bits; its scale and its zero point have other ends.
INTEGERS = ("_quantized", ".T.int8", ".T.uint8", ".int8", ".uint8")
BLOCKS = "MatMulNBits"  # ONNX Runtime's matmul with a matrix whose rows are blocks of few bits
SCALES, ZEROS = ("_scale", ".scale"), ("_zero_point",)

Scales = defaultdict[str, set[tuple[str, str, int]]]
"""Matrix of 8 bits -> names of its scale and zero point, empty if no node states them; the scale's axis."""


def stored_precision(files: Files, names: Iterable[str]) -> str:
    """Return the precision of most matrices in the first ONNX file that can be read; of none: fp32."""
    for name in names:
        with suppress(ProgramError):
            return files.read(name, read_header).precision
    return "fp32"


def stored_arrays(files: Files, names: Iterable[str]) -> Iterator[StoredArray]:
    """Yield each tensor of ONNX files, those of inner graphs included.

    Raises:
        ProgramError: the file cannot be read, is no ONNX model, or its external data is missing.
        MissingPackageError: onnx is not installed.
    """
    with needs("cannot read an ONNX file: the package onnx is not installed", extra="export"):
        import onnx
        from google.protobuf.message import DecodeError
        from onnx.checker import ValidationError

        from whisperport.model.inspection.read_onnx import check_external_data, damaged
    for name in names:
        path = files.path / name
        try:
            model = onnx.load(path, load_external_data=False)
            if not model.graph.node:
                raise ValueError("it has no nodes")
            check_external_data(path, model)
            yield from _arrays(name, model.graph, str(path.parent))
        except OSError as error:
            raise ProgramError(f"cannot read {path}", why=error.strerror or str(error)) from error
        except (
            ValueError,
            TypeError,
            LookupError,
            RuntimeError,
            DecodeError,
            ValidationError,
        ) as error:
            raise damaged(path, error) from error


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A matrix (N, K) in blocks of a row, as `BLOCKS` reads it.

    Attributes:
        scales, zeros: names of arrays of one number for each block; the second may be empty.
        columns: K; the last block of a row may be longer than what is left of it.
        size: of a block.
        bits: of a value, 4 or 8; the lower half of a byte comes first.
    """

    scales: str
    zeros: str
    columns: int
    size: int
    bits: int

    def multiplied(
        self, stored: NDArray[Any], arrays: Mapping[str, NDArray[Any]]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the matrix and the step of each value, both (N, K)."""
        rows = len(stored)
        integers = self._integers(stored).reshape(rows, -1, self.size).astype(np.float32)
        zeros: Any = np.float32(1 << (self.bits - 1))
        if self.zeros:
            kept = arrays[self.zeros].reshape(rows, -1)  # packed like the matrix, or numbers
            kept = self._integers(kept) if kept.dtype == np.uint8 else kept
            zeros = kept[:, : integers.shape[1], np.newaxis].astype(np.float32)
        steps = arrays[self.scales].reshape(rows, -1, 1).astype(np.float32)
        products = (integers - zeros) * steps, np.broadcast_to(np.abs(steps), integers.shape)
        product, step = (array.reshape(rows, -1)[:, : self.columns] for array in products)
        return product, step

    def _integers(self, stored: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the integers of each row in the bytes of `stored` (rows, …)."""
        values: NDArray[np.uint8] = stored.reshape(len(stored), -1).view(np.uint8)
        if self.bits == 8:
            return values
        return np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)


def _arrays(file: str, graph: Any, folder: str) -> Iterator[StoredArray]:
    scales, users = defaultdict[str, set[tuple[str, str, int]]](set), dict[str, str]()
    blocks = dict[str, _Blocks]()
    _read_nodes(graph, scales, users, blocks)
    stated = {name for pairs in scales.values() for *pair, _ in pairs for name in pair}
    stated |= {name for block in blocks.values() for name in (block.scales, block.zeros)}
    small = {
        text(tensor.name): _values(tensor, folder)
        for tensor in _tensors(graph)
        if (text(tensor.name) in stated or re.search("scale|zero_point", text(tensor.name)))
        and np.prod(tensor.dims) <= LARGEST_SCALE
    }
    for tensor in _tensors(graph):
        name = text(tensor.name)
        values = small[name] if name in small else _values(tensor, folder)
        if name in blocks:
            block, block_step = blocks[name].multiplied(values, small)
            yield StoredArray(file, name, block, users.get(name, ""), block_step)
        elif values.dtype in (np.int8, np.uint8) and values.ndim == 2:
            # Nodes of both branches of a decoder may state it, each in its own way.
            for pair in sorted(scales.get(name, {("", "", OF_NAME)})):
                product, step = _multiplied(name, values, pair, small)
                yield StoredArray(file, name, product, users.get(name, ""), step)
        else:
            yield StoredArray(file, name, values, users.get(name, ""))
        tensor.Clear()


def _values(tensor: Any, folder: str) -> NDArray[Any]:
    from onnx import numpy_helper
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    if uses_external_data(tensor):
        load_external_data_for_tensor(tensor, folder)
    return np.asarray(numpy_helper.to_array(tensor))


def _multiplied(
    name: str, values: NDArray[Any], stated: tuple[str, str, int], small: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Return a matrix of 8 bits times its step, and the step; if it is not found, the integers."""
    base = next((name.removesuffix(end) for end in INTEGERS if name.endswith(end)), name)
    scale = small.get(stated[0] or next((base + end for end in SCALES if base + end in small), ""))
    if scale is None:
        return values, None
    zero = small.get(stated[1] or base + ZEROS[0])
    if stated[1] == NO_ZERO:
        zero = np.array(0)
    if zero is None:
        zero = np.array(ZERO if values.dtype == np.uint8 and not stated[0] else 0)
    axis = stated[2]
    if axis == OF_NAME:
        axis = 0 if name.endswith((".uint8", ".int8")) and ".T." not in name else 1
    return in_steps(values, scale, zero, axis=axis)


def _read_nodes(
    graph: Any, scales: Scales, users: dict[str, str], blocks: dict[str, _Blocks]
) -> None:
    """Note the node that reads each tensor, and the scales and the blocks that a node states."""
    for node in graph.node:
        inputs = [text(name) for name in node.input]
        for name in inputs:
            users.setdefault(name, text(node.name))
        if node.op_type == "DequantizeLinear" and len(inputs) > 1:
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % 2  # of a matrix
            scales[inputs[0]].add((inputs[1], inputs[2] if len(inputs) > 2 else "", axis))
        if node.op_type == "MatMulInteger":
            zero_point = "".join(inputs[3:4]) or NO_ZERO
            scales[inputs[1]].add(("", zero_point, OF_NAME))
        if node.op_type == BLOCKS and len(inputs) > 2:
            numbers = {attribute.name: attribute.i for attribute in node.attribute}
            columns, size, bits = numbers["K"], numbers["block_size"], numbers.get("bits", 4)
            if bits in (4, 8) and 0 < size <= LARGEST_SCALE:
                blocks[inputs[1]] = _Blocks(inputs[2], "".join(inputs[3:4]), columns, size, bits)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _read_nodes(inner, scales, users, blocks)


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _tensors(inner)
