"""The modules that AWS Neuron's tracer compiles, and that run eagerly on a CPU to emulate them.

This file stands alone: it needs torch (2.9 or later) and the standard library, so that it runs in the
environment of the Neuron SDK, whose torch is older than whisperport's.

    model = read_description("fp32.json")
    weights = read_weights("fp32.safetensors")
    module, inputs, aliases = build(model, weights, "step")
    torch_neuronx.trace(module, inputs, input_output_aliases=aliases, ...)

`build` returns a module in evaluation mode, example inputs (a tuple of tensors), and the aliases, state
parameter -> index of the output that replaces it. Aliased outputs come last. `run` does one call as the
device does: it returns the other outputs, and puts the aliased ones into the state.

    program   inputs                                             outputs, before the aliased ones
    encoder   mel                                                features, L keys, L values
    cross_kv  features                                           L keys, L values
    prefill_P x, mask, pick, position                            logits, L new keys, L new values
    step      x, mask, position, and source if B > 1             logits, L new keys, L new values
    align     x, mask, position                                  rows, scores, L new keys, L new values

    mel       (B, n_mels, 2T) float32        pick      (B, R, P) float32, one 1 per row
    features  (B, T, d) float32              position  (B, P) int32: row of the cache that gets each token,
    x         (B, P, d) float32                        or -1 for none
    mask      (B, P, N + P) float32          source    (B,) int32: row b continues the row source[b]

**State.** `self_k` (B, H, D, N), `self_v` (B, H, N, D), `cross_k` (W, H, D, C) and `cross_v` (W, H, C, D)
of each layer are parameters of the decode modules. They stay on the device. Every call updates the
self-attention caches, which are aliased outputs. The cross-attention K/V are copied once per window. They
are no outputs, so nothing copies them for each token. B rows belong to W windows: the rows of a window
follow each other and share its cross-attention K/V, as the beams of a beam search do.

**Operators.** A new row is written by `where`, from a comparison with `position`. A scatter would need an
int64 index in torch. The rows of beams are reordered by `index_select` with int32 indices, which is a
gather along axis 0, as in AWS's T5 tutorial (aws-neuron-sdk@81ce03a, t5-inference-tutorial.ipynb,
`reorder_cache`).

**Precision.** In bfloat16, weights, state and matmuls are in bfloat16. Layer norms and softmax are computed
in float32. All inputs, and all outputs but the aliased ones, are float32 or int32.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORMAT = "whisperport modules for neuron"
MAX_DESCRIPTION_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 16 * 2**20
MAX_SIZE = 2**20  # of one axis or count; the largest of a Whisper model is its vocabulary of 51866
MAX_LAYERS = 512
MAX_BATCH = 256
DTYPES = {  # name in a weight file -> dtype
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
STATE = ("self_k", "self_v", "cross_k", "cross_v")
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


TENSOR_DTYPES = {  # of inputs, outputs and arguments of a graph
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
}


class ModuleError(ValueError):
    """A description or a weight file is damaged, or does not fit to the other."""


# Files -------------------------------------------------------------------------------------------


def read_description(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a description: JSON with `format` and `programs`, which maps a name to that program's sizes.

    Raises:
        ModuleError: it is not such a file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        text = file.read(MAX_DESCRIPTION_BYTES + 1)
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise ModuleError(f"the description has more than {MAX_DESCRIPTION_BYTES} bytes")
    data = _json(text, "the description")
    if data.get("format") != FORMAT or not isinstance(data.get("programs"), dict):
        raise ModuleError(f"the description is not of the format {FORMAT!r}")
    return data


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Map the tensors of a weight file into memory: name -> tensor, which shares the file's pages.

    The layout is that of safetensors: the length of the header (8 bytes, little-endian), the header (JSON:
    name -> dtype, shape, data_offsets), and the tensors one after the other, without gaps.

    Raises:
        ModuleError: the file does not have this layout.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ModuleError(f"the weight file has {size} bytes, and a header of {length}")
        header = _json(file.read(length), "the header of the weight file")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(*item)):
        dtype, shape = _dtype_and_shape(name, entry)
        count = 1
        for axis in shape:
            count *= axis
        begin, stop = _offsets(name, entry)
        if begin != end or stop - begin != count * dtype.itemsize or begin % dtype.itemsize:
            raise ModuleError(f"the weight file has a wrong offset for the tensor {name[:80]!r}")
        end = stop
        if 8 + length + end > size:
            raise ModuleError("the weight file is truncated")
        start = 8 + length + begin
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=start) if count else None
        found[name] = torch.empty(shape, dtype=dtype) if flat is None else flat.reshape(shape)
    if 8 + length + end != size:
        raise ModuleError("the weight file has bytes after its last tensor")
    return found


def _json(text: bytes, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModuleError(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise ModuleError(f"{what} is not a JSON object")
    return data


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise ModuleError(f"the weight file has no offsets for the tensor {name[:80]!r}")
    return offsets[0], offsets[1]


def _dtype_and_shape(name: str, entry: Mapping[str, Any]) -> tuple[torch.dtype, list[int]]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ModuleError(f"the weight file has a wrong dtype for the tensor {name[:80]!r}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)):
        raise ModuleError(f"the weight file has a wrong shape for the tensor {name[:80]!r}")
    return DTYPES[dtype], shape


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


# Layers ------------------------------------------------------------------------------------------


class Norm(nn.LayerNorm):
    """A layer norm that computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the softmax over the last axis, computed in float32."""
    return torch.softmax(scores.float(), dim=-1).to(dtype)


class Queries(nn.Module):
    """The projections of queries and outputs of an attention block. Names are openai-whisper's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def queries(self, x: Tensor) -> Tensor:
        """Project x (B, P, d) to scaled queries (B, H, P, D)."""
        return split_heads(self.query(x) * self.head_width**-0.5, self.heads)

    def merge(self, heads: Tensor) -> Tensor:
        """Join heads (B, H, P, D), and apply the output projection: (B, P, d)."""
        batch, _, rows, _ = heads.shape
        joined = heads.permute(0, 2, 1, 3).reshape(batch, rows, self.heads * self.head_width)
        return cast(Tensor, self.out(joined))


