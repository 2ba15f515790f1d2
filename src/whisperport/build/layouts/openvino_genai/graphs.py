"""Encoder and decoder as OpenVINO nodes, in the form that OpenVINO GenAI's pipelines rewrite.

On the CPU, any form decodes. For an NPU, the plug-in (NPUW) and GenAI's static pipeline look for patterns
of nodes, and fail if one is missing. The patterns of the decoder, each marked below:

    layer       the first number in the name of the node before a cross-attention state is its layer
    mask        the mask reaches ScaledDotProductAttention from a Select; it begins as Range, three times
                Unsqueeze, LessEqual
    positions   Gather, Add, Range, Unsqueeze, Tile become the input `cache_position`
    states      a self-attention state is called `past_key_values.I.decoder.keypresent.I.decoder.key`
    tap         ScaledDotProductAttention of cross-attention has a mask, and `encoder_attn` in its name: it
                gives the word timestamps

Source: openvinotoolkit/openvino@064c576, src/plugins/intel_npu/src/plugin/npuw/whisper, and
openvinotoolkit/openvino.genai@da1db86, src/cpp/src/whisper.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.build.layouts.arrays import Floats, half, is_widened, quantized_rows, weight

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

Node = Any  # openvino.Node; OpenVINO ships no types
KEY_VALUE = ("key", "value")
HIDDEN = np.float32(-65504)  # added to the scores of later tokens; the lowest number of float16
EPSILON = 1e-5  # of layer normalization
EMBEDDING = "decoder.token_embedding.weight"
PROJECTION = "decoder.projection.weight"  # the second constant of this weight


class Nodes:
    """Makes the nodes of one graph from the weights of a checkpoint.

    Args:
        checkpoint: its weights are read when a node needs them.
        precision: fp16 stores weights in float16, and a Convert to float32 follows, which a runtime
            computes or keeps; w8 stores matrices as rows of 8 bits and a factor for each row.
    """

    def __init__(self, checkpoint: "Checkpoint", precision: str) -> None:
        from openvino import opset13

        self.op: Any = opset13
        self.checkpoint, self.precision = checkpoint, precision
        self.zeros = np.zeros(0, np.float32)

    def integers(self, *values: int) -> Node:
        """Return a constant (n,) int64."""
        return self.op.constant(np.array(values, np.int64))

    def integer(self, value: int) -> Node:
        """Return a constant () int64."""
        return self.op.constant(np.int64(value))

    def parameter(self, name: str, shape: list[int], dtype: Any) -> Node:
        """Return an input; -1 in its shape is a size that is not fixed."""
        node = self.op.parameter(shape, dtype, name)
        node.output(0).set_names({name})
        return node

    def tensor(self, name: str, *shape: int, label: str = "") -> Node:
        """Return a weight in float32; in a shape that broadcasts, if one is given.

        Its node has the weight's name; a second one of the same weight, a label of its own. The graph reads
        the checkpoint's own memory where it has the precision that is stored. In fp32, where that would be
        a copy, it reads zeros, and `write_graphs` puts the weight into the file: until a graph is saved,
        all its constants are in memory.
        """
        is_half = self.precision == "fp16"
        array: Any
        if is_half:
            array = half(self.checkpoint, name)
        elif self.precision == "fp32" and is_widened(self.checkpoint, name):
            array = self._zeros(tuple(self.checkpoint.weights[name].shape))
        else:
            array = weight(self.checkpoint, name)
        array = array.reshape(shape or array.shape)
        stored = self.op.constant(array, shared_memory=True, name=label or name)
        return self.op.convert(stored, "f32") if is_half else stored

    def _zeros(self, shape: tuple[int, ...]) -> Floats:
        """Return zeros, whose memory all constants share."""
        size = math.prod(shape)
        if size > len(self.zeros):
            self.zeros = np.zeros(size, np.float32)
        return self.zeros[:size].reshape(shape)

    def matrix(self, name: str, label: str = "") -> Node:
        """Return a weight (n, k)."""
        if self.precision != "w8":
            return self.tensor(name, label=label)
        rows, factor = quantized_rows(weight(self.checkpoint, name))
        step = self.op.constant((1 / factor)[:, None].astype(np.float32))
        return self.op.multiply(
            self.op.convert(self.op.constant(rows, name=label or name), "f32"), step
        )

    def linear(self, x: Node, name: str) -> Node:
        """Return x (B, n, k) times a weight; with its bias if it has one."""
        product = self.op.matmul(x, self.matrix(f"{name}.weight"), False, True)
        if f"{name}.bias" not in self.checkpoint.weights:
            return product
        return self.op.add(product, self.tensor(f"{name}.bias", 1, 1, -1))

    def norm(self, x: Node, name: str) -> Node:
        """Return the layer normalization of x (B, n, d)."""
        centred = self.op.mvn(x, self.integers(-1), True, EPSILON, "inside_sqrt")
        scaled = self.op.multiply(centred, self.tensor(f"{name}.weight", 1, 1, -1))
        return self.op.add(scaled, self.tensor(f"{name}.bias", 1, 1, -1))

    def feed_forward(self, x: Node, block: str) -> Node:
        """Return x (B, n, d) plus the output of a feed-forward block."""
        hidden = self.linear(self.norm(x, f"{block}.mlp_ln"), f"{block}.mlp.0")
        return self.op.add(x, self.linear(self.op.gelu(hidden, "erf"), f"{block}.mlp.2"))

    def split(self, x: Node, heads: int, name: str = "") -> Node:
        """Return x (B, n, d) as heads (B, H, n, D)."""
        width = self.checkpoint.dims.n_audio_state // heads
        rows = self.op.reshape(x, self.integers(0, 0, heads, width), True)
        node = self.op.transpose(rows, self.integers(0, 2, 1, 3))
        if name:
            node.set_friendly_name(name)
        return node

    def joined(self, x: Node) -> Node:
        """Return heads (B, H, n, D) as (B, n, d)."""
        rows = self.op.transpose(x, self.integers(0, 2, 1, 3))
        width = self.checkpoint.dims.n_audio_state
        return self.op.reshape(rows, self.integers(0, 0, width), True)

    def size(self, x: Node, axis: int) -> Node:
        """Return one size of x, () int64."""
        shape = self.op.shape_of(x, "i64")
        return self.op.gather(shape, self.integer(axis), self.integer(0))


def encoder_graph(checkpoint: "Checkpoint", precision: str) -> Any:
    """Return `input_features` (B, n_mels, 2T) to `last_hidden_state` (B, T, d); 2T is fixed, for an NPU."""
    from openvino import Model

    nodes, dims = Nodes(checkpoint, precision), checkpoint.dims
    op = nodes.op
    mel = nodes.parameter("input_features", [-1, dims.n_mels, dims.n_frames], np.float32)
    x = mel
    for name, stride in (("conv1", 1), ("conv2", 2)):
        kernel = nodes.tensor(f"encoder.{name}.weight")
        x = op.convolution(x, kernel, [stride], [1], [1], [1])
        x = op.gelu(op.add(x, nodes.tensor(f"encoder.{name}.bias", 1, -1, 1)), "erf")
    positions = nodes.tensor("encoder.positional_embedding", 1, -1, dims.n_audio_state)
    x = op.add(op.transpose(x, nodes.integers(0, 2, 1)), positions)
    for layer in range(dims.n_audio_layer):
        block = f"encoder.blocks.{layer}"
        rows = nodes.norm(x, f"{block}.attn_ln")
        query, key, value = (
            nodes.split(nodes.linear(rows, f"{block}.attn.{part}"), dims.n_audio_head)
            for part in ("query", *KEY_VALUE)
        )
        attended = nodes.joined(op.scaled_dot_product_attention(query, key, value))
        x = op.add(x, nodes.linear(attended, f"{block}.attn.out"))
        x = nodes.feed_forward(x, block)
    x = nodes.norm(x, "encoder.ln_post")
    x.output(0).set_names({"last_hidden_state"})
    return Model([x], [mel], "encoder")


class _Decoder:
    """The stateful decoder: keys and values of earlier tokens and of the audio are states of the graph."""

    def __init__(self, checkpoint: "Checkpoint", precision: str) -> None:
        self.nodes, self.dims = Nodes(checkpoint, precision), checkpoint.dims
        self.op = self.nodes.op
        self.assignments: list[Node] = []
        dims, nodes = self.dims, self.nodes
        self.ids = nodes.parameter("input_ids", [-1, -1], np.int64)
        self.features = nodes.parameter(
            "encoder_hidden_states", [-1, -1, dims.n_text_state], np.float32
        )
        self.beams = nodes.parameter("beam_idx", [-1], np.int32)
        self.batch = nodes.size(self.ids, 0)
        self.scale = self.op.constant(np.float32(dims.text_head_width**-0.5))

    def model(self) -> Any:
        from openvino import Model

        op, nodes, dims = self.op, self.nodes, self.dims
        past = [
            [self._past(layer, part) for part in KEY_VALUE] for layer in range(dims.n_text_layer)
        ]
        start = nodes.size(past[0][0][0], 2)
        end = op.add(start, nodes.size(self.ids, 1))
        mask = self._mask(start, end)
        table = nodes.matrix(EMBEDDING)
        rows = nodes.tensor("decoder.positional_embedding")
        x = op.gather(table, self.ids, nodes.integer(0))
        places = op.gather(rows, self._positions(start, end), nodes.integer(0))
        x = op.add(x, places)
        for layer in range(dims.n_text_layer):
            x = self._self_attention(x, layer, past[layer], mask)
            x = self._cross_attention(x, layer)
            x = nodes.feed_forward(x, f"decoder.blocks.{layer}")
        x = nodes.norm(x, "decoder.ln")
        projection = nodes.matrix(EMBEDDING, PROJECTION)
        logits = op.matmul(x, projection, False, True)
        logits.output(0).set_names({"logits"})
        inputs = [self.ids, self.features, self.beams]
        return Model([op.result(logits)], self.assignments, inputs, "decoder")

    def _past(self, layer: int, part: str) -> tuple[Node, Callable[[Node], None]]:
        """Return keys or values (B, H, n, D) of earlier tokens, and what stores the new ones."""
        nodes, heads = self.nodes, self.dims.n_text_head
        shape = [-1, heads, -1, self.dims.text_head_width]
        empty = self.op.broadcast(
            self.op.constant(np.float32(0)),
            self.op.concat(
                [
                    self.op.unsqueeze(self.batch, nodes.integers(0)),
                    nodes.integers(heads, 0, self.dims.text_head_width),
                ],
                0,
            ),
        )
        # Pattern: states.
        name = f"past_key_values.{layer}.decoder.{part}present.{layer}.decoder.{part}"
        rows, store = self._state(empty, shape, name)
        return self.op.gather(rows, self.beams, nodes.integer(0)), store

    def _state(
        self, initial: Node, shape: list[int], name: str
    ) -> tuple[Node, Callable[[Node], None]]:
        """Return the value of a state, and what assigns it."""
        from openvino import PartialShape, Type
        from openvino.op.util import Variable, VariableInfo

        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = PartialShape(shape), Type.f32, name
        variable = Variable(info)

        def store(value: Node) -> None:
            self.assignments.append(self.op.assign(value, variable))

        return self.op.read_value(initial, variable), store

    def _positions(self, start: Node, end: Node) -> Node:
        """Return the positions (B, n) of the tokens."""
        op, nodes = self.op, self.nodes
        # Pattern: positions.
        places = op.unsqueeze(op.range(start, end, nodes.integer(1), "i64"), nodes.integers(0))
        repeats = op.concat([op.unsqueeze(self.batch, nodes.integers(0)), nodes.integers(1)], 0)
        return op.tile(places, repeats)

    def _mask(self, start: Node, end: Node) -> Node:
        """Return what hides later tokens, (1, 1, n, start + n)."""
        op, nodes = self.op, self.nodes
        # Pattern: mask.
        columns = op.range(nodes.integer(0), end, nodes.integer(1), "i64")
        for axis in range(3):
            columns = op.unsqueeze(columns, nodes.integers(axis))
        # A range of its own: that of `_positions` is replaced.
        last = op.add(start, nodes.size(self.ids, 1))
        rows = op.range(start, last, nodes.integer(1), "i64")
        rows = op.reshape(rows, nodes.integers(1, 1, -1, 1), False)
        shown, hidden = op.constant(np.float32(0)), op.constant(HIDDEN)
        return op.select(op.less_equal(columns, rows), shown, hidden)

    def _self_attention(self, x: Node, layer: int, past: list[Any], mask: Node) -> Node:
        op, nodes, block = self.op, self.nodes, f"decoder.blocks.{layer}"
        rows = nodes.norm(x, f"{block}.attn_ln")
        query = self._heads(rows, f"{block}.attn.query")
        joined = []
        for part, (earlier, store) in zip(KEY_VALUE, past, strict=True):
            joined.append(op.concat([earlier, self._heads(rows, f"{block}.attn.{part}")], 2))
            store(joined[-1])
        attended = op.scaled_dot_product_attention(query, *joined, mask, self.scale)
        return op.add(x, nodes.linear(nodes.joined(attended), f"{block}.attn.out"))

    def _cross_attention(self, x: Node, layer: int) -> Node:
        op, nodes, block = self.op, self.nodes, f"decoder.blocks.{layer}"
        shape = [-1, self.dims.n_text_head, -1, self.dims.text_head_width]
        audio = []
        for part in KEY_VALUE:
            rows = nodes.linear(self.features, f"{block}.cross_attn.{part}")
            # Pattern: layer.
            label = f"decoder.layers.{layer}.encoder_attn.{part}"
            first = nodes.split(rows, self.dims.n_text_head, label)
            kept, store = self._state(first, shape, f"cross.{layer}.{part}")
            store(kept)
            audio.append(kept)
        query = self._heads(nodes.norm(x, f"{block}.cross_attn_ln"), f"{block}.cross_attn.query")
        # Pattern: tap.
        nothing = op.constant(np.zeros((1, 1, 1, 1), np.float32))
        attended = op.scaled_dot_product_attention(query, *audio, nothing, self.scale)
        attended.set_friendly_name(f"decoder.layers.{layer}.encoder_attn.attention")
        return op.add(x, nodes.linear(nodes.joined(attended), f"{block}.cross_attn.out"))

    def _heads(self, rows: Node, name: str) -> Node:
        return self.nodes.split(self.nodes.linear(rows, name), self.dims.n_text_head)


def decoder_graph(checkpoint: "Checkpoint", precision: str) -> Any:
    """Return `input_ids` (B, n), `encoder_hidden_states` and `beam_idx` (B,) to `logits` (B, n, V)."""
    return _Decoder(checkpoint, precision).model()
