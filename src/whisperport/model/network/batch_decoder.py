"""The `step_B` programs: the next token of each of B texts, so that weights are read once for all of them.

The rows of a batch share nothing but the weights: each has its own mask, cache and audio. With one token
per row, heads and rows are one axis without any permutation, and no tensor has more than three axes.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from whisperport.model.network.attention import Projections
from whisperport.model.network.decoder import Decode, DecoderBlock


class BatchDecode(Decode):
    """The `step` program for B texts. The heads b·H to (b + 1)·H of every cache belong to row b.

    `forward` has the arguments and results of `Decode.forward`: x (B, 1, d), the mask (B, 1, N + 1), keys
    (B·H, D, N) and values (B·H, N, D) of the self-attention, and of the cross-attention with T for N;
    logits (B, V), or hidden states (1, B, d), `logsumexp` (B, 1), new keys (B·H, D, 1) and values
    (B·H, 1, D).
    """

    def hidden(
        self, x: Tensor, mask: Tensor, *caches: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Run all layers; the arguments are those of `forward`.

        Returns:
            The normalized output of the last layer (B, 1, d), the new keys (B·H, D, 1) and values
            (B·H, 1, D) of every layer, and no scores.
        """
        # (B, d): a runtime's matrix multiplication of rank 2 needs no reshapes
        rows, new_k, new_v, scores = super().hidden(x.squeeze(1), mask, *caches)
        return rows.unsqueeze(1), new_k, new_v, scores

    def run_layer(
        self,
        block: nn.Module,
        x: Tensor,
        mask: Tensor,
        *caches: Tensor,
        heads: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Run one layer on x (B, d): the output (B, d), the new keys and values, and no scores."""
        assert isinstance(block, DecoderBlock)
        self_k, self_v, cross_k, cross_v = caches
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
        return x + cast(Tensor, block.mlp(block.mlp_ln(x))), new_k, new_v, []

    def rows(self, hidden: Tensor) -> Tensor:
        """Return hidden states (B, 1, d) as (1, B, d)."""
        return hidden.permute(1, 0, 2)


def _queries(attention: Projections, x: Tensor) -> Tensor:
    """Project x (B, d) to scaled queries (B·H, 1, D)."""
    scaled = attention.query(x) * attention.head_width**-0.5
    return cast(Tensor, scaled).reshape(-1, 1, attention.head_width)


def _merge(attention: Projections, heads: Tensor) -> Tensor:
    """Join heads (B·H, 1, D), and apply the output projection: (B, d)."""
    rows = heads.reshape(-1, attention.n_head * attention.head_width)
    return cast(Tensor, attention.out(rows))
