"""The `step_B` programs: the next token of each of B texts, so that weights are read once for all of them.

The rows of a batch share nothing but the weights: each has its own mask, cache and audio. With one token
per row, heads and rows are one axis without any permutation, and no tensor has more than three axes.
"""

from typing import cast

import torch
from torch import Tensor

from whisperport.model.attention import Projections
from whisperport.model.decoder import Decode, DecoderBlock


class BatchDecode(Decode):
    """The `step` program for B texts. The heads b·H to (b + 1)·H of every cache belong to row b."""

    def hidden(
        self,
        x: Tensor,
        mask: Tensor,
        self_k: list[Tensor],
        self_v: list[Tensor],
        cross_k: list[Tensor],
        cross_v: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Run all layers; the arguments are those of `forward`.

        Returns:
            The normalized output of the last layer (B, 1, d), the new keys (B·H, D, 1) and values
            (B·H, 1, D) of every layer, and no scores.
        """
        x = x.squeeze(1)  # (B, d): a runtime's matrix multiplication of rank 2 needs no reshapes
        new_k, new_v = [], []
        caches = zip(self_k, self_v, cross_k, cross_v, strict=True)
        for block, cached in zip(self.blocks, caches, strict=True):
            x, k, v = _run_layer(cast(DecoderBlock, block), x, mask, *cached)
            new_k.append(k)
            new_v.append(v)
        return self.ln(x).unsqueeze(1), new_k, new_v, []

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        self_k: list[Tensor],
        self_v: list[Tensor],
        cross_k: list[Tensor],
        cross_v: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Decode one token of each row.

        Args:
            x: (B, 1, d) embedding of each row's token plus its position.
            mask: (B, 1, N + 1) added to the self-attention scores of each row.
            self_k: L × (B·H, D, N) self-attention keys of each row's earlier tokens.
            self_v: L × (B·H, N, D) self-attention values of each row's earlier tokens.
            cross_k: L × (B·H, D, T) cross-attention keys of each row's audio.
            cross_v: L × (B·H, T, D) cross-attention values of each row's audio.

        Returns:
            Logits (B, V), or hidden states (1, B, d) if not `projected`; their `logsumexp` (B, 1) if
            `summed`; then L new keys (B·H, D, 1), then L new values (B·H, 1, D).
        """
        hidden, new_k, new_v, _ = self.hidden(x, mask, self_k, self_v, cross_k, cross_v)
        return (*self.results(hidden.permute(1, 0, 2)), *new_k, *new_v)


def _run_layer(
    block: DecoderBlock,
    x: Tensor,
    mask: Tensor,
    self_k: Tensor,
    self_v: Tensor,
    cross_k: Tensor,
    cross_v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer on x (B, d), as `DecoderBlock` does: the output (B, d), the new keys and values."""
    own, normed = block.attn, block.attn_ln(x)
    n_heads, n_cached = own.n_head, self_k.shape[2]
    q, new_k = _queries(own, normed), own.key(normed).reshape(-1, own.head_width, 1)
    new_v = own.value(normed).reshape(-1, 1, own.head_width)
    scores = torch.cat([torch.bmm(q, self_k), torch.bmm(q, new_k)], dim=-1)
    by_row = (
        scores.reshape(-1, n_heads, n_cached + 1) + mask
    )  # a row's mask is that of all its heads
    weights = torch.softmax(by_row, dim=-1).reshape(-1, 1, n_cached + 1)
    from_cache = torch.bmm(weights[:, :, :n_cached], self_v)
    from_new = torch.bmm(weights[:, :, n_cached:], new_v)
    x = x + _merge(own, from_cache + from_new)
    q = _queries(block.cross_attn, block.cross_attn_ln(x))
    weights = torch.softmax(torch.bmm(q, cross_k), dim=-1)
    x = x + _merge(block.cross_attn, torch.bmm(weights, cross_v))
    return x + cast(Tensor, block.mlp(block.mlp_ln(x))), new_k, new_v


def _queries(attention: Projections, x: Tensor) -> Tensor:
    """Project x (B, d) to scaled queries (B·H, 1, D)."""
    scaled = attention.query(x) * attention.head_width**-0.5
    return cast(Tensor, scaled).reshape(-1, 1, attention.head_width)


def _merge(attention: Projections, heads: Tensor) -> Tensor:
    """Join heads (B·H, 1, D), and apply the output projection: (B, d)."""
    rows = heads.reshape(-1, attention.n_head * attention.head_width)
    return cast(Tensor, attention.out(rows))
