"""Pass the decoder's embedded tokens through an image's shape: a point where the graph can be cut.

    before   tokens ─ embedding(w(V,d)) ─ + positions(P,d) ─ x(1,P,d) ───────────────────────► x(1,P,d)
    after    … x(1,P,d) ─ unsqueeze ─ transpose ─ (1,d,P,1) ─ reshape ─ (1,d,P) ─ permute ───► x(1,P,d)

Why: a compiler that supports no lookup is told to begin at this reshape; the host looks the tokens up and
adds the positions.
Exact: nothing is computed.
"""

from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import aten, calls, shape, stored
from whisperport.spec import Refusal


@rewrite("reshape-decoder-embedding", exact=True)
def reshape_decoder_embedding(module: GraphModule) -> tuple[list[str], list[Refusal]]:
    """Put the shapes after each lookup of tokens; decline one that no positions are added to."""
    changed: list[str] = []
    refused: list[Refusal] = []
    for node in calls(module, aten.embedding.default):
        if stored(module, node.args[1]) is not None:
            continue
        rows = _with_positions(node)
        if rows is None:
            reason = "its rows are not added to positions; there is no one place to cut"
            refused.append(Refusal(node.name, reason))
        elif len(shape(rows)) != 3:
            reason = f"its rows have rank {len(shape(rows))}; only (batch, rows, width) is handled"
            refused.append(Refusal(node.name, reason))
        elif not _is_cut(rows):
            _reshape(module, rows)
            changed.append(rows.name)
    return changed, refused


def _with_positions(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is aten.add.Tensor else None


def _is_cut(rows: Node) -> bool:
    return len(rows.users) == 1 and next(iter(rows.users)).target is aten.unsqueeze.default


def _reshape(module: GraphModule, rows: Node) -> None:
    batch, count, width = shape(rows)
    users = list(rows.users)
    call = module.graph.call_function
    with module.graph.inserting_after(rows):
        image = call(aten.unsqueeze.default, (rows, 1))
    with module.graph.inserting_after(image):
        image = call(aten.transpose.int, (image, 1, -1))
    with module.graph.inserting_after(image):
        flat = call(aten.reshape.default, (image, [batch, width, count]))
    with module.graph.inserting_after(flat):
        again = call(aten.permute.default, (flat, [0, 2, 1]))
    for user in users:
        user.replace_input_with(rows, again)
