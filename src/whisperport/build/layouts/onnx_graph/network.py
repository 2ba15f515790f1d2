"""Whisper's encoder and decoder as ONNX nodes of dynamic lengths.

Axes, as in ARCHITECTURE.md: B texts, T encoder positions, d width, H heads, D width of a head, V
vocabulary; here n counts the new tokens, and S the cached and the new ones.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.layouts.onnx_graph.graph import Graph
from whisperport.build.layouts.onnx_graph.weights import Weights

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

LOWEST = np.finfo(np.float32).min
GELU_OPSET = 20  # in which GELU is one operator
EPSILON = 1e-5  # of layer norms; torch's default, which openai-whisper uses
TABLE = "decoder.token_embedding.weight"

KeysAndValues = tuple[str, str]


class Network:
    """Writes the nodes of a checkpoint's encoder and decoder to a graph."""

    def __init__(self, graph: Graph, checkpoint: "Checkpoint", precision: str) -> None:
        """Write to a graph, with weights in fp32, fp16 or w8."""
        self.graph = graph
        self.dims = checkpoint.dims
        self.weights = Weights(graph, checkpoint, precision)

    def encoder(self, mel: str, *, dynamic: bool) -> str:
        """Write the encoder; return the features (B, T, d) of mel (B, n_mels, 2T).

        Args:
            mel: name of the input.
            dynamic: whether T may be smaller than the model's.
        """
        g = self.graph
        x = self._gelu(self._convolution(mel, "encoder.conv1", strides=[1]))
        x = self._gelu(self._convolution(x, "encoder.conv2", strides=[2]))
        x = g.op("Transpose", x, perm=[0, 2, 1])
        positions = self.weights.tensor("encoder.positional_embedding")
        if dynamic:
            positions = g.op("Slice", positions, g.constant([0]), g.sizes(x, 1, 2))
        x = g.op("Add", x, positions)
        for layer in range(self.dims.n_audio_layer):
            block = f"encoder.blocks.{layer}"
            y = self._norm(x, f"{block}.attn_ln")
            q, k, v = (
                self.heads(self.linear(y, f"{block}.attn.{part}"), self.dims.n_audio_head)
                for part in ("query", "key", "value")
            )
            rows, _ = self._attention(q, k, v, self.dims.n_audio_head)
            x = g.op("Add", x, self.linear(rows, f"{block}.attn.out"))
            x = g.op("Add", x, self._feed_forward(x, block))
        return self._norm(x, "encoder.ln_post")

    def decoder(
        self,
        ids: str,
        positions: str,
        mask: str,
        self_kv: Callable[[int, str, str], KeysAndValues],
        cross_kv: Callable[[int], KeysAndValues],
    ) -> tuple[str, list[str]]:
        """Write the decoder; return the logits (B, n, V), and each layer's cross-attention (B, H, n, T).

        Args:
            ids: name of the tokens (B, n), integers.
            positions: name of their positions (n,), integers.
            mask: name of what is added to the scores of the self-attention: 0, or very low for a token that
                is not seen; its last axes are (n, S).
            self_kv: takes a layer and its new keys and values (B, n, d); returns all (B, H, S, D).
            cross_kv: takes a layer; returns its keys and values of the audio (B, H, T, D).
        """
        g, heads = self.graph, self.dims.n_text_head
        table = self.weights.tensor("decoder.positional_embedding")
        x = g.op("Add", self.weights.embedded(ids, TABLE), g.op("Gather", table, positions))
        weights = []
        for layer in range(self.dims.n_text_layer):
            block = f"decoder.blocks.{layer}"
            y = self._norm(x, f"{block}.attn_ln")
            q, k, v = (
                self.linear(y, f"{block}.attn.{part}", few_rows=True)
                for part in ("query", "key", "value")
            )
            rows, _ = self._attention(self.heads(q, heads), *self_kv(layer, k, v), heads, mask)
            x = g.op("Add", x, self.linear(rows, f"{block}.attn.out", few_rows=True))
            y = self._norm(x, f"{block}.cross_attn_ln")
            q = self.heads(self.linear(y, f"{block}.cross_attn.query", few_rows=True), heads)
            rows, layer_weights = self._attention(q, *cross_kv(layer), heads)
            weights.append(layer_weights)
            x = g.op("Add", x, self.linear(rows, f"{block}.cross_attn.out", few_rows=True))
            x = g.op("Add", x, self._feed_forward(x, block, few_rows=True))
        return self.weights.times_table(self._norm(x, "decoder.ln"), TABLE), weights

    def positions_and_mask(self, ids: str, start: str) -> tuple[str, str]:
        """Return the positions (n,) of tokens (B, n), and the mask (n, S) that hides later tokens.

        `start` is the name of the number of cached tokens (1,), int64.
        """
        g = self.graph
        first = g.scalar(start)
        end = g.op("Add", first, g.scalar(g.sizes(ids, 1, 2)))
        positions = g.op("Range", first, end, g.constant(1))
        columns = g.op("Range", g.constant(0), end, g.constant(1))
        is_later = g.op("Greater", columns, g.op("Unsqueeze", positions, g.constant([1])))
        low, zero = g.constant(LOWEST, np.float32), g.constant(0, np.float32)
        return positions, g.op("Where", is_later, low, zero)

    def cross_projections(self, features: str, layer: int) -> KeysAndValues:
        """Return a decoder layer's keys and values (B, T, d) of the features (B, T, d)."""
        name = f"decoder.blocks.{layer}.cross_attn"
        return self.linear(features, f"{name}.key"), self.linear(features, f"{name}.value")

    def linear(self, x: str, name: str, *, few_rows: bool = False) -> str:
        """Return a linear layer of x (…, K): (…, N). Keys have no bias."""
        y = self.weights.times(x, f"{name}.weight", few_rows=few_rows)
        bias = f"{name}.bias"
        return self.graph.op("Add", y, self.weights.tensor(bias)) if bias in self.weights else y

    def heads(self, x: str, n_heads: int) -> str:
        """Return x (B, n, d) by heads: (B, H, n, D)."""
        shape = self.graph.constant([0, 0, n_heads, self.dims.n_text_state // n_heads])
        return self.graph.op("Transpose", self.graph.op("Reshape", x, shape), perm=[0, 2, 1, 3])

    def _attention(self, q: str, k: str, v: str, n_heads: int, mask: str = "") -> tuple[str, str]:
        """Return the joined heads (B, n, d) of queries (B, H, n, D), and the attention (B, H, n, S)."""
        g, width = self.graph, self.dims.n_text_state
        q = g.op("Mul", q, g.constant((width // n_heads) ** -0.5, np.float32))
        scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
        if mask:
            scores = g.op("Add", scores, mask)
        weights = g.op("Softmax", scores, axis=-1)
        rows = g.op("Transpose", g.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        return g.op("Reshape", rows, g.constant([0, 0, width])), weights

    def _feed_forward(self, x: str, block: str, *, few_rows: bool = False) -> str:
        y = self._norm(x, f"{block}.mlp_ln")
        y = self._gelu(self.linear(y, f"{block}.mlp.0", few_rows=few_rows))
        return self.linear(y, f"{block}.mlp.2", few_rows=few_rows)

    def _convolution(self, x: str, name: str, strides: list[int]) -> str:
        return self.graph.op("Conv", x, *self._weight_and_bias(name), pads=[1, 1], strides=strides)

    def _norm(self, x: str, name: str) -> str:
        tensors = self._weight_and_bias(name)
        return self.graph.op("LayerNormalization", x, *tensors, axis=-1, epsilon=EPSILON)

    def _weight_and_bias(self, name: str) -> tuple[str, str]:
        return self.weights.tensor(f"{name}.weight"), self.weights.tensor(f"{name}.bias")

    def _gelu(self, x: str) -> str:
        """Return x Φ(x): one operator, or the form that runtimes replace with one."""
        g = self.graph
        if g.opset >= GELU_OPSET:
            return g.op("Gelu", x)
        erf = g.op("Erf", g.op("Div", x, g.constant(np.sqrt(2), np.float32)))
        twice = g.op("Mul", x, g.op("Add", erf, g.constant(1, np.float32)))
        return g.op("Mul", twice, g.constant(0.5, np.float32))
