"""Records of where a node comes from are shared by copies, and only inside the block."""

import copy

import torch
from torch.fx import symbolic_trace
from torch.fx.traceback import NodeSource

from whisperport.model.trace.node_history import shared_node_history


def record() -> NodeSource:
    graph = symbolic_trace(torch.nn.ReLU()).graph
    return NodeSource(next(iter(graph.nodes)), "a pass")


def test_copies_share_a_record_inside_the_block_and_not_after_it() -> None:
    first = record()

    with shared_node_history():
        with shared_node_history():
            inner = copy.deepcopy(first)
        outer = copy.deepcopy(first)
    after = copy.deepcopy(first)

    assert inner is first
    assert outer is first
    assert after is not first
    assert after == first
