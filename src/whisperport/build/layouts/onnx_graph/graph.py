"""The nodes of an ONNX graph, in order, and the tensors that all graphs of a file share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
OPSET = 17  # of LayerNormalization; every runtime of the last three years reads it


@dataclass(frozen=True, slots=True)
class Initializer:
    """A stored tensor. Its values are read when it is written, and not kept."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: Callable[[], Array]

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Graph:
    """Nodes of one graph. The branches of an `If` are graphs of their own inside another."""

    def __init__(
        self, prefix: str = "", outer: "Graph | None" = None, *, opset: int = OPSET
    ) -> None:
        """Create a graph without nodes.

        Args:
            prefix: of the names of values; a branch needs one of its own.
            outer: the graph around a branch: it holds the initializers, and what is computed of them alone.
            opset: version of ONNX's operators.
        """
        self.opset = opset
        self.nodes: list[Any] = []
        self.outer = outer or self
        self.initializers: dict[str, Initializer] = outer.initializers if outer else {}
        self._prefix = prefix
        self._computed: set[str] = set()

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node with one output, and return the output's name."""
        return self._node(kind, inputs, [name or self._name(kind)], attributes)[0]

    def ops(self, kind: str, *inputs: str, n_outputs: int) -> list[str]:
        """Add a node with several outputs, and return their names."""
        return self._node(kind, inputs, [self._name(f"{kind}_{i}") for i in range(n_outputs)], {})

    def constant(self, value: Any, dtype: DTypeLike = np.int64) -> str:
        """Return the name of a small tensor; equal tensors are stored once."""
        array = np.asarray(value, dtype)
        values = "_".join(map(str, array.reshape(-1).tolist()))
        return self.stored(
            f"{array.dtype}_{array.ndim}d_{values}", array.shape, array.dtype, lambda: array
        )

    def stored(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        values: Callable[[], Array],
    ) -> str:
        """Store a tensor once, and return its name."""
        if name not in self.initializers:
            self.initializers[name] = Initializer(shape, np.dtype(dtype), values)
        return name

    def computed(self, kind: str, *inputs: str, name: str, **attributes: Any) -> str:
        """Add a node over initializers to the outer graph, once for all branches."""
        if name not in self.outer._computed:
            self.outer._computed.add(name)
            self.outer.op(kind, *inputs, name=name, **attributes)
        return name

    def sizes(self, x: str, start: int, end: int) -> str:
        """Return the sizes (end - start,) of some axes of x."""
        return self.op("Slice", self.op("Shape", x), self.constant([start]), self.constant([end]))

    def scalar(self, x: str) -> str:
        """Return () of x (1,)."""
        return self.op("Squeeze", x, self.constant([0]))

    def rename(self, x: str, name: str) -> str:
        """Give a computed value another name, and return that."""
        for node in self.nodes:
            for side in (node.input, node.output):
                for i, value in enumerate(side):
                    if value == x:
                        side[i] = name
        return name

    def _name(self, kind: str) -> str:
        return f"{self._prefix}{kind}_{len(self.nodes)}"

    def _node(
        self, kind: str, inputs: tuple[str, ...], outputs: list[str], attributes: dict[str, Any]
    ) -> list[str]:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, list(inputs), outputs, **attributes))
        return outputs
