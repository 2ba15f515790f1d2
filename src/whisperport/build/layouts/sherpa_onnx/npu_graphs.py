"""The encoder with the keys and values of the cross-attention, and the decoder of one token, for an NPU.

All sizes are fixed. The decoder returns the newest row of each cache, which the app writes to its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.build.layouts.arrays import Floats
from whisperport.build.layouts.npu import DECODER, ENCODER, Inputs, Loop, write_signed
from whisperport.build.layouts.onnx_graph.file import run_session
from whisperport.build.layouts.onnx_graph.graph import Graph
from whisperport.build.layouts.onnx_graph.network import GELU_OPSET, KeysAndValues, Network
from whisperport.program.dims import Dims
from whisperport.program.masks import BOUNDED_MASK, MASKED
from whisperport.program.spec import ProgramSpec, TensorSpec

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

FLOAT = 1  # onnx.TensorProto.FLOAT
SWAPPED = [0, 2, 1]


@dataclass(frozen=True, slots=True)
class Form:
    """How the app calls and lays out the inputs.

    Attributes:
        prefix: of the name of the encoder's input, and of all names of the decoder, such as "tiny_".
        positions_last: whether a cache is (1, d, N), and a spectrogram (1, 2T, n_mels); else (1, N, d) and
            (1, n_mels, 2T).
        is_quantized: whether the graphs are for 8 bits: GELU is one operator, so that its parts need no
            range, and the mask is small, and read from a table: without a float, on chips that have none.
    """

    prefix: str = ""
    positions_last: bool = False
    is_quantized: bool = False

    def named(self, name: str) -> str:
        """Return the name of a tensor with the prefix."""
        return f"{self.prefix}{name}"

    def graph(self) -> Graph:
        """Return a graph without nodes."""
        return Graph(opset=GELU_OPSET) if self.is_quantized else Graph()


def write_encoder(checkpoint: "Checkpoint", form: Form, path: Path) -> None:
    """Write mel -> keys and values (1, T, d) of the cross-attention of each layer.

    The spectrogram is (1, n_mels, 2T), or (1, 2T, n_mels) where positions come last in caches.
    """
    graph, dims = form.graph(), checkpoint.dims
    network = Network(graph, checkpoint, "fp32")
    mel = form.named("mel")
    features = network.encoder(_rows_last(graph, mel, form), dynamic=False)
    for layer in range(dims.n_text_layer):
        for side, rows in zip("kv", network.cross_projections(features, layer), strict=True):
            graph.rename(rows, f"cross_{side}_{layer}")
    write_signed(path, graph, signatures(dims, form)[ENCODER])


def write_decoder(checkpoint: "Checkpoint", form: Form, path: Path) -> None:
    """Write the decoder of one token.

    Inputs: tokens (1, 1); of each layer the cached keys and values of N positions; of each layer those of
    the audio, of T; offset (1,), the token's position; mask (N,), 1 where the cache is empty. All integers
    have 32 bits. Outputs: logits (1, 1, V); of each layer the token's own key and value (1, 1, d).
    """
    graph, dims = form.graph(), checkpoint.dims
    network = Network(graph, checkpoint, "fp32")
    rows: list[KeysAndValues] = []

    def by_heads(names: Sequence[str]) -> KeysAndValues:
        keys, values = (network.heads(name, dims.n_text_head) for name in names)
        return keys, values

    def cached(kind: str, layer: int) -> list[str]:
        return [_rows_last(graph, form.named(f"{kind}_{side}_{layer}"), form) for side in "kv"]

    def self_kv(layer: int, *new: str) -> KeysAndValues:
        rows.append((new[0], new[1]))
        pairs = zip(cached("self", layer), new, strict=True)
        return by_heads([graph.op("Concat", *pair, axis=1) for pair in pairs])

    is_empty = form.named("mask")
    if form.is_quantized:
        hidden = graph.op("Gather", graph.constant([0, BOUNDED_MASK], np.float32), is_empty)
    else:
        hidden = graph.op("Cast", is_empty, to=FLOAT)
        hidden = graph.op("Mul", hidden, graph.constant(MASKED, np.float32))
    own = graph.constant([0], np.float32)  # a token sees itself
    row = graph.constant([1, 1, 1, dims.n_text_ctx + 1])
    mask = graph.op("Reshape", graph.op("Concat", hidden, own, axis=0), row)
    logits, _ = network.decoder(
        form.named("tokens"),
        form.named("offset"),
        mask,
        self_kv,
        lambda layer: by_heads(cached("cross", layer)),
    )
    graph.rename(logits, form.named("logits"))
    for layer, sides in enumerate(rows):
        for side, value in zip("kv", sides, strict=True):
            graph.rename(value, form.named(f"this_self_{side}_{layer}"))
    write_signed(path, graph, signatures(dims, form)[DECODER])


def signatures(dims: Dims, form: Form) -> dict[str, ProgramSpec]:
    """Return the inputs and outputs of both graphs, by the names of their files."""
    width, layers = dims.n_text_state, range(dims.n_text_layer)

    def rows(kind: str, *shape: int) -> list[TensorSpec]:
        return [TensorSpec(f"{kind}_{side}_{layer}", shape) for layer in layers for side in "kv"]

    def cached(kind: str, n: int) -> list[TensorSpec]:
        return rows(form.named(kind), 1, *((width, n) if form.positions_last else (n, width)))

    mel_shape = (dims.n_mels, dims.n_frames)
    mel = TensorSpec(form.named("mel"), (1, *mel_shape[:: -1 if form.positions_last else 1]))
    inputs = (
        TensorSpec(form.named("tokens"), (1, 1), "int32"),
        *cached("self", dims.n_text_ctx),
        *cached("cross", dims.n_audio_ctx),
        TensorSpec(form.named("offset"), (1,), "int32"),
        TensorSpec(form.named("mask"), (dims.n_text_ctx,), "int32"),
    )
    logits = TensorSpec(form.named("logits"), (1, 1, dims.n_vocab))
    new = rows(form.named("this_self"), 1, 1, width)
    return {
        ENCODER: ProgramSpec("encoder", (mel,), tuple(rows("cross", 1, dims.n_audio_ctx, width))),
        DECODER: ProgramSpec("decoder", inputs, (logits, *new)),
    }


def _rows_last(graph: Graph, x: str, form: Form) -> str:
    """Return x with the axes that `Network` has."""
    return graph.op("Transpose", x, perm=SWAPPED) if form.positions_last else x


class TokenDecoding:
    """The decoder after a run of the encoder, one token at a time; its cache is written as the app does."""

    def __init__(self, decoder: Any, audio: Sequence[Floats]) -> None:
        """Begin a text with a session of the decoder, and the keys and values (1, T, d) of each layer."""
        stated = decoder.get_inputs()
        self._session = decoder
        self._positions_last = tuple(stated[1 + len(audio)].shape) != audio[0].shape
        self._names, self._n_cached = [value.name for value in stated], stated[-1].shape[0]
        self.audio = audio
        self.kept = [np.zeros((1, self._n_cached, rows.shape[2]), np.float32) for rows in audio]
        self.offset = 0

    def inputs(self, token: int) -> Inputs:
        """Return the inputs of the next run."""
        mask = (np.arange(self._n_cached) >= self.offset).astype(np.int32)
        rows = (*self.kept, *self.audio)
        arrays = [x.transpose(SWAPPED) for x in rows] if self._positions_last else rows
        offset = np.array([self.offset], np.int32)
        values = (np.array([[token]], np.int32), *arrays, offset, mask)
        return dict(zip(self._names, values, strict=True))

    def logits(self, inputs: Inputs) -> Floats:
        """Run the decoder, and return the logits (1, V) after a token."""
        logits: Floats
        logits, *new = run_session(self._session, inputs)
        for rows, row in zip(self.kept, new, strict=True):
            rows[:, self.offset] = row[:, 0]
        self.offset += 1
        first: Floats = logits[0]
        return first

    def keys_and_values(self) -> dict[str, Floats]:
        """Return those of all tokens, and of the audio, under the names that `Layout.logits` has."""
        return {
            f"{i // 2}.{place}.{'value' if i % 2 else 'key'}": rows[0, :n].copy()
            for place, arrays, n in (
                ("decoder", self.kept, self.offset),
                ("encoder", self.audio, None),
            )
            for i, rows in enumerate(arrays)
        }


def _encoder_inputs(encoder: Any, mel: Floats) -> Inputs:
    """Return the inputs of the encoder; in some, positions are first."""
    (stated,) = encoder.get_inputs()
    rows = mel if stated.shape[1] == mel.shape[0] else mel.T
    return {stated.name: np.ascontiguousarray(rows[None])}


LOOP = Loop(_encoder_inputs, TokenDecoding)
