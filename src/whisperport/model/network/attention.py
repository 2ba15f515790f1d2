"""Attention whose operators every target supports: rank-3 matmuls without shape arithmetic.

With a rank-4 `matmul`, XNNPACK does not delegate the `expand_copy` nodes; with `bmm` on (H, P, D) there are
none. Keys are stored transposed, (H, D, T), so that no target transposes the cache for every token.
"""

from typing import cast

import torch
from torch import Tensor, nn


class Projections(nn.Module):
    """The four projections of one attention block. Parameter names are openai-whisper's."""

    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.head_width = width // n_head
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def queries(self, x: Tensor) -> Tensor:
        """Project x (1, T, d) to scaled queries (H, T, D)."""
        scaled = self.query(x) * self.head_width**-0.5
        return cast(Tensor, scaled).reshape(-1, self.n_head, self.head_width).permute(1, 0, 2)

    def keys(self, x: Tensor) -> Tensor:
        """Project x (1, T, d) to transposed keys (H, D, T)."""
        keys = cast(Tensor, self.key(x))
        return keys.reshape(-1, self.n_head, self.head_width).permute(1, 2, 0)

    def values(self, x: Tensor) -> Tensor:
        """Project x (1, T, d) to values (H, T, D)."""
        values = cast(Tensor, self.value(x))
        return values.reshape(-1, self.n_head, self.head_width).permute(1, 0, 2)

    def merge(self, heads: Tensor) -> Tensor:
        """Join heads (H, T, D), and apply the output projection: (1, T, d)."""
        rows = heads.permute(1, 0, 2).reshape(1, -1, self.n_head * self.head_width)
        return cast(Tensor, self.out(rows))


class Attention(Projections):
    """Attention without a cache: the encoder's self-attention and the decoder's cross-attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries q (H, P, D) to keys k (H, D, T) and values v (H, T, D): (1, P, d)."""
        weights = torch.softmax(torch.bmm(q, k), dim=-1)
        return self.merge(torch.bmm(weights, v))

    def forward(self, x: Tensor) -> Tensor:
        """Apply self-attention: x (1, T, d) to (1, T, d)."""
        return self.attend(self.queries(x), self.keys(x), self.values(x))


class CachedAttention(Projections):
    """Causal self-attention over a KV cache of static length and the new tokens of a call."""

    def forward(
        self, x: Tensor, mask: Tensor, cache_k: Tensor, cache_v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to the cached and the new tokens, without concatenating cache and new keys.

        Args:
            x: (1, P, d) hidden states of the P new tokens.
            mask: (1, P, N + P) added to the scores: 0 where a token may attend, a large negative number
                elsewhere.
            cache_k: (H, D, N) keys of the earlier tokens, transposed.
            cache_v: (H, N, D) values of the earlier tokens.

        Returns:
            The output (1, P, d), the new keys (H, D, P) and the new values (H, P, D). The caller writes
            the new keys and values to the cache.
        """
        n_cached = cache_k.shape[2]
        q, new_k, new_v = self.queries(x), self.keys(x), self.values(x)
        scores = torch.cat([torch.bmm(q, cache_k), torch.bmm(q, new_k)], dim=-1) + mask
        weights = torch.softmax(scores, dim=-1)
        from_cache = torch.bmm(weights[:, :, :n_cached], cache_v)
        from_new = torch.bmm(weights[:, :, n_cached:], new_v)
        return self.merge(from_cache + from_new), new_k, new_v
