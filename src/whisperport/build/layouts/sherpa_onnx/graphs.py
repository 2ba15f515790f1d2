"""The encoder with the keys and values of the cross-attention, and the decoder with caches of a fixed size.

The names of inputs and outputs are free; their order is what counts.
Source: k2-fsa/sherpa-onnx@634265c, csrc/offline-whisper-model.cc, scripts/whisper/export-onnx.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.layouts.huggingface_files import alignment_heads
from whisperport.build.layouts.onnx_graph.file import Value, write_graph
from whisperport.build.layouts.onnx_graph.graph import Graph
from whisperport.build.layouts.onnx_graph.network import KeysAndValues, Network

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

CROSS = ("n_layer_cross_k", "n_layer_cross_v")
CACHES = ("in_n_layer_self_k_cache", "in_n_layer_self_v_cache")
NEW_CACHES = ("out_n_layer_self_k_cache", "out_n_layer_self_v_cache")
ATTENTION = "cross_attention_weights"


def write_encoder(
    checkpoint: "Checkpoint", precision: str, path: Path, metadata: Mapping[str, str]
) -> None:
    """Write mel (1, n_mels, 2T) -> keys and values of the cross-attention (L, 1, T, d), for any T."""
    graph, dims = Graph(), checkpoint.dims
    network = Network(graph, checkpoint, precision)
    features = network.encoder("mel", dynamic=True)
    layers = [network.cross_projections(features, i) for i in range(dims.n_text_layer)]
    for name, rows in zip(CROSS, zip(*layers, strict=True), strict=True):
        graph.op("Concat", *(_with_layer_axis(graph, row) for row in rows), axis=0, name=name)
    write_graph(
        path,
        graph,
        [("mel", np.float32, [1, dims.n_mels, "2T"])],
        [(name, np.float32, [dims.n_text_layer, 1, "T", dims.n_text_state]) for name in CROSS],
        metadata,
    )


def write_decoder(checkpoint: "Checkpoint", precision: str, path: Path) -> None:
    """Write the decoder: it reads the first `offset` rows of its caches, and writes the next ones.

    Inputs: tokens (1, n); self-attention keys and values (L, 1, N, d); those of the cross-attention
    (L, 1, T, d); offset (1,). Outputs: logits (1, n, V); the caches; the attention (1, A, n, T) of the
    checkpoint's A alignment heads, of which word timestamps are computed.
    """
    graph, dims = Graph(), checkpoint.dims
    network = Network(graph, checkpoint, precision)
    rows: list[KeysAndValues] = []  # new keys and values (1, n, d) of each layer

    def layer_of(caches: tuple[str, str], layer: int) -> KeysAndValues:
        keys, values = (graph.op("Gather", x, graph.constant(layer), axis=0) for x in caches)
        return keys, values

    def by_heads(k: str, v: str) -> KeysAndValues:
        return network.heads(k, dims.n_text_head), network.heads(v, dims.n_text_head)

    def self_kv(layer: int, k: str, v: str) -> KeysAndValues:
        rows.append((k, v))
        cached = (
            graph.op("Slice", x, graph.constant([0]), "offset", graph.constant([1]))
            for x in layer_of(CACHES, layer)
        )
        keys, values = (
            graph.op("Concat", *pair, axis=1) for pair in zip(cached, (k, v), strict=True)
        )
        return by_heads(keys, values)

    places = network.positions_and_mask("tokens", "offset")
    logits, attention = network.decoder(
        "tokens", *places, self_kv, lambda layer: by_heads(*layer_of(CROSS, layer))
    )
    graph.op("Identity", logits, name="logits")
    end = graph.op("Add", "offset", graph.sizes("tokens", 1, 2))
    for old, new, new_rows in zip(CACHES, NEW_CACHES, zip(*rows, strict=True), strict=True):
        before = graph.op("Slice", old, graph.constant([0]), "offset", graph.constant([2]))
        between = graph.op("Concat", *(_with_layer_axis(graph, x) for x in new_rows), axis=0)
        last = graph.constant([dims.n_text_ctx])
        after = graph.op("Slice", old, end, last, graph.constant([2]))
        graph.op("Concat", before, between, after, axis=2, name=new)
    cache = [dims.n_text_layer, 1, dims.n_text_ctx, dims.n_text_state]
    heads = alignment_heads(checkpoint)
    chosen = (
        graph.op("Gather", attention[layer], graph.constant([head]), axis=1)
        for layer, head in heads
    )
    graph.op("Concat", *chosen, axis=1, name=ATTENTION)
    outputs: list[Value] = [
        ("logits", np.float32, [1, "n", dims.n_vocab]),
        *((name, np.float32, cache) for name in NEW_CACHES),
        (ATTENTION, np.float32, [1, len(heads), "n", "T"]),
    ]
    cross = [dims.n_text_layer, 1, "T", dims.n_text_state]
    inputs: list[Value] = [
        ("tokens", np.int64, [1, "n"]),
        *((name, np.float32, cache) for name in CACHES),
        *((name, np.float32, cross) for name in CROSS),
        ("offset", np.int64, [1]),
    ]
    write_graph(path, graph, inputs, outputs)


def _with_layer_axis(graph: Graph, x: str) -> str:
    return graph.op("Unsqueeze", x, graph.constant([0]))
