"""The encoder, and the decoder whose one file serves the first tokens and all others: the "merged" decoder.

Source of names and orders: huggingface/optimum-onnx@1939f27; huggingface/transformers.js@5ed4c5c.
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

BATCH, NEW, PAST, AUDIO = (
    "batch_size",
    "decoder_sequence_length",
    "past_decoder_sequence_length",
    "encoder_sequence_length",
)
SIDES, PARTS = ("decoder", "encoder"), ("key", "value")
NOTHING = "no_cross_attention_cache"


def write_encoder(checkpoint: "Checkpoint", precision: str, path: Path) -> None:
    """Write input_features (B, n_mels, 2T) -> last_hidden_state (B, T, d)."""
    graph, dims = Graph(), checkpoint.dims
    features = Network(graph, checkpoint, precision).encoder("input_features", dynamic=False)
    graph.op("Identity", features, name="last_hidden_state")
    write_graph(
        path,
        graph,
        *encoder_values(dims),
    )


def encoder_values(dims: Dims) -> tuple[list[Value], list[Value]]:
    """Return the inputs and the outputs of an encoder."""
    return (
        [("input_features", np.float32, [BATCH, dims.n_mels, dims.n_frames])],
        [("last_hidden_state", np.float32, [BATCH, dims.n_audio_ctx, dims.n_audio_state])],
    )


def write_merged_decoder(checkpoint: "Checkpoint", precision: str, path: Path) -> None:
    """Write an `If` over use_cache_branch: the tokens after those of a cache, or the first tokens.

    Inputs: input_ids (B, n); encoder_hidden_states (B, T, d); of each layer, past_key_values of the decoder
    (B, H, S, D) and of the encoder (B, H, T, D), which the branch of the first tokens does not read;
    use_cache_branch (1,).

    Outputs: logits (B, n, V); present, as the past; of each layer, cross_attentions (B, H, n, T), of which
    word timestamps are computed. The branch with a cache returns encoder caches of batch 0: the caller
    keeps what the first call returned.
    """
    from onnx import helper

    graph, dims = Graph(), checkpoint.dims
    nothing = (0, dims.n_text_head, 1, dims.text_head_width)
    graph.stored(NOTHING, nothing, np.float32, lambda: np.zeros(nothing, np.float32))
    branches = {
        "then_branch": _branch(graph, checkpoint, precision, is_cached=True),
        "else_branch": _branch(graph, checkpoint, precision, is_cached=False),
    }
    inputs, outputs = decoder_values(dims)
    names = [name for name, *_ in outputs]
    graph.nodes.append(helper.make_node("If", ["use_cache_branch"], names, **branches))
    write_graph(path, graph, inputs, outputs)


def decoder_values(dims: Dims) -> tuple[list[Value], list[Value]]:
    """Return the inputs and the outputs of a merged decoder."""
    return _inputs(dims), _outputs(dims)


def _branch(outer: Graph, checkpoint: "Checkpoint", precision: str, *, is_cached: bool) -> Any:
    """Return a branch of the `If`. Its weights are in the outer graph."""
    from onnx import TensorProto, helper

    dims, name = checkpoint.dims, "with_cache" if is_cached else "first_tokens"
    graph = Graph(f"{name}/", outer)
    network = Network(graph, checkpoint, precision)
    present: dict[tuple[int, str], KeysAndValues] = {}

    def past(layer: int, side: str) -> KeysAndValues:
        key, value = (f"past_key_values.{layer}.{side}.{part}" for part in PARTS)
        return key, value

    def self_kv(layer: int, k: str, v: str) -> KeysAndValues:
        pair = network.heads(k, dims.n_text_head), network.heads(v, dims.n_text_head)
        if is_cached:
            keys, values = zip(past(layer, "decoder"), pair, strict=True)
            pair = graph.op("Concat", *keys, axis=2), graph.op("Concat", *values, axis=2)
        present[layer, "decoder"] = pair
        return pair

    def cross_kv(layer: int) -> KeysAndValues:
        if is_cached:
            present[layer, "encoder"] = graph.op("Identity", NOTHING), graph.op("Identity", NOTHING)
            return past(layer, "encoder")
        k, v = network.cross_projections("encoder_hidden_states", layer)
        pair = network.heads(k, dims.n_text_head), network.heads(v, dims.n_text_head)
        present[layer, "encoder"] = pair
        return pair

    past_length = (
        graph.sizes("past_key_values.0.decoder.key", 2, 3) if is_cached else graph.constant([0])
    )
    places = network.positions_and_mask("input_ids", past_length)
    logits, attention = network.decoder("input_ids", *places, self_kv, cross_kv)
    caches = [x for i in range(dims.n_text_layer) for side in SIDES for x in present[i, side]]
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    values = [helper.make_value_info(x, kind) for x in (logits, *caches, *attention)]
    return helper.make_graph(graph.nodes, name, [], values)


def _inputs(dims: Dims) -> list[Value]:
    # A number instead of the symbol PAST would be the size of the first cache in transformers.js.
    sizes = {"decoder": PAST, "encoder": f"{AUDIO}_out"}
    pasts = [
        (f"past_key_values.{i}.{side}.{part}", np.float32, _cache(dims, BATCH, sizes[side]))
        for i in range(dims.n_text_layer)
        for side in SIDES
        for part in PARTS
    ]
    return [
        ("input_ids", np.int64, [BATCH, NEW]),
        ("encoder_hidden_states", np.float32, [BATCH, AUDIO, dims.n_text_state]),
        *pasts,
        ("use_cache_branch", np.bool_, [1]),
    ]


def _outputs(dims: Dims) -> list[Value]:
    sizes = {"decoder": f"{PAST} + 1", "encoder": f"{AUDIO}_out"}
    presents = [
        (f"present.{i}.{side}.{part}", np.float32, _cache(dims, f"{BATCH}_out", sizes[side]))
        for i in range(dims.n_text_layer)
        for side in SIDES
        for part in PARTS
    ]
    attention = [
        (f"cross_attentions.{i}", np.float32, [BATCH, dims.n_text_head, NEW, AUDIO])
        for i in range(dims.n_text_layer)
    ]
    return [("logits", np.float32, [BATCH, NEW, dims.n_vocab]), *presents, *attention]


def _cache(dims: Dims, batch: str, size: str) -> list[Any]:
    return [batch, dims.n_text_head, size, dims.text_head_width]
