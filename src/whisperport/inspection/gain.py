"""What a node would gain if the accelerator ran it: an estimate, from the rates of those that it runs.

    products (linear, matmul, conv)   the node's operations / operations a second of the delegated products
    everything else                   the node's bytes / bytes a second of the other delegated nodes

The gain is the node's measured time less that. It leaves out what else changes: a node that joins two
subgraphs also saves a call and two copies (so the gain may be higher), and a product much smaller than the
delegated ones, or limited by memory, does not reach their rate (so it may be lower).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whisperport.inspection.cost import MATMULS, NodeCost, cost_of
from whisperport.inspection.graph import Graph, Node

COMPUTE_BOUND = MATMULS | {"conv", "scaled_dot_product_attention"}
XNNPACK_COMPUTE_BOUND = (
    "Fully Connected",
    "Batch Matrix Multiply",
    "Convolution",
)  # its names begin so


@dataclass(frozen=True, slots=True)
class Rates:
    """What the delegated nodes of one program achieved; None where there were none, or no time."""

    flops_per_ms: float | None
    bytes_per_ms: float | None

    def estimated_gain_ms(self, node: Node, ms: float) -> float | None:
        """Milliseconds of `ms` that delegating `node` would save; None: no rate, or sizes unknown."""
        (cost,) = costs([node])
        work = cost.flops if is_compute_bound(node) else moved(cost)
        rate = self.flops_per_ms if is_compute_bound(node) else self.bytes_per_ms
        return max(0.0, ms - work / rate) if work and rate else None


def rates(products: tuple[int, float], others: tuple[int, float]) -> Rates:
    """From (operations, ms) of delegated products and (bytes, ms) of the other delegated nodes."""
    return Rates(*(work / ms if work and ms else None for work, ms in (products, others)))


def is_compute_bound(node: Node) -> bool:
    """Its arithmetic, and not the bytes it moves, sets its time."""
    return node.op in COMPUTE_BOUND


def costs(nodes: Sequence[Node]) -> tuple[NodeCost, ...]:
    return cost_of(Graph("", "torch", tuple(nodes), (), ())).nodes


def moved(cost: NodeCost) -> int:
    """Bytes read and written; a reshape that a runtime runs as a node of its own is a copy."""
    return cost.bytes or sum(
        value.n_bytes or 0 for value in (*cost.node.tensors, *cost.node.outputs)
    )


def compute_and_bytes(nodes: Iterable[Node]) -> tuple[int, int]:
    """Operations of the products among `nodes`, and bytes moved by the others."""
    counted = costs(list(nodes))
    return (
        sum(cost.flops for cost in counted if is_compute_bound(cost.node)),
        sum(moved(cost) for cost in counted if not is_compute_bound(cost.node)),
    )
