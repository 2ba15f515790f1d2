"""Whisper in plain functions of a dictionary of weights, with a tap at each tensor that int8 would round.

The weights have openai-whisper's names. ``tap(name, x)`` is called for the input and the output of every
linear layer and convolution and for every sum, and returns the tensor to go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
Tap = Callable[[str, Tensor], Tensor]
HEADS = 2


def untapped(name: str, x: Tensor) -> Tensor:
    """Change nothing."""
    return x


def _norm(x: Tensor, w: Weights, name: str) -> Tensor:
    """Layer norm in float32, as in openai-whisper."""
    shape = (x.shape[-1],)
    out = F.layer_norm(x.float(), shape, w[f"{name}.weight"].float(), w[f"{name}.bias"].float())
    return out.to(x.dtype)


def _linear(x: Tensor, w: Weights, name: str, tap: Tap) -> Tensor:
    y = F.linear(tap(f"{name}.in", x), w[f"{name}.weight"], w.get(f"{name}.bias"))
    return tap(f"{name}.out", y)


def _conv(x: Tensor, w: Weights, name: str, stride: int, tap: Tap) -> Tensor:
    x = tap(f"{name}.in", x)
    y = F.conv1d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=stride, padding=1)
    return F.gelu(tap(f"{name}.out", y))


def _split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def keys_values(
    memory: Tensor, w: Weights, name: str, tap: Tap = untapped
) -> tuple[Tensor, Tensor]:
    """Return keys and values [batch, heads, n, width / heads] of an attention."""
    return (
        _split(_linear(memory, w, f"{name}.key", tap)),
        _split(_linear(memory, w, f"{name}.value", tap)),
    )


def _attend(
    x: Tensor, kv: tuple[Tensor, Tensor], w: Weights, name: str, tap: Tap, causal: bool = False
) -> Tensor:
    q = _split(_linear(x, w, f"{name}.query", tap))
    out = F.scaled_dot_product_attention(q, *kv, is_causal=causal)
    return _linear(out.transpose(1, 2).flatten(2), w, f"{name}.out", tap)


def hidden_units(x: Tensor, w: Weights, name: str, tap: Tap = untapped) -> Tensor:
    """Return the units of a block's MLP before GELU: x [batch, n, width] to [batch, n, 4 width]."""
    return _linear(_norm(x, w, f"{name}.mlp_ln"), w, f"{name}.mlp.0", tap)


def _mlp(x: Tensor, w: Weights, name: str, tap: Tap) -> Tensor:
    y = _linear(F.gelu(hidden_units(x, w, name, tap)), w, f"{name}.mlp.2", tap)
    return tap(f"{name}.mlp_sum", x + y)


def after_attention(x: Tensor, w: Weights, name: str, tap: Tap = untapped) -> Tensor:
    """Run the self-attention of an encoder block."""
    normed = _norm(x, w, f"{name}.attn_ln")
    kv = keys_values(normed, w, f"{name}.attn", tap)
    return tap(f"{name}.attn_sum", x + _attend(normed, kv, w, f"{name}.attn", tap))


def encoder_input(mel: Tensor, w: Weights, tap: Tap = untapped) -> Tensor:
    """Return the input of the first block: mel [batch, 80, 2 n] to [batch, n, width]."""
    x = _conv(mel, w, "encoder.conv1", 1, tap)
    x = _conv(x, w, "encoder.conv2", 2, tap).transpose(1, 2)
    return tap("encoder.sum", x + w["encoder.positional_embedding"])


def encoder_blocks(
    x: Tensor, w: Weights, blocks: range, tap: Tap = untapped
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run blocks. Returns their output, and the residual behind each block."""
    behind = {}
    for i in blocks:
        x = after_attention(x, w, f"encoder.blocks.{i}", tap)
        x = behind[i] = _mlp(x, w, f"encoder.blocks.{i}", tap)
    return x, behind


def encoder_end(x: Tensor, w: Weights) -> Tensor:
    """Return the features."""
    return _norm(x, w, "encoder.ln_post")


def encode(mel: Tensor, w: Weights, tap: Tap = untapped, blocks: int = 4) -> Tensor:
    """Run the encoder: mel [batch, 80, 3000] to features [batch, 1500, width]."""
    return encoder_end(encoder_blocks(encoder_input(mel, w, tap), w, range(blocks), tap)[0], w)


def cross_keys_values(
    features: Tensor, w: Weights, tap: Tap = untapped, blocks: int = 3
) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of the audio for each decoder block."""
    return [keys_values(features, w, f"decoder.blocks.{i}.cross_attn", tap) for i in range(blocks)]


def decode(
    tokens: Tensor, cross: list[tuple[Tensor, Tensor]], w: Weights, tap: Tap = untapped
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the decoder over tokens [batch, n].

    Returns the normalized hidden states [batch, n, width], and by name the residual before and behind the
    MLP of each block.
    """
    x = w["decoder.token_embedding.weight"][tokens]
    x = tap("decoder.sum", x + w["decoder.positional_embedding"][: tokens.shape[1]])
    behind = {}
    for i, kv in enumerate(cross):
        name = f"decoder.blocks.{i}"
        normed = _norm(x, w, f"{name}.attn_ln")
        own = keys_values(normed, w, f"{name}.attn", tap)
        x = tap(f"{name}.attn_sum", x + _attend(normed, own, w, f"{name}.attn", tap, causal=True))
        normed = _norm(x, w, f"{name}.cross_attn_ln")
        x = tap(f"{name}.cross_sum", x + _attend(normed, kv, w, f"{name}.cross_attn", tap))
        behind[f"{name}.cross_sum"] = x
        x = behind[f"{name}.mlp_sum"] = _mlp(x, w, name, tap)
    return _norm(x, w, "decoder.ln"), behind


def logits(hidden: Tensor, w: Weights) -> Tensor:
    """Return the logits of hidden states."""
    return hidden @ w["decoder.token_embedding.weight"].T


@torch.no_grad()
def greedy(
    features: Tensor, w: Weights, prompt: list[int], end: int, tap: Tap = untapped
) -> list[list[int]]:
    """Return the text tokens that greedy decoding finds for features [batch, 1500, width]."""
    cross = cross_keys_values(features, w, tap)
    tokens = torch.tensor([prompt] * len(features))
    for _ in range(40):
        hidden, _ = decode(tokens, cross, w, tap)
        best = logits(hidden[:, -1], w).argmax(-1)
        ended = (tokens[:, len(prompt) :] == end).any(1)
        tokens = torch.cat([tokens, torch.where(ended, end, best)[:, None]], 1)
        if (tokens[:, -1] == end).all():
            break
    return [[t for t in row if t != end] for row in tokens[:, len(prompt) :].tolist()]
