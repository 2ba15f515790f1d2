"""Find the nodes that ExecuTorch's partitioner does not delegate to XNNPACK."""

import contextlib
import io
import logging
import warnings
from typing import Any


def undelegated(exported: Any) -> set[str]:
    """Return the names of the nodes of `exported` with an undelegated part, after a real lowering.

    `from_node` of a lowered node lists the nodes that it was made from, back to the first export. If
    `exported` was decomposed after that, the last listed node that is in its graph counts.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    graph = id(exported.graph)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        logging.disable(logging.NOTSET)
    return {
        name
        for node in edge.exported_program().graph.nodes
        if node.op == "call_function"
        and "getitem" not in str(node.target)
        and "executorch_call_delegate" not in str(node.target)
        for name in _origins(node, graph) or {f"{node.name}, of unknown origin"}
    }


def _origins(node: Any, graph: int) -> set[str]:
    found: set[str] = set()
    sources = list(node.meta.get("from_node", []))
    while sources:
        source = sources.pop()
        if source.graph_id == graph or not source.from_node:
            found.add(source.name)
        else:
            sources += source.from_node
    return found
