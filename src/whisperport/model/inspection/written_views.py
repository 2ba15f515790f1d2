"""Follow writes in place through views, as torch does before it gives a program to a compiler.

A view has the memory of another tensor: `rows = x[:, :2]`. After `rows.add_(y)`, `x` has other values, so
what reads `x` depends on that `add_`. torch makes this explicit: the write gives a new `rows`, and from it
a new `x`. Here the node that writes has them all as outputs, and later nodes read those.

Source: torch 2.13, torch/_functionalize and aten/src/ATen/FunctionalInverses.cpp.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from whisperport.model.inspection.graph import Node, Value

VIEWS = frozenset({"expand", "reshape", "select", "slice", "squeeze", "transpose", "unsqueeze"})
VIEWS |= {"alias", "chunk", "detach", "diagonal", "movedim", "narrow", "split", "unbind"}
WRITTEN = "written_views"  # attribute: the views that a write goes through, the innermost first


def follow_writes(
    nodes: Iterable[Node], outputs: Sequence[Value]
) -> tuple[list[Node], tuple[Value, ...]]:
    """Give each node that writes through a view the tensors that this changes as further outputs.

    Args:
        nodes: of a torch graph, in an order in which they can run.
        outputs: of the graph.

    Returns:
        The nodes and outputs, which read the newest values.
    """
    memory = _Memory()
    kept = []
    for node in nodes:
        inputs = tuple(value and memory.newest(value) for value in node.inputs)
        if node.in_place and node.tensors:
            written, views = memory.write(node)
            attributes = {**node.attributes, WRITTEN: views} if views else node.attributes
            node = replace(node, outputs=node.outputs + written, attributes=attributes)
        elif node.op in VIEWS and node.tensors:
            memory.add_views(node)
        kept.append(replace(node, inputs=inputs))
    return _without_unread(kept, returned := tuple(map(memory.newest, outputs))), returned


class _Memory:
    """Which tensors have the same memory, and the newest value of each."""

    def __init__(self) -> None:
        self._newest: dict[str, Value] = {}  # tensor -> its value after the last write
        self._same: dict[str, str] = {}  # result of a write -> the tensor that it wrote to
        self._view_of: dict[str, tuple[Value, str]] = {}  # view -> its tensor, and the operator
        self._views: dict[str, list[Value]] = {}  # tensor -> its views

    def newest(self, value: Value) -> Value:
        return self._newest.get(self._tensor(value), value)

    def add_views(self, node: Node) -> None:
        viewed = node.tensors[0]
        tensor = replace(viewed, name=self._tensor(viewed))
        for view in node.outputs:
            self._view_of[view.name] = (tensor, node.op)
            self._views.setdefault(tensor.name, []).append(view)

    def write(self, node: Node) -> tuple[tuple[Value, ...], tuple[str, ...]]:
        """Return the new values of other tensors with the same memory, and the views between them."""
        name = self._tensor(node.tensors[0])
        self._same[node.output.name] = name
        changed, views = [*self._change_views(name, "", node)], []
        while name in self._view_of:
            tensor, view = self._view_of[name]
            views.append(view)
            changed += [self._change(tensor, node), *self._change_views(tensor.name, name, node)]
            name = tensor.name
        self._newest[self._tensor(node.output)] = node.output
        return tuple(changed), tuple(views)

    def _change_views(self, name: str, known: str, node: Node) -> Iterable[Value]:
        """Change all views of a tensor, and their views, except the one that is known."""
        for view in self._views.get(name, ()):
            if view.name != known:
                yield self._change(view, node)
                yield from self._change_views(view.name, "", node)

    def _change(self, tensor: Value, node: Node) -> Value:
        new = Value(f"{tensor.name} after {node.name}", tensor.shape, tensor.dtype)
        self._newest[tensor.name] = new
        return new

    def _tensor(self, value: Value) -> str:
        return self._same.get(value.name, value.name)


def _without_unread(nodes: list[Node], returned: tuple[Value, ...]) -> list[Node]:
    """Remove the further outputs that nothing reads."""
    read = {value.name for value in returned}
    read |= {value.name for node in nodes for value in node.tensors}
    return [
        replace(node, outputs=tuple(v for v in node.outputs if v is node.output or v.name in read))
        if node.in_place
        else node
        for node in nodes
    ]
