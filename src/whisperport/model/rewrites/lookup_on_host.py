"""Make the embeddings an input: the host looks the tokens up and adds the positions.

    before   tokens(1,S) ─ embedding(w(V,d)) ─ + positions(S,d) ─ x(1,S,d) ────────────────► x(1,S,d)
    after    embeddings(1,d,S,1) ─ reshape ─ (1,d,S) ─ permute ────────────────────────────► x(1,S,d)

If the graph already contains the embeddings in the shape (1,d,S,1), as published graphs do, that tensor
becomes the input, and no reshape is added.
Why: some compilers support neither lookups nor integer inputs. They compile the part after this reshape.
Exact: the embeddings and the sum do not change.
Source: a vendor's published toolkit, which the targets name: its patch of the decoder, and
`start_node_names` in its conversion script.
"""

import torch
from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import aten, calls, shape, stored, value
from whisperport.model.rewrites.host import HostRewriteResult, host_rewrite
from whisperport.program.host_part import HostPart, Lookup
from whisperport.program.spec import ProgramSpec, Rejection, TensorSpec

SAME_IDS = (  # operators that change the dtype or shape of token ids, but not the ids
    *(aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.alias.default),
    *(aten.view.default, aten.reshape.default, aten.contiguous.default),
)
LAYOUT = (aten.unsqueeze.default, aten.transpose.int, aten.permute.default)


@host_rewrite("lookup-on-host")
def lookup_on_host(module: GraphModule, spec: ProgramSpec) -> HostRewriteResult:
    """Move each lookup whose token ids are an input that no other node reads."""
    for check in calls(module, aten._assert_tensor_metadata.default):
        module.graph.erase_node(check)  # they use inputs, and the next export adds them again
    lookups: list[Lookup] = []
    changed: list[str] = []
    rejected: list[Rejection] = []
    for node in calls(module, aten.embedding.default):
        if stored(module, node.args[1]) is not None:
            continue
        tokens = _tokens(node)
        if tokens is None:
            rejected.append(
                Rejection(
                    node.name, "the indices are not an input, or another node reads this input too"
                )
            )
        elif reason := _obstacle(module, node):
            rejected.append(Rejection(node.name, reason))
        else:
            lookups.append(_move(module, node, tokens, spec))
            changed.append(node.name)
    outputs = tuple(tensor.name for tensor in spec.outputs)
    return HostRewriteResult(HostPart(tuple(lookups)), outputs, tuple(changed), tuple(rejected))


def _tokens(embedding: Node) -> Node | None:
    """Return the input with the ids of a lookup; None if they are computed, or read by another node."""
    node = embedding.args[1]
    assert isinstance(node, Node)
    while node.target in SAME_IDS and len(node.users) == 1 and isinstance(node.args[0], Node):
        node = node.args[0]
    return node if node.op == "placeholder" and len(node.users) == 1 else None


def _obstacle(module: GraphModule, embedding: Node) -> str:
    table = stored(module, embedding.args[0])
    if table is None or table.dtype != torch.float32:
        return "the table is computed, or not float32; only a stored float32 table is supported"
    if len(shape(embedding)) != 3 or shape(embedding)[0] != 1:
        return (
            f"the embeddings have the shape {tuple(shape(embedding))}; only (1, S, d) is supported"
        )
    return ""


def _move(module: GraphModule, embedding: Node, tokens: Node, spec: ProgramSpec) -> Lookup:
    table = stored(module, embedding.args[0])
    assert table is not None
    rows, positions = _with_positions(module, embedding)
    _, count, width = shape(embedding)
    cut = _cut(rows, [1, width, count, 1])
    # By position: torch renames an input that has the name of a function of Python, such as `input`.
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    original = spec.inputs[inputs.index(tokens)]
    name = _free_name(module, spec, original.name)
    with module.graph.inserting_before(tokens):
        embeddings = module.graph.placeholder(name)
    embeddings.meta["val"] = value(embedding).new_empty((1, width, count, 1))
    if cut is not None:
        cut.replace_all_uses_with(embeddings)
    else:
        call = module.graph.call_function
        with module.graph.inserting_before(rows):
            flat = call(aten.reshape.default, (embeddings, [1, width, count]))
            again = call(aten.permute.default, (flat, [0, 2, 1]))
        rows.replace_all_uses_with(again)
    module.graph.eliminate_dead_code()
    module.graph.erase_node(tokens)
    return Lookup(
        tokens=original,
        embeddings=TensorSpec(name, (1, width, count, 1)),
        table=table.detach().numpy().copy(),
        positions=None if positions is None else positions.numpy().copy(),
    )


def _with_positions(module: GraphModule, embedding: Node) -> tuple[Node, torch.Tensor | None]:
    """Return the node that adds stored positions, and these positions (S, d).

    If no stored positions are added, return the embedding itself and None.
    """
    users = list(embedding.users)
    _, count, width = shape(embedding)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return embedding, None
    addends = [source for source in users[0].args[:2] if source is not embedding]
    added = stored(module, addends[0]) if len(addends) == 1 else None
    if added is None or added.dtype != torch.float32 or shape(users[0]) != shape(embedding):
        return embedding, None
    return users[0], added.detach().expand(1, count, width)[0]


def _cut(rows: Node, sizes: list[int]) -> Node | None:
    """Return the node after `rows` that has them in the shape (1, d, S, 1); None if there is none."""
    node, indices = rows, torch.arange(rows.meta["val"].numel()).reshape(shape(rows))
    channels_first = indices.transpose(1, 2).unsqueeze(-1)
    while len(node.users) == 1 and (user := next(iter(node.users))).target in LAYOUT:
        function = user.target
        assert callable(function)
        indices, node = function(indices, *user.args[1:]), user
        if shape(node) == sizes and torch.equal(indices, channels_first):
            return node
    return None


def _free_name(module: GraphModule, spec: ProgramSpec, tokens: str) -> str:
    names = {node.name for node in module.graph.nodes}
    names.update(tensor.name for tensor in (*spec.inputs, *spec.outputs))
    return "embeddings" if "embeddings" not in names else f"{tokens}_embeddings"
