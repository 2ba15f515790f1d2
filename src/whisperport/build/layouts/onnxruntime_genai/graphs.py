"""The encoder, which computes the keys and values of the cross-attention too, and the decoder.

Source of names: microsoft/onnxruntime-genai@a0c04eb, src/models/whisper.cpp and kv_cache.cpp. There is a
cache for each layer of the decoder; its own converter counts the encoder's layers instead.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.build.layouts.onnx_graph.file import Value, write_graph
from whisperport.build.layouts.onnx_graph.graph import Graph
from whisperport.build.layouts.onnx_graph.network import KeysAndValues, Network
from whisperport.program.dims import Dims

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

PARTS = ("key", "value")
BATCH = "batch_size"
INT64 = 7  # onnx.TensorProto.INT64


def write_encoder(checkpoint: "Checkpoint", precision: str, path: Path) -> None:
    """Write audio_features (B, n_mels, 2T) -> hidden_states (B, T, d), and present_*_cross (B, H, T, D)."""
    graph, dims = Graph(), checkpoint.dims
    network = Network(graph, checkpoint, precision)
    features = network.encoder("audio_features", dynamic=False)
    graph.op("Identity", features, name="hidden_states")
    for layer in range(dims.n_text_layer):
        rows = network.cross_projections(features, layer)
        for part, row in zip(PARTS, rows, strict=True):
            name = f"present_{part}_cross_{layer}"
            graph.op("Identity", network.heads(row, dims.n_text_head), name=name)
    write_graph(
        path,
        graph,
        [("audio_features", np.float32, [BATCH, dims.n_mels, dims.n_frames])],
        [
            ("hidden_states", np.float32, [BATCH, dims.n_audio_ctx, dims.n_audio_state]),
            *_caches(dims, "present", "cross", dims.n_audio_ctx),
        ],
    )


def write_decoder(checkpoint: "Checkpoint", precision: str, path: Path) -> None:
    """Write input_ids (B, n) and the caches -> logits (B, n, V), and the longer caches (B, H, S, D)."""
    graph, dims = Graph(), checkpoint.dims
    network = Network(graph, checkpoint, precision)

    def past(side: str, layer: int) -> KeysAndValues:
        key, value = (f"past_{part}_{side}_{layer}" for part in PARTS)
        return key, value

    def self_kv(layer: int, k: str, v: str) -> KeysAndValues:
        key, value = (
            graph.op(
                "Concat",
                cached,
                network.heads(row, dims.n_text_head),
                axis=2,
                name=f"present_{part}_self_{layer}",
            )
            for part, cached, row in zip(PARTS, past("self", layer), (k, v), strict=True)
        )
        return key, value

    ids = graph.op("Cast", "input_ids", to=INT64)
    n_cached = graph.sizes("past_key_self_0", 2, 3)
    places = network.positions_and_mask(ids, n_cached)
    logits, _ = network.decoder(ids, *places, self_kv, lambda layer: past("cross", layer))
    graph.op("Identity", logits, name="logits")
    write_graph(
        path,
        graph,
        [
            ("input_ids", np.int32, [BATCH, "sequence_length"]),
            *_caches(dims, "past", "self", "past_sequence_length"),
            *_caches(dims, "past", "cross", dims.n_audio_ctx),
        ],
        [
            ("logits", np.float32, [BATCH, "sequence_length", dims.n_vocab]),
            *_caches(dims, "present", "self", "total_sequence_length"),
        ],
    )


def _caches(dims: Dims, when: str, side: str, length: Any) -> list[Value]:
    shape = [BATCH, dims.n_text_head, length, dims.text_head_width]
    return [
        (f"{when}_{part}_{side}_{layer}", np.float32, shape)
        for layer in range(dims.n_text_layer)
        for part in PARTS
    ]
