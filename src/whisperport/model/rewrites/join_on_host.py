"""Return pieces of an output instead of their concatenation; the host concatenates them.

    before   pieces (1,P,V/4) × 4 ── cat ──► logits(1,P,V)
    after    pieces (1,P,V/4) × 4 ─────────► logits_0 … logits_3

Why: `split-vocab-projection` splits a matmul that is too wide for a small accelerator. Published graphs
end with the pieces, and no graph that concatenates them is known to compile.
Exact: concatenation does not compute anything.
"""

from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import aten, shape
from whisperport.model.rewrites.host import HostRewriteResult, host_rewrite
from whisperport.program.host_part import HostPart, Join
from whisperport.program.spec import ProgramSpec, Rejection


@host_rewrite("join-on-host")
def join_on_host(module: GraphModule, spec: ProgramSpec) -> HostRewriteResult:
    """Move each concatenation that is an output, along the last axis and not read by another node."""
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
    return HostRewriteResult(
        HostPart(joins=tuple(joins)), tuple(names), tuple(changed), tuple(rejected)
    )


def _pieces(node: Node) -> list[Node]:
    """Return the pieces of an output that is a concatenation along the last axis; otherwise nothing."""
    if node.target is not aten.cat.default:
        return []
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if axis not in (-1, len(shape(node)) - 1):
        return []
    return list(node.args[0])  # type: ignore[arg-type]  # a list of nodes, by its schema


def _obstacle(node: Node, pieces: list[Node], returned: list[Node]) -> str:
    if len(node.users) > 1 or returned.count(node) > 1:
        return "the concatenated tensor is also read by another node of the program"
    if any(piece.op != "call_function" for piece in pieces) or len(set(pieces)) < len(pieces):
        return "the concatenation contains an input, a constant, or the same tensor twice"
    return ""
