"""End the program before its outputs are joined: the host joins them.

    before   pieces (1,P,V/4) × 4 ── cat ──► logits(1,P,V)
    after    pieces (1,P,V/4) × 4 ─────────► logits_0 … logits_3

Why: `split-vocab-projection` cuts a product that is too wide for a small accelerator. Published graphs end
at the pieces, and no join of them is known to compile.
Exact: nothing is computed.
"""

from torch.fx import GraphModule, Node

from whisperport.host_part import HostPart, Join
from whisperport.rewrites.graph import aten, shape
from whisperport.rewrites.host import Moved, host_rewrite
from whisperport.spec import ProgramSpec, Rejection


@host_rewrite("join-on-host")
def join_on_host(module: GraphModule, spec: ProgramSpec) -> Moved:
    """Move each join along the last axis that is an output; decline those that are read elsewhere too."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    returned = list(output.args[0])
    nodes: list[Node] = []
    names: list[str] = []
    joins: list[Join] = []
    changed: list[str] = []
    rejected: list[Rejection] = []
    for node, tensor in zip(returned, spec.outputs, strict=True):
        pieces = _pieces(node)
        reason = _obstacle(node, pieces, returned) if pieces else ""
        if not pieces or reason:
            rejected += [Rejection(node.name, reason)] if reason else []
            nodes, names = [*nodes, node], [*names, tensor.name]
            continue
        own = tuple(f"{tensor.name}_{index}" for index in range(len(pieces)))
        nodes, names = [*nodes, *pieces], [*names, *own]
        joins.append(Join(tensor, own))
        changed.append(node.name)
    output.args = (tuple(nodes),)
    return Moved(HostPart(joins=tuple(joins)), tuple(names), tuple(changed), tuple(rejected))


def _pieces(node: Node) -> list[Node]:
    """What an output is joined from along its last axis; none where it is no such join."""
    if node.target is not aten.cat.default:
        return []
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if axis not in (-1, len(shape(node)) - 1):
        return []
    return list(node.args[0])  # type: ignore[arg-type]  # a list of nodes, by its schema


def _obstacle(node: Node, pieces: list[Node], returned: list[Node]) -> str:
    if len(node.users) > 1 or returned.count(node) > 1:
        return "what it joins is read elsewhere in the program too"
    if any(piece.op != "call_function" for piece in pieces) or len(set(pieces)) < len(pieces):
        return "it joins an input, a constant, or one tensor twice"
    return ""
