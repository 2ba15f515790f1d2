"""Estimate the time saved if an undelegated node were delegated, from the rates of the delegated nodes.

    matmul, convolution, attention    time = the node's FLOPs / FLOPs per second of delegated nodes like it
    every other node                  time = the node's bytes / bytes per second of other delegated nodes

The estimated gain is the node's measured time minus this time. The estimate ignores other effects. If the
node connects two subgraphs, delegation also saves a call and two copies, and the gain is higher. A matmul
that is much smaller than the delegated ones, or limited by memory, does not reach their rate, and the
gain is lower.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whisperport.model.inspection.cost import MATMULS, NodeCost, cost_of
from whisperport.model.inspection.graph import Graph, Node

COMPUTE_BOUND = MATMULS | {"conv", "scaled_dot_product_attention"}
# Nodes of XNNPACK whose names begin with one of these are compute-bound.
XNNPACK_COMPUTE_BOUND = (
    "Fully Connected",
    "Batch Matrix Multiply",
    "Convolution",
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of the delegated nodes of one program; None if no such node was measured."""

    flops_per_ms: float | None  # of compute-bound nodes
    bytes_per_ms: float | None  # of all other nodes

    def estimated_gain_ms(self, node: Node, ms: float) -> float | None:
        """Estimate how many milliseconds delegation of `node` would save.

        Args:
            ms: the node's measured time in milliseconds.

        Returns:
            0 to `ms`; None if there is no rate, or the node's sizes are not known.
        """
        (cost,) = node_costs([node])
        work = cost.flops if is_compute_bound(node) else bytes_moved(cost)
        rate = self.flops_per_ms if is_compute_bound(node) else self.bytes_per_ms
        return max(0.0, ms - work / rate) if work and rate else None


def rates(compute: tuple[int, float], memory: tuple[int, float]) -> Rates:
    """Compute the rates of delegated nodes.

    Args:
        compute: (FLOPs, milliseconds) of the compute-bound nodes.
        memory: (bytes, milliseconds) of all other nodes.
    """
    return Rates(*(work / ms if work and ms else None for work, ms in (compute, memory)))


def xnnpack_rates(nodes: Iterable[Node], times: Iterable[tuple[str, float]]) -> Rates:
    """Compute XNNPACK's rates from the total time and the total size of its nodes.

    Args:
        nodes: those that XNNPACK runs.
        times: (XNNPACK's name of a node, milliseconds) of each node that it reports.
    """
    flops, size = compute_and_bytes(nodes)
    ms = {True: 0.0, False: 0.0}
    for name, time in times:
        ms[name.startswith(XNNPACK_COMPUTE_BOUND)] += time
    return rates((flops, ms[True]), (size, ms[False]))


def is_compute_bound(node: Node) -> bool:
    """Whether arithmetic, not memory traffic, determines the node's time."""
    return node.op in COMPUTE_BOUND


def node_costs(nodes: Sequence[Node]) -> tuple[NodeCost, ...]:
    """Count the cost of each node."""
    return cost_of(Graph("", "torch", tuple(nodes), (), ())).nodes


def bytes_moved(cost: NodeCost) -> int:
    """Return the bytes that a node reads and writes.

    A reshape counts as a copy here, because the runtime runs it as a separate node.
    """
    return cost.bytes or sum(
        value.n_bytes or 0 for value in (*cost.node.tensors, *cost.node.outputs)
    )


def compute_and_bytes(nodes: Iterable[Node]) -> tuple[int, int]:
    """Return the FLOPs of the compute-bound nodes, and the bytes moved by all other nodes."""
    counted = node_costs(list(nodes))
    return (
        sum(cost.flops for cost in counted if is_compute_bound(cost.node)),
        sum(bytes_moved(cost) for cost in counted if not is_compute_bound(cost.node)),
    )
