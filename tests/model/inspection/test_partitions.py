"""The predicted subgraphs of a program, and the bytes that cross their borders."""

import pytest

from whisperport.model.inspection.check import check_graph
from whisperport.model.inspection.graph import Format
from whisperport.model.inspection.partitions import partitions_of
from whisperport.program.profiling import Subgraph, border_bytes
from whisperport.program.spec import Limit, Support, TargetSpec

from .graphs import graph, node, value, weight

X, A, B, C, D = (value(name, 4, 8) for name in "xabcd")
SIZE = 4 * 8 * 4  # bytes of each
# d needs a, and c, which needs b: with b on the host, a and d are not in one subgraph, but c and d are.
NODES = (
    node("relu", [X], A),
    node("cumsum", [A], B),
    node("add", [B, X], C),
    node("linear", [C, weight("w", 8, 8), A], D),
)


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_a_node_on_the_host_splits_the_program(format: Format) -> None:
    found = partitions_of(graph(*NODES, format=format), {NODES[1].name: (False,)})

    assert found.subgraphs == (Subgraph(1, SIZE, SIZE), Subgraph(2, 3 * SIZE, SIZE))
    assert found.splitting == (NODES[1].name,)


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_a_program_without_rejected_nodes_is_one_subgraph(format: Format) -> None:
    found = partitions_of(graph(*NODES, format=format), {})

    assert found.subgraphs == (Subgraph(4, SIZE, SIZE),)
    assert found.splitting == ()
    assert border_bytes(found.subgraphs) == 2 * SIZE


def test_parts_of_a_decomposed_node_are_delegated_alone_or_with_its_neighbours() -> None:
    parts = {NODES[1].name: (False, True, False, True)}

    found = partitions_of(graph(*NODES), parts)

    assert [one.nodes for one in found.subgraphs] == [1, 1, 3]


def test_a_node_beside_the_path_joins_the_last_subgraph_that_needs_it() -> None:
    """Backward, `a` is taken by the subgraph of its reader; forward, it runs as soon as it can."""
    nodes = (node("relu", [X], B), node("cumsum", [X], A), node("add", [A, B], C))
    parts = {nodes[1].name: (False,)}

    assert [one.nodes for one in partitions_of(graph(*nodes), parts).subgraphs] == [2]
    assert [s.nodes for s in partitions_of(graph(*nodes, format="onnx"), parts).subgraphs] == [1, 1]


def test_forward_begins_as_the_first_node_is() -> None:
    nodes = (node("cumsum", [X], A), node("relu", [X], B), node("add", [A, B], C))

    found = partitions_of(graph(*nodes, format="onnx"), {nodes[0].name: (False,)})

    assert [one.nodes for one in found.subgraphs] == [2]


def test_a_program_whose_nodes_are_all_rejected_has_no_subgraph() -> None:
    assert partitions_of(graph(*NODES), {one.name: (False,) for one in NODES}).subgraphs == ()


def test_check_predicts_the_subgraphs_of_what_it_rejects() -> None:
    limit = Limit(rule="WP101", value=frozenset({"relu", "add", "linear"}), source="a test")
    spec = TargetSpec(
        name="test",
        summary="",
        supports=Support(limits=(limit,)),
    )

    found = check_graph(graph(*NODES), spec).to_json()["predicted_partitions"]

    assert [one["nodes"] for one in found["subgraphs"]] == [1, 2]
    assert found["splitting_nodes"] == [NODES[1].name]
    assert found["border_bytes"] == 6 * SIZE


def test_the_size_of_a_dynamic_border_is_unknown() -> None:
    dynamic = value("x", 4, "rows")

    found = partitions_of(graph(node("relu", [dynamic], A)), {})

    assert found.subgraphs == (Subgraph(1, None, SIZE),)
    assert border_bytes(found.subgraphs) is None
