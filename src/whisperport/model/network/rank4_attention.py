"""Attention of rank 4, with the batch axis, for the `nchw` and `rank4` variants.

    x (1,P,d) ─ query · s ─ reshape (1,P,H,D) ─ perm (1,H,P,D) ─┐
    y (1,T,d) ─ key ─────── reshape (1,T,H,D) ─ perm (1,H,D,T) ─┴─ matmul ─ + mask ─ softmax ─┐
    y (1,T,d) ─ value ───── reshape (1,T,H,D) ─ perm (1,H,T,D) ────────────────────────────┴─ matmul ─┐
                                            out ◄─ reshape (1,P,d) ─ perm (1,P,H,D) ◄─ (1,H,P,D) ──────┘

Compilers of vision models are known to have compiled encoders and decoders of these shapes. For the rank-3
matmuls of the other variants, which have no batch axis, no such case is known. The targets that use these
variants name the source.
"""

from typing import cast

import torch
from torch import Tensor

from whisperport.model.network.attention import Projections


def queries(block: Projections, x: Tensor) -> Tensor:
    """Project x (1, P, d) to scaled queries (1, H, P, D)."""
    return _heads(block, cast(Tensor, block.query(x)) * block.head_width**-0.5).permute(0, 2, 1, 3)


def keys(block: Projections, y: Tensor) -> Tensor:
    """Project y (1, T, d) to transposed keys (1, H, D, T)."""
    return _heads(block, block.key(y)).permute(0, 2, 3, 1)


def values(block: Projections, y: Tensor) -> Tensor:
    """Project y (1, T, d) to values (1, H, T, D)."""
    return _heads(block, block.value(y)).permute(0, 2, 1, 3)


def merge(block: Projections, heads: Tensor, x: Tensor) -> Tensor:
    """Join heads (1, H, P, D), and apply the output projection: a tensor of the shape of x (1, P, d)."""
    return cast(Tensor, block.out(heads.permute(0, 2, 1, 3).reshape(x.shape)))


def attend(block: Projections, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend from x (1, P, d) to y (1, T, d), with `mask` (P, T) added to the scores: (1, P, d)."""
    scores = torch.matmul(queries(block, x), keys(block, y))
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return merge(block, torch.matmul(weights, values(block, y)), x)


def _heads(block: Projections, projected: Tensor) -> Tensor:
    """Split (1, T, d) into heads: (1, T, H, D)."""
    return projected.reshape(1, -1, block.n_head, block.head_width)
