"""Attention in the form that every target takes whole: rank-3 products, and no shape arithmetic.

A rank-4 `matmul` leaves `expand_copy` nodes outside XNNPACK; `bmm` on (heads, rows, width) does not.
Keys are kept transposed, (H, D, T), so that no target transposes a cache for every token.
"""

from typing import cast

import torch
from torch import Tensor, nn


class Projections(nn.Module):
    """The four projections of one attention block, under the checkpoint's own names."""

    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.head_width = width // n_head
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def queries(self, x: Tensor) -> Tensor:
        """x (1, T, d) to (H, T, D), scaled."""
        scaled = self.query(x) * self.head_width**-0.5
        return cast(Tensor, scaled).reshape(-1, self.n_head, self.head_width).permute(1, 0, 2)

    def keys(self, x: Tensor) -> Tensor:
        """x (1, T, d) to (H, D, T)."""
        keys = cast(Tensor, self.key(x))
        return keys.reshape(-1, self.n_head, self.head_width).permute(1, 2, 0)

    def values(self, x: Tensor) -> Tensor:
        """x (1, T, d) to (H, T, D)."""
        values = cast(Tensor, self.value(x))
        return values.reshape(-1, self.n_head, self.head_width).permute(1, 0, 2)

    def merge(self, heads: Tensor) -> Tensor:
        """heads (H, T, D) to (1, T, d), through the output projection."""
        rows = heads.permute(1, 0, 2).reshape(1, -1, self.n_head * self.head_width)
        return cast(Tensor, self.out(rows))


class Attention(Projections):
    """Attention over positions that are all known: the encoder's, and the decoder's over the sound."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (H, P, D), k (H, D, T), v (H, T, D) to (1, P, d)."""
        weights = torch.softmax(torch.bmm(q, k), dim=-1)
        return self.merge(torch.bmm(weights, v))

    def forward(self, x: Tensor) -> Tensor:
        """Self-attention: x (1, T, d) to (1, T, d)."""
        return self.attend(self.queries(x), self.keys(x), self.values(x))


class CachedAttention(Projections):
    """Attention over a cache of fixed length and the rows that are new in this call."""

    def forward(
        self, x: Tensor, mask: Tensor, cache_k: Tensor, cache_v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to cached and new rows without joining them in memory.

        x        (1, P, d)      the new rows
        mask     (1, P, N + P)  added to the scores: 0 where a row may look, large and negative elsewhere
        cache_k  (H, D, N)      keys of earlier rows, transposed
        cache_v  (H, N, D)      values of earlier rows
        returns  (1, P, d), and only the new keys (H, D, P) and values (H, P, D): the caller stores them
        """
        n_cached = cache_k.shape[2]
        q, new_k, new_v = self.queries(x), self.keys(x), self.values(x)
        scores = torch.cat([torch.bmm(q, cache_k), torch.bmm(q, new_k)], dim=-1) + mask
        weights = torch.softmax(scores, dim=-1)
        seen = torch.bmm(weights[:, :, :n_cached], cache_v)
        fresh = torch.bmm(weights[:, :, n_cached:], new_v)
        return self.merge(seen + fresh), new_k, new_v
