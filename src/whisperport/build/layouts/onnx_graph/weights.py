"""A checkpoint's weights in a graph: stored once per file, in a precision, and multiplied by.

A tensor has openai-whisper's name, with ".T" if its axes are swapped, as `MatMul` reads a matrix, and:

    fp32     nothing more
    fp16     ".half"; a Cast to float32 follows, which a runtime computes once. It is exact where float16
             holds the weights, as in a checkpoint published in it.
    w8       ".int8" or ".uint8", and ".scale" of each row; only matrices, the others are stored as in fp32
"""

from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.layouts.arrays import quantized_rows, weight
from whisperport.build.layouts.onnx_graph.graph import Array, Graph

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

FLOAT = 1  # onnx.TensorProto.FLOAT
ZERO_POINT = 128  # of 8 bits without a sign


class Weights:
    """Nodes that read a checkpoint's weights."""

    def __init__(self, graph: Graph, checkpoint: "Checkpoint", precision: str) -> None:
        """Store weights in a graph, in fp32, fp16 or w8, when a method first reads them."""
        self.graph = graph
        self.checkpoint = checkpoint
        self.precision = precision

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.weights

    def tensor(self, name: str, *, swapped: bool = False) -> str:
        """Return a weight in float32; a matrix (N, K) may be swapped to (K, N)."""
        stored_name = f"{name}.T" if swapped else name
        shape = tuple(self.checkpoint.weights[name].shape)
        shape = shape[::-1] if swapped else shape

        def values() -> Array:
            array = weight(self.checkpoint, name)
            return array.T if swapped else array

        if self.precision != "fp16":
            return self.graph.stored(stored_name, shape, np.float32, values)
        half = self.graph.stored(
            f"{stored_name}.half", shape, np.float16, lambda: values().astype(np.float16)
        )
        return self.graph.computed("Cast", half, name=stored_name, to=FLOAT)

    def times(self, x: str, name: str, *, few_rows: bool = False) -> str:
        """Return x (…, K) times the transpose of a weight (N, K).

        Args:
            few_rows: whether x has a few rows only. With w8, x is then rounded to 8 bits at run time, and
                integers are multiplied. Over many rows, the weight is converted to float32 instead: one
                scale for all of x would lose what is small beside its largest values.
        """
        if self.precision != "w8":
            return self.graph.op("MatMul", x, self.tensor(name, swapped=True))
        if few_rows:
            return self._integer_product(x, self._eight_bits(name, swapped=True), name)
        g, scale = self.graph, self._scale(name)
        matrix = self._eight_bits(name, swapped=True, signed=True)
        if g.outer is g:
            return g.op("MatMul", x, g.op("DequantizeLinear", matrix, scale, axis=1))
        # ONNX Runtime 1.32 cannot load a DequantizeLinear in a branch whose weight is outside of it.
        columns = g.computed("Cast", matrix, name=f"{name}.T", to=FLOAT)
        return g.op("Mul", g.op("MatMul", x, columns), scale)

    def embedded(self, ids: str, name: str) -> str:
        """Return the rows (…, d) of a table (V, d) for ids (…)."""
        g = self.graph
        if self.precision != "w8":
            return g.op("Gather", self.tensor(name), ids)
        rows = g.op("Cast", g.op("Gather", self._eight_bits(name), ids), to=FLOAT)
        scale = g.op("Unsqueeze", g.op("Gather", self._scale(name), ids), g.constant([-1]))
        return g.op("Mul", g.op("Sub", rows, g.constant(ZERO_POINT, np.float32)), scale)

    def times_table(self, x: str, name: str) -> str:
        """Return x (B, n, d) times the transpose of a table (V, d) that `embedded` reads too: (B, n, V)."""
        g = self.graph
        if self.precision == "w8":
            columns = g.computed("Transpose", self._eight_bits(name), name=f"{name}.T", perm=[1, 0])
            return self._integer_product(x, columns, name)
        # Gemm reads the table as it is. Of a Transpose, runtimes keep a second table.
        width = self.checkpoint.dims.n_text_state
        rows = g.op("Reshape", x, g.constant([-1, width]))
        product = g.op("Gemm", rows, self.tensor(name), transB=1)
        shape = g.op("Concat", g.sizes(x, 0, 2), g.constant([-1]), axis=0)
        return g.op("Reshape", product, shape)

    def _integer_product(self, x: str, columns: str, name: str) -> str:
        """Return x (…, K), rounded to 8 bits, times columns (K, N) of 8 bits without a sign."""
        g = self.graph
        rounded, x_scale, x_zero = g.ops("DynamicQuantizeLinear", x, n_outputs=3)
        zero = g.constant(ZERO_POINT, np.uint8)
        product = g.op("Cast", g.op("MatMulInteger", rounded, columns, x_zero, zero), to=FLOAT)
        return g.op("Mul", product, g.op("Mul", self._scale(name), x_scale))

    def _eight_bits(self, name: str, *, swapped: bool = False, signed: bool = False) -> str:
        """Return a matrix (N, K) whose rows are rounded to 8 bits; it may be swapped to (K, N).

        Without a sign, the zero point is 128. With one, ONNX Runtime's multiplication of integers saturates
        on x86 processors that lack VNNI (its documentation, "Quantize ONNX models").
        """
        shape = tuple(self.checkpoint.weights[name].shape)

        def values() -> Array:
            rows, _ = quantized_rows(weight(self.checkpoint, name))
            integers: Array = rows if signed else rows.view(np.uint8) ^ np.uint8(ZERO_POINT)
            return integers.T if swapped else integers

        return self.graph.stored(
            f"{name}{'.T' if swapped else ''}.{'int8' if signed else 'uint8'}",
            shape[::-1] if swapped else shape,
            np.int8 if signed else np.uint8,
            values,
        )

    def _scale(self, name: str) -> str:
        """Return the scale (N,) of a matrix's rows."""

        def values() -> Array:
            _, factor = quantized_rows(weight(self.checkpoint, name))
            return (1 / factor).astype(np.float32)

        n_rows = self.checkpoint.weights[name].shape[0]
        return self.graph.stored(f"{name}.scale", (n_rows,), np.float32, values)
