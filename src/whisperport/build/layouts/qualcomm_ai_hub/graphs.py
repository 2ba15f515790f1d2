"""The graphs of Qualcomm AI Hub's Whisper: keys and values of the audio, and a cache of 199 positions.

The cache is shifted: it returns without its oldest position, and with the newest one at the end. H heads of
width D; T positions of the audio; N = 199 positions of the cache; V tokens.

Source: qai-hub-models 0.65.0, models/templates/hf_whisper/model.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.build.layouts.arrays import Floats
from whisperport.build.layouts.npu import DECODER, ENCODER, Inputs, Loop, write_signed
from whisperport.build.layouts.onnx_graph.file import run_session
from whisperport.build.layouts.onnx_graph.graph import Graph
from whisperport.build.layouts.onnx_graph.network import GELU_OPSET, KeysAndValues, Network
from whisperport.program.dims import Dims
from whisperport.program.spec import ProgramSpec, TensorSpec

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

POSITIONS = 200  # of a text
HIDDEN = -100.0  # what the app adds to the scores of positions that are empty
# Between (1, H, n, D) and what the app has: keys (H, 1, D, n), values (H, 1, n, D).
KEYS, VALUES = [1, 0, 3, 2], [1, 0, 2, 3]
AXES = {"k": 3, "v": 2}  # of positions, in what the app has


def write_encoder(checkpoint: "Checkpoint", path: Path) -> None:
    """Write input_features (1, n_mels, 2T) -> keys (H, 1, D, T) and values (H, 1, T, D) of each layer."""
    graph, dims = Graph(opset=GELU_OPSET), checkpoint.dims
    network = Network(graph, checkpoint, "fp32")
    features = network.encoder("input_features", dynamic=False)
    for layer in range(dims.n_text_layer):
        for kind, rows in zip("kv", network.cross_projections(features, layer), strict=True):
            swapped = _swapped(graph, network.heads(rows, dims.n_text_head), kind)
            graph.rename(swapped, f"{kind}_cache_cross_{layer}")
    write_signed(path, graph, signatures(dims)[ENCODER])


def write_decoder(checkpoint: "Checkpoint", path: Path) -> None:
    """Write the decoder of one token.

    Inputs: input_ids (1, 1) int32; attention_mask (1, 1, 1, N + 1), 0, or -100 where the cache is empty; of
    each layer the cached keys and values, and of each those of the audio; position_ids (1,) int32.
    Outputs: logits (1, V, 1, 1), and the caches with the new position.
    """
    graph, dims = Graph(opset=GELU_OPSET), checkpoint.dims
    network = Network(graph, checkpoint, "fp32")

    def self_kv(layer: int, *new: str) -> KeysAndValues:
        all_rows = []
        for kind, rows in zip("kv", new, strict=True):
            axis, past = AXES[kind], f"{kind}_cache_self_{layer}_in"
            own = network.heads(rows, dims.n_text_head)
            bounds = (graph.constant([at]) for at in (1, POSITIONS, axis))
            # Of the past, and not of all rows: the provider's optimizer mixes up the types of two readers.
            kept = graph.op(
                "Concat", graph.op("Slice", past, *bounds), _swapped(graph, own, kind), axis=axis
            )
            graph.rename(kept, f"{kind}_cache_self_{layer}_out")
            all_rows.append(graph.op("Concat", _swapped(graph, past, kind), own, axis=2))
        return all_rows[0], all_rows[1]

    def cross_kv(layer: int) -> KeysAndValues:
        keys, values = (_swapped(graph, f"{kind}_cache_cross_{layer}", kind) for kind in "kv")
        return keys, values

    logits, _ = network.decoder("input_ids", "position_ids", "attention_mask", self_kv, cross_kv)
    shaped = graph.op("Reshape", logits, graph.constant([1, -1, 1, 1]))
    graph.rename(shaped, "logits")
    write_signed(path, graph, signatures(dims)[DECODER])


def signatures(dims: Dims) -> dict[str, ProgramSpec]:
    """Return the inputs and outputs of both graphs, by the names of their files."""
    heads, width = dims.n_text_head, dims.n_text_state // dims.n_text_head

    def caches(name: str, n: int) -> tuple[TensorSpec, ...]:
        shapes = {"k": (heads, 1, width, n), "v": (heads, 1, n, width)}
        return tuple(
            TensorSpec(name.format(kind, layer), shape)
            for layer in range(dims.n_text_layer)
            for kind, shape in shapes.items()
        )

    mel = TensorSpec("input_features", (1, dims.n_mels, dims.n_frames))
    audio, past = caches("{}_cache_cross_{}", dims.n_audio_ctx), POSITIONS - 1
    inputs = (
        TensorSpec("input_ids", (1, 1), "int32"),
        TensorSpec("attention_mask", (1, 1, 1, POSITIONS)),
        *caches("{}_cache_self_{}_in", past),
        *audio,
        TensorSpec("position_ids", (1,), "int32"),
    )
    logits = TensorSpec("logits", (1, dims.n_vocab, 1, 1))
    outputs = (logits, *caches("{}_cache_self_{}_out", past))
    return {
        ENCODER: ProgramSpec("encoder", (mel,), audio),
        DECODER: ProgramSpec("decoder", inputs, outputs),
    }


def _swapped(graph: Graph, x: str, kind: str) -> str:
    """Return keys or values in the app's layout, or back from it: the exchange is its own inverse."""
    return graph.op("Transpose", x, perm=KEYS if kind == "k" else VALUES)


class ShiftedDecoding:
    """The decoder after a run of the encoder, one token at a time, as the app calls it."""

    def __init__(self, decoder: Any, audio: Sequence[Floats]) -> None:
        """Begin a text with a session of the decoder, and what the encoder returned."""
        self._session = decoder
        stated = decoder.get_inputs()
        self._names = [value.name for value in stated]
        self._audio, self.offset = audio, 0
        self.kept = [np.zeros(value.shape, np.float32) for value in stated[2 : 2 + len(audio)]]

    def inputs(self, token: int) -> Inputs:
        """Return the inputs of the next run."""
        mask = np.full((1, 1, 1, POSITIONS), HIDDEN, np.float32)
        mask[..., -1 - self.offset :] = 0
        position = np.array([self.offset], np.int32)
        values = (np.array([[token]], np.int32), mask, *self.kept, *self._audio, position)
        return dict(zip(self._names, values, strict=True))

    def logits(self, inputs: Inputs) -> Floats:
        """Run the decoder, and return the logits (1, V) after a token."""
        logits, *self.kept = run_session(self._session, inputs)
        self.offset += 1
        row: Floats = logits.reshape(1, -1)
        return row

    def keys_and_values(self) -> dict[str, Floats]:
        """Return those of all tokens, and of the audio, under the names that `Layout.logits` has."""
        found = {}
        for place, arrays in (("decoder", self.kept), ("encoder", self._audio)):
            for i, rows in enumerate(arrays):
                by_heads = rows.transpose(VALUES if i % 2 else KEYS)[0]
                n = self.offset if place == "decoder" else by_heads.shape[1]
                found[f"{i // 2}.{place}.{'value' if i % 2 else 'key'}"] = by_heads[:, -n:].copy()
        return found


def _inputs(_encoder: Any, mel: Floats) -> Inputs:
    return {"input_features": np.ascontiguousarray(mel[None])}


LOOP = Loop(_inputs, ShiftedDecoding)
