"""Measure how far scores of hidden tokens can exceed those of visible ones, for the value of the mask."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from whisperport.model.network.attention import CachedAttention
from whisperport.model.network.decoder import Decode, Decoder

CrossKV = Sequence[tuple[Tensor, Tensor]]


@torch.no_grad()
def score_spread(decoder: Decoder, texts: Iterable[tuple[CrossKV, Sequence[int]]]) -> float:
    """Return the largest difference between a hidden score and the largest visible one of the same query.

    The rows of the cache that a mask hides may hold zeros or the keys of any other token: a later token of
    a prompt, the padding of a prompt, or a token of an earlier text. Every query of the texts is therefore
    compared with every key of the texts.

    Args:
        decoder: the model's decoder.
        texts: for each text, the cross-attention keys (H, D, T) and values (H, T, D) of each layer, and its
            tokens with the prompt.

    Returns:
        The largest difference over all layers, heads and queries; at least 0, because a token attends to
        itself and may also be stored as a hidden one.
    """
    layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in decoder.blocks]
    for cross_kv, tokens in texts:
        for layer, pair in zip(layers, _queries_and_keys(decoder, cross_kv, tokens), strict=True):
            layer.append(pair)
    return max((_spread(layer) for layer in layers if layer), default=0.0)


def _queries_and_keys(
    decoder: Decoder, cross_kv: CrossKV, tokens: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return queries (H, P, D) and keys (H, D, P + 1) of each layer: P tokens, then one row of padding."""
    attentions = [cast(CachedAttention, block.attn) for block in decoder.blocks]
    inputs: list[Tensor] = []
    hooks = [
        attention.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for attention in attentions
    ]
    try:
        count = len(tokens)
        embedded = decoder.token_embedding(torch.tensor(list(tokens)))
        x = torch.zeros(1, count + 1, embedded.shape[1])
        x[0, :count] = embedded + decoder.positional_embedding[:count]
        mask = torch.full((1, count + 1, count + 1), -torch.inf).triu(1)
        cross_k, cross_v = (list(tensors) for tensors in zip(*cross_kv, strict=True))
        none = [keys[:, :, :0] for keys in cross_k], [values[:, :0] for values in cross_v]
        Decode(decoder).hidden(x, mask, *none, cross_k, cross_v)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        (attention.queries(x)[:, :count], attention.keys(x))
        for attention, x in zip(attentions, inputs, strict=True)
    ]


def _spread(texts: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest difference of one layer: queries (H, P, D) and keys (H, D, P + 1) of each text."""
    stored = torch.cat([keys for _, keys in texts], dim=2)
    return max(float((_hidden(q, stored) - _visible(q, keys)).max()) for q, keys in texts)


def _hidden(queries: Tensor, stored: Tensor) -> Tensor:
    """Return the largest score of each query (H, P) with any stored key, or 0 for a row of zeros."""
    return torch.bmm(queries, stored).amax(dim=2).clamp(min=0)


def _visible(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the largest score of each query (H, P) with the tokens up to its own."""
    count = queries.shape[1]
    later = torch.full((count, count), -torch.inf).triu(1)
    return (torch.bmm(queries, keys[:, :, :count]) + later).amax(dim=2)
