"""Predict how a partitioner divides a program into subgraphs, and how many bytes cross their borders.

A subgraph is a set of delegated nodes that no path leaves and enters again: else the accelerator would wait
for the host in the middle of it. Partitioners build such sets in one of two orders.

    backward    From the last node on, a set takes every earlier node with which it still has this property.
                ExecuTorch's partitioner.
    forward     All nodes that can run and are delegated, or not delegated, as the first that can run is;
                then the same with the other nodes. TFLite.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from whisperport.model.inspection.graph import Graph, Node, Value
from whisperport.program.profiling import Subgraph, border_bytes

Parts = Mapping[str, tuple[bool, ...]]
"""Node -> for each part that it is decomposed into, one after another, whether it is delegated."""


@dataclass(frozen=True, slots=True)
class Partitions:
    """All calls of the accelerator in one program.

    Attributes:
        subgraphs: in the order in which they can run.
        splitting: nodes on the host that read a subgraph's output and that another subgraph depends on.
        of_node: node that is delegated as a whole -> place of its subgraph.
    """

    subgraphs: tuple[Subgraph, ...]
    splitting: tuple[str, ...]
    of_node: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "subgraphs": [asdict(subgraph) for subgraph in self.subgraphs],
            "splitting_nodes": list(self.splitting),
            "border_bytes": border_bytes(self.subgraphs),
        }


def partitions_of(graph: Graph, parts: Parts) -> Partitions:
    """Predict the subgraphs of a program.

    Args:
        parts: nodes that are not delegated as a whole.
    """
    nodes, delegated = _decomposed(graph, parts)
    before, after = _reached(nodes)
    is_torch = graph.format == "torch"
    sets = _backward(before, after, delegated) if is_torch else _forward(before, delegated)
    return Partitions(
        tuple(border([nodes[i] for i in members], nodes, graph.outputs) for members in sets),
        tuple(dict.fromkeys(_splitting(nodes, before, sets))),
        {
            nodes[i].name: place
            for place, members in enumerate(sets)
            for i in members
            if nodes[i].name not in parts
        },
    )


def border(inside: Sequence[Node], nodes: Iterable[Node], returned: Collection[Value]) -> Subgraph:
    """Count the bytes that enter and leave a set of nodes. Stored weights do not count.

    Args:
        nodes: all nodes of the program, also those inside.
        returned: what the program returns.
    """
    results = {value.name: value for node in inside for value in node.outputs}
    members = {id(node) for node in inside}
    inputs = {
        value.name: value
        for node in inside
        for value in node.tensors
        if not value.constant and value.name not in results
    }
    read = {v.name for node in nodes if id(node) not in members for v in node.tensors}
    read |= {value.name for value in returned}
    outputs = [value for name, value in results.items() if name in read]
    return Subgraph(len(inside), _total(inputs.values()), _total(outputs))


def _total(values: Iterable[Value]) -> int | None:
    sizes = [value.n_bytes for value in values]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _decomposed(graph: Graph, parts: Parts) -> tuple[list[Node], list[bool]]:
    """Return the nodes with each decomposed one as a chain of its parts, and which are delegated."""
    nodes: list[Node] = []
    delegated: list[bool] = []
    for node in graph.nodes:
        of = parts.get(node.name, (True,))
        for place, is_delegated in enumerate(of):
            inputs = node.inputs if place == 0 else (nodes[-1].output,)
            last = place == len(of) - 1
            outputs = node.outputs if last else (replace(node.output, name=f"{node.name}.{place}"),)
            nodes.append(replace(node, inputs=inputs, outputs=outputs))
            delegated.append(is_delegated)
    return nodes, delegated


def _reached(nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
    """Return for each node the nodes before it, on which it depends, and those after it, as bits."""
    makers: dict[str, int] = {}
    direct: list[set[int]] = []
    before, after = [0] * len(nodes), [0] * len(nodes)
    for index, node in enumerate(nodes):
        direct.append({makers[value.name] for value in node.tensors if value.name in makers})
        for maker in direct[index]:
            before[index] |= before[maker] | 1 << maker
        makers.update({value.name: index for value in node.outputs})
    for index in reversed(range(len(nodes))):
        for maker in direct[index]:
            after[maker] |= after[index] | 1 << index
    return before, after


def _backward(
    before: Sequence[int], after: Sequence[int], delegated: Sequence[bool]
) -> list[list[int]]:
    count = len(before)
    free = [index for index in reversed(range(count)) if delegated[index]]
    sets = []
    while free:
        members, above, below = 0, 0, 0
        rest = []
        for index in free:
            joined = members | 1 << index
            through = (below & before[index]) | (after[index] & above)
            if members and through & ~joined:
                rest.append(index)
                continue
            members = joined
            above |= before[index]
            below |= after[index]
        sets.append([index for index in range(count) if members >> index & 1])
        free = rest
    return sets[::-1]


def _forward(before: Sequence[int], delegated: Sequence[bool]) -> list[list[int]]:
    placed, left = 0, list(range(len(before)))
    sets: list[list[int]] = []
    while left:
        turn, members, rest = delegated[left[0]], [], []
        for index in left:
            if delegated[index] is turn and not before[index] & ~placed:
                members.append(index)
                placed |= 1 << index
            else:
                rest.append(index)
        if turn and members:
            sets.append(members)
        left = rest
    return sets


def _splitting(
    nodes: Sequence[Node], before: Sequence[int], sets: Sequence[Sequence[int]]
) -> Iterable[str]:
    """Yield the nodes between two subgraphs, which read one of them and are read by another."""
    inside = {index for members in sets for index in members}
    results = {value.name for index in inside for value in nodes[index].outputs}
    needed = 0
    for index in inside:
        needed |= before[index]
    for index, node in enumerate(nodes):
        outside = index not in inside and needed >> index & 1
        if outside and any(value.name in results for value in node.tensors):
            yield node.name