class KeysAndValues(nn.Module):
    """The projections of keys and values of an attention block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Project x (B, T, d) to transposed keys (B, H, D, T) and values (B, H, T, D)."""
        keys = split_heads(self.key(x), self.heads).permute(0, 1, 3, 2)
        return keys, split_heads(self.value(x), self.heads)


class SelfAttention(Queries):
    """Self-attention: of the encoder, and with a cache of the decoder.

    `neuron_fused` may set `qkv`, the three projections in one, and `kernel`, which returns None where it
    does not replace the plain attention of the encoder.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.qkv: nn.Module | None = None
        self.kernel: Callable[[Tensor, Tensor, Tensor], Tensor | None] | None = None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, P, d) to scaled queries (B, H, P, D), keys (B, H, D, P), values (B, H, P, D)."""
        if self.qkv is not None:
            q, k, v = self.qkv(x)
        else:
            q, k, v = self.query(x), self.key(x), self.value(x)
        queries = split_heads(q * self.head_width**-0.5, self.heads)
        return queries, split_heads(k, self.heads).permute(0, 1, 3, 2), split_heads(v, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every position of x (B, T, d) to all of them: (B, T, d)."""
        q, k, v = self.project(x)
        attended = self.kernel(q, k, v) if self.kernel is not None else None
        return self.merge(softmax(q @ k, v.dtype) @ v if attended is None else attended)

    def cached(
        self, x: Tensor, mask: Tensor, cache_k: Tensor, cache_v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to cached and new tokens.

        Args:
            x: (B, P, d) hidden states of the new tokens.
            mask: (B, 1, P, N + P) added to the scores.
            cache_k: (B, H, D, N) keys of the earlier tokens.
            cache_v: (B, H, N, D) values of the earlier tokens.

        Returns:
            The output (B, P, d), the new keys (B, H, D, P), and the new values (B, H, P, D).
        """
        n = cache_k.shape[3]
        q, new_k, new_v = self.project(x)
        scores = torch.cat([q @ cache_k, q @ new_k], dim=-1).float() + mask
        weights = softmax(scores, new_v.dtype)
        attended = weights[..., :n] @ cache_v + weights[..., n:] @ new_v
        return self.merge(attended), new_k, new_v


class CrossAttention(Queries):
    """Cross-attention to keys and values that `CrossKV` computed; it has no projections for them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from queries (B, H, P, D) to keys (W, H, D, C) and values (W, H, C, D): (B, P, d).

        The rows of a window, B / W of them, are processed as further queries of it.
        """
        batch, heads, rows, width = q.shape
        windows = k.shape[0]
        shared = batch // windows
        if shared > 1:
            q = q.reshape(windows, shared, heads, rows, width).permute(0, 2, 1, 3, 4)
            q = q.reshape(windows, heads, shared * rows, width)
        attended = softmax(q @ k, v.dtype) @ v
        if shared > 1:
            attended = attended.reshape(windows, heads, shared, rows, width).permute(0, 2, 1, 3, 4)
            attended = attended.reshape(batch, heads, rows, width)
        return self.merge(attended)


def split_heads(projected: Tensor, heads: int) -> Tensor:
    """Split (B, T, d) into heads (B, H, T, D)."""
    batch, rows, width = projected.shape
    return projected.reshape(batch, rows, heads, width // heads).permute(0, 2, 1, 3)


def feed_forward(width: int, inner: int) -> nn.Sequential:
    """Return the two linear layers of a transformer layer, with openai-whisper's parameter names."""
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


# Programs ----------------------------------------------------------------------------------------


class ConvGelu(nn.Conv1d):
    """A convolution of width 3, and a GELU. `neuron_fused` may replace both by a kernel."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__(channels, width, kernel_size=3, stride=stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, C, T): (B, d, T / stride)."""
        return F.gelu(super().forward(x))


class EncoderBlock(nn.Module):
    """One encoder layer."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attn_ln, self.attn = Norm(width), SelfAttention(width, heads)
        self.mlp_ln, self.mlp = Norm(width), feed_forward(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (B, T, d) to (B, T, d)."""
        x = x + self.attn(self.attn_ln(x))
        return x + cast(Tensor, self.mlp(self.mlp_ln(x)))


class CrossKV(nn.Module):
    """The cross-attention keys and values of every decoder layer, of features (B, T, d)."""

    def __init__(self, *, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.cross = nn.ModuleList(KeysAndValues(width, heads) for _ in range(layers))

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Project features (B, T, d) to L keys (B, H, D, T), then L values (B, H, T, D), float32."""
        features = features.to(_dtype(self))
        pairs = [layer(features) for layer in self.cross]
        return (*(k.float() for k, _ in pairs), *(v.float() for _, v in pairs))


class EncoderWithCrossKV(CrossKV):
    """The encoder and the projections of its features, in one graph.

    The features do not leave the device between the two. `cross_layers` 0: the encoder alone.
    """

    def __init__(
        self,
        *,
        n_mels: int,
        positions: int,
        width: int,
        heads: int,
        layers: int,
        inner: int,
        cross_heads: int,
        cross_layers: int,
    ) -> None:
        super().__init__(width=width, heads=cross_heads, layers=cross_layers)
        self.conv1, self.conv2 = ConvGelu(n_mels, width), ConvGelu(width, width, stride=2)
        self.positional_embedding = nn.Parameter(torch.empty(positions, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, inner) for _ in range(layers))
        self.ln_post = Norm(width)

    def features(self, mel: Tensor) -> Tensor:
        """Encode mel (B, n_mels, 2T) into features (B, T, d)."""
        x = self.conv2(self.conv1(mel.to(_dtype(self))))
        x = x.permute(0, 2, 1) + self.positional_embedding
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.ln_post(x))

    def forward(self, mel: Tensor) -> tuple[Tensor, ...]:
        """Encode mel (B, n_mels, 2T) into features, L keys and L values, as `CrossKV` returns them."""
        features = self.features(mel)
        return (features.float(), *super().forward(features))


class DecoderBlock(nn.Module):
    """One decoder layer."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attn_ln, self.attn = Norm(width), SelfAttention(width, heads)
        self.cross_attn_ln, self.cross_attn = Norm(width), CrossAttention(width, heads)
        self.mlp_ln, self.mlp = Norm(width), feed_forward(width, inner)


class Decode(nn.Module):
    """Runs P tokens of each of B rows, with its state on the device: the base of the decode programs.

    Args:
        batch: B, rows.
        windows: W, windows of which these rows are; a divisor of B.
        tokens: P, tokens per run.
        cached: N, rows of the self-attention cache.
        context: C, audio positions that the cross-attention reads.
        vocab: V; 0: return hidden states (B, R, d) in place of logits (B, R, V).
        alignment_heads: (layer, head) of each of the A heads whose scores `align` returns.
    """

    def __init__(
        self,
        *,
        batch: int,
        windows: int,
        tokens: int,
        cached: int,
        context: int,
        width: int,
        heads: int,
        layers: int,
        inner: int,
        vocab: int,
        alignment_heads: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__()
        self.tokens, self.alignment_heads = tokens, tuple(alignment_heads)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, inner) for _ in range(layers))
        self.ln = Norm(width)
        self.head: nn.Module = nn.Linear(width, vocab, bias=False) if vocab else nn.Identity()
        head = width // heads
        self.self_k = _state(layers, (batch, heads, head, cached))
        self.self_v = _state(layers, (batch, heads, cached, head))
        self.cross_k = _state(layers, (windows, heads, head, context))
        self.cross_v = _state(layers, (windows, heads, context, head))

    def hidden(
        self, x: Tensor, mask: Tensor, position: Tensor, source: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Run all layers.

        Returns:
            Hidden states (B, P, d); L new keys, then L new values, float32; L updated caches of keys, then
            L of values; and the scores (B, 1, P, C) of each of the alignment heads.
        """
        x = x.to(_dtype(self))
        new: tuple[list[Tensor], list[Tensor]] = [], []
        caches: tuple[list[Tensor], list[Tensor]] = [], []
        scores = []
        rows = torch.arange(self.self_v[0].shape[2], dtype=torch.int32, device=position.device)
        chosen = (position[:, :, None] == rows).to(x.dtype)[:, None]  # (B, 1, P, N)
        written = chosen.sum(dim=2, keepdim=True) > 0  # (B, 1, 1, N)
        for layer, block in enumerate(self.blocks):
            block = cast(DecoderBlock, block)
            cache_k, cache_v = self.self_k[layer], self.self_v[layer]
            if source is not None:
                cache_k, cache_v = (c.index_select(0, source) for c in (cache_k, cache_v))
            normed = block.attn_ln(x)
            attended, new_k, new_v = block.attn.cached(normed, mask[:, None], cache_k, cache_v)
            x = x + attended
            q, k = block.cross_attn.queries(block.cross_attn_ln(x)), self.cross_k[layer]
            for one in [head for of, head in self.alignment_heads if of == layer]:
                scores.append((q[:, one : one + 1] @ k[:, one : one + 1]).float())
            x = x + block.cross_attn.attend(q, k, self.cross_v[layer])
            x = x + block.mlp(block.mlp_ln(x))
            new[0].append(new_k.float())
            new[1].append(new_v.float())
            placed_k, placed_v = new_k, new_v
            if self.tokens > 1:
                placed_k, placed_v = new_k @ chosen, chosen.mT @ new_v
            caches[0].append(torch.where(written, placed_k, cache_k))
            caches[1].append(torch.where(written.mT, placed_v, cache_v))
        return self.ln(x), [*new[0], *new[1]], [*caches[0], *caches[1]], scores

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (B, R, V) of hidden states (B, R, d), or these, if V is 0."""
        return cast(Tensor, self.head(hidden)).float()

    def aliases(self, first: int) -> dict[Tensor, int]:
        """Return the aliases: cache -> index of its output; the first is `first`."""
        return {state: first + i for i, state in enumerate([*self.self_k, *self.self_v])}


class Step(Decode):
    """The `step` program: one token of each row."""

    def forward(
        self, x: Tensor, mask: Tensor, position: Tensor, source: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return logits (B, 1, V), the new keys and values, and the caches."""
        hidden, new, caches, _ = self.hidden(x, mask, position, source)
        return (self.logits(hidden), *new, *caches)


class Prefill(Decode):
    """The `prefill_P` programs: P tokens of each row's prompt, and the logits of R of them."""

    def forward(
        self, x: Tensor, mask: Tensor, pick: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """Return logits (B, R, V), the new keys and values, and the caches."""
        hidden, new, caches, _ = self.hidden(x, mask, position)
        return (self.logits(pick.to(hidden.dtype) @ hidden), *new, *caches)


class Align(Decode):
    """The `align` program: scores of the alignment heads, for word timestamps."""

    def forward(self, x: Tensor, mask: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Return hidden states (B, P, d), scores (B, A, P, C), the new keys and values, and the caches."""
        hidden, new, caches, scores = self.hidden(x, mask, position)
        joined = torch.cat(scores, dim=1) if len(scores) > 1 else scores[0]
        return (hidden.float(), joined, *new, *caches)


def _state(layers: int, shape: Sequence[int]) -> nn.ParameterList:
    state = (nn.Parameter(torch.zeros(shape), requires_grad=False) for _ in range(layers))
    return nn.ParameterList(state)


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


class Graph(nn.Module):
    """Any other program, as a list of aten's operators: what torch.export made of it.

    Args:
        record: JSON: `nodes`, with `name`, `op` such as "aten.linear.default", `args` and `kwargs` of each;
            `inputs` and `outputs`, with `name` and `dtype` of each; `results`, the names of the nodes that
            are returned; and `weights`, name of a node that reads a weight -> name of the tensor.

    Raises:
        ModuleError: an operator is not a function of tensors, or a name is unknown.
        KeyError, TypeError, AttributeError: the record is not complete.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__()
        self.inputs = [str(tensor["name"]) for tensor in record["inputs"]]
        self.weight_names = {str(n): str(weight) for n, weight in record["weights"].items()}
        self.results = [str(name) for name in record["results"]]
        self.dtypes = [TENSOR_DTYPES[tensor["dtype"]] for tensor in record["outputs"]]
        self.floating = PRECISIONS[record["dtype"]]
        known = {*self.inputs, *self.weight_names}
        self.nodes: list[tuple[str, Any, Any, Any]] = []
        for node in record["nodes"]:
            name, args, kwargs = str(node["name"]), list(node["args"]), dict(node["kwargs"])
            if unknown := [n for n in _names([*args, *kwargs.values()]) if n not in known]:
                raise ModuleError(f"the node {name!r} reads {unknown[0]!r}, which is not before it")
            self.nodes.append((name, operator(str(node["op"])), args, kwargs))
            known.add(name)
        if unknown := [name for name in self.results if name not in known]:
            raise ModuleError(f"the output {unknown[0]!r} is not a node")
        self.tensors = nn.ParameterList()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the nodes in their order."""
        given = (one.to(self.floating) if one.is_floating_point() else one for one in inputs)
        values: dict[str, Any] = dict(zip(self.inputs, given, strict=True))
        values |= dict(zip(self.weight_names, self.tensors, strict=True))
        for name, function, args, kwargs in self.nodes:
            named = {key: _decoded(value, values) for key, value in kwargs.items()}
            values[name] = function(*_decoded(args, values), **named)
        found = zip(self.results, self.dtypes, strict=True)
        return tuple(values[name].to(dtype) for name, dtype in found)


FACTORIES = {"full", "zeros", "ones", "arange", "scalar_tensor", "empty", "eye"}
FLOATS = {"inf", "-inf", "nan"}  # JSON has none of them
TEXTS = {"none", "tanh", "trunc", "floor", "linear", "nearest", "bilinear"}  # values of options


def operator(name: str) -> Any:
    """Return an operator of aten that computes tensors from tensors and changes none of them.

    Args:
        name: such as "aten.linear.default", or "getitem" of a list of tensors.

    Raises:
        ModuleError: there is no such operator, or it does something else, such as reading a file.
    """
    if name == "getitem":
        return lambda values, index: values[index]
    library, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    found = None
    if library == "aten" and base.isidentifier() and overload.isidentifier():
        found = getattr(getattr(torch.ops.aten, base, None), overload, None)
    schema = getattr(found, "_schema", None)
    if schema is None or schema.is_mutable:
        raise ModuleError(f"{name[:80]!r} is not an operator of a program")
    reads = any("Tensor" in str(argument.type) for argument in schema.arguments)
    returns = all("Tensor" in str(returned.type) for returned in schema.returns)
    if not (reads or base in FACTORIES) or not returns or not schema.returns:
        raise ModuleError(f"{name[:80]!r} does not compute a tensor from tensors")
    return found


def _names(value: Any) -> list[str]:
    """Return the names of the nodes that an argument reads, and check the argument."""
    if isinstance(value, list):
        return [name for one in value for name in _names(one)]
    if isinstance(value, dict) and set(value) == {"node"}:
        return [str(value["node"])]
    if isinstance(value, dict):
        is_dtype = set(value) == {"dtype"} and value["dtype"] in TENSOR_DTYPES
        is_float = set(value) == {"float"} and value["float"] in FLOATS
        if not is_dtype and not is_float:
            raise ModuleError(f"{str(value)[:80]} is not an argument of an operator")
    if isinstance(value, str) and value not in TEXTS:
        raise ModuleError(f"{value[:80]!r} is not an argument of an operator")
    return []


def _decoded(value: Any, values: Mapping[str, Any]) -> Any:
    """Return an argument of an operator."""
    if isinstance(value, list):
        return [_decoded(one, values) for one in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"node"}:
        return values[value["node"]]
    return float(value["float"]) if "float" in value else TENSOR_DTYPES[value["dtype"]]


# Building ----------------------------------------------------------------------------------------

_KINDS = {"step": Step, "prefill": Prefill, "align": Align}
_DECODE_SIZES = ("tokens", "cached", "context", "width", "heads", "layers", "inner")
_SIZES = {
    "encoder": ("n_mels", "positions", "width", "heads", "layers", "inner"),
    "cross_kv": ("width", "heads", "layers"),
}


def build(
    description: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    program: str,
    *,
    batch: int | None = None,
    windows: int | None = None,
) -> tuple[nn.Module, tuple[Tensor, ...], dict[Tensor, int]]:
    """Build the module of one program.

    Args:
        description: as `read_description` returns it.
        weights: as `read_weights` returns them.
        program: name of one of the description's programs.
        batch: B, rows that run together; None: as the description says.
        windows: W, windows of which these rows are; None: each row has its own.

    Returns:
        The module, example inputs, and the aliases: state parameter -> index of its output.

    Raises:
        ModuleError: there is no such program, its sizes are wrong or do not fit to the weights, or a graph
            is to run with a batch.
    """
    record = _record(description, program)
    dtype = PRECISIONS.get(str(record.get("dtype")))
    if dtype is None:
        raise ModuleError(f"the program {program!r} has the unknown dtype {record.get('dtype')!r}")
    rows = _size(record, "batch", high=MAX_BATCH) if batch is None else batch
    module = _module(record, rows, rows if windows is None else windows)
    try:
        _load(module, weights, dtype)
    except (KeyError, RuntimeError) as error:
        raise ModuleError(f"the weights do not fit to {program!r}: {str(error)[:400]}") from None
    module.eval().requires_grad_(False)
    first = 0
    if isinstance(module, Decode):
        first = (2 if isinstance(module, Align) else 1) + 2 * len(module.blocks)
    aliases = module.aliases(first) if isinstance(module, Decode) else {}
    try:
        return module, _examples(module, record, rows), aliases
    except (KeyError, TypeError, RuntimeError) as error:
        raise ModuleError(f"the inputs of {program!r} are wrong: {str(error)[:400]}") from None


def weight_shapes(description: Mapping[str, Any], program: str) -> dict[str, tuple[int, ...]]:
    """Return the weights that a program needs: name in the weight file -> shape; empty for a graph.

    Raises:
        ModuleError: there is no such program, or its sizes are wrong.
    """
    module = _module(_record(description, program), 1, 1)
    shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
    return {weight_name(module, n): s for n, s in shapes.items() if not is_state(n)}


def is_state(parameter: str) -> bool:
    """Whether a parameter is a part of the state, and not a weight."""
    return parameter.partition(".")[0] in STATE


def run(
    module: nn.Module, inputs: Sequence[Tensor], aliases: Mapping[Tensor, int]
) -> tuple[Tensor, ...]:
    """Run a module once, as the device does: update its state, and return the outputs without aliases."""
    with torch.no_grad():
        outputs: tuple[Tensor, ...] = module(*inputs)
    for state, index in aliases.items():
        state.data = outputs[index]
    return outputs[: min(aliases.values(), default=len(outputs))]


def _record(description: Mapping[str, Any], program: str) -> Mapping[str, Any]:
    record = description["programs"].get(program)
    if not isinstance(record, dict):
        known = ", ".join(map(str, description["programs"]))
        raise ModuleError(f"there is no program {program!r}; the programs are {known}")
    return record


def _module(record: Mapping[str, Any], batch: int, windows: int) -> nn.Module:
    """Return a module without memory for its parameters."""
    if not 1 <= batch <= MAX_BATCH or not 1 <= windows <= batch or batch % windows:
        raise ModuleError(f"a batch of {batch} rows cannot be of {windows} windows")
    kind = str(record.get("kind"))
    if kind == "graph" and batch == 1:
        try:
            return Graph(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise ModuleError(f"the graph is incomplete: {error!r}") from None
    if kind not in ("encoder", "cross_kv", *_KINDS):
        raise ModuleError(f"a program of the kind {kind[:40]!r} does not run with {batch} rows")
    names = _SIZES.get(kind, _DECODE_SIZES)
    sizes = {name: _size(record, name) for name in names}
    if sizes["width"] % sizes["heads"]:
        raise ModuleError(f"a width of {sizes['width']} has no {sizes['heads']} heads")
    if sizes.get("tokens", 0) > sizes.get("cached", MAX_SIZE):
        raise ModuleError(f"{sizes['tokens']} tokens do not fit into a cache of {sizes['cached']}")
    with torch.device("meta"):
        if kind == "encoder":
            cross = {name: _size(record, name, low=0) for name in ("cross_heads", "cross_layers")}
            if cross["cross_layers"] and sizes["width"] % (cross["cross_heads"] or MAX_SIZE):
                raise ModuleError(f"{cross['cross_heads']} heads do not divide {sizes['width']}")
            return EncoderWithCrossKV(**sizes, **cross)
        if kind == "cross_kv":
            return CrossKV(**sizes)
        vocab, heads = _size(record, "vocab", low=0), _alignment_heads(record, sizes)
        return _KINDS[kind](
            batch=batch, windows=windows, vocab=vocab, alignment_heads=heads, **sizes
        )


def _alignment_heads(record: Mapping[str, Any], sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the (layer, head) pairs of `align`, none for other programs."""
    heads = record.get("alignment_heads", [])
    if (record.get("kind") == "align") != bool(heads) or not isinstance(heads, list):
        raise ModuleError("only `align` has alignment heads, at least one")
    limits = (sizes["layers"], sizes["heads"])
    for pair in heads:
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_count, pair)):
            raise ModuleError("an alignment head is not a pair of a layer and a head")
        if pair[0] >= limits[0] or pair[1] >= limits[1]:
            raise ModuleError(f"there is no alignment head {pair}")
    return [(layer, head) for layer, head in sorted(heads, key=lambda pair: pair[0])]


def _load(module: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Give a module its weights, and a state of zeros.

    Raises:
        KeyError, RuntimeError: a weight is missing, or has another shape.
    """
    if isinstance(module, Graph):
        found = [weights[name] for name in module.weight_names.values()]
        cast = (one.to(dtype) if one.is_floating_point() else one for one in found)
        module.tensors = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in cast)
        return
    state = {}
    for name, parameter in module.named_parameters():
        if is_state(name):
            state[name] = torch.zeros(parameter.shape, dtype=dtype)
        else:
            state[name] = weights[weight_name(module, name)].to(dtype)
    module.load_state_dict(state, strict=True, assign=True)


def weight_name(module: nn.Module, parameter: str) -> str:
    """Return the name of a parameter's tensor in the weight file: openai-whisper's."""
    first, _, rest = parameter.partition(".")
    if first == "cross":
        layer, _, rest = rest.partition(".")
        return f"decoder.blocks.{layer}.cross_attn.{rest}"
    if first == "head":
        return "decoder.token_embedding.weight"
    return f"{'encoder' if isinstance(module, EncoderWithCrossKV) else 'decoder'}.{parameter}"


def _examples(module: nn.Module, record: Mapping[str, Any], batch: int) -> tuple[Tensor, ...]:
    if isinstance(module, EncoderWithCrossKV):
        return (torch.zeros(batch, record["n_mels"], 2 * record["positions"]),)
    if isinstance(module, CrossKV):
        return (torch.zeros(batch, _size(record, "positions"), record["width"]),)
    if not isinstance(module, Decode):
        return tuple(
            torch.zeros(tensor["shape"], dtype=TENSOR_DTYPES[tensor["dtype"]])
            for tensor in record["inputs"]
        )
    tokens, cached = record["tokens"], record["cached"]
    x = torch.zeros(batch, tokens, record["width"])
    mask = torch.zeros(batch, tokens, cached + tokens)
    position = torch.arange(tokens, dtype=torch.int32).repeat(batch, 1)
    if isinstance(module, Prefill):
        return x, mask, torch.zeros(batch, _size(record, "picked"), tokens), position
    source = (torch.arange(batch, dtype=torch.int32),) if batch > 1 else ()
    return (x, mask, position, *(source if isinstance(module, Step) else ()))


def _size(record: Mapping[str, Any], name: str, *, low: int = 1, high: int = MAX_SIZE) -> int:
    high = MAX_LAYERS if name.endswith("layers") else high
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModuleError(f"the size {name!r} is {str(value)[:40]}; expected {low} to {high}")
    return value
