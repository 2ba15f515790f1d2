"""Attention of the NCHW variants: rank 4, with the batch axis.

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

from whisperport.model.attention import Projections


def attend(block: Projections, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend from x (1, P, d) to y (1, T, d), with `mask` (P, T) added to the scores: (1, P, d)."""
    queries = _heads(block, cast(Tensor, block.query(x)) * block.head_width**-0.5)
    scores = torch.matmul(
        queries.permute(0, 2, 1, 3), _heads(block, block.key(y)).permute(0, 2, 3, 1)
    )
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    attended = torch.matmul(weights, _heads(block, block.value(y)).permute(0, 2, 1, 3))
    return cast(Tensor, block.out(attended.permute(0, 2, 1, 3).reshape(x.shape)))


def _heads(block: Projections, projected: Tensor) -> Tensor:
    """Split (1, T, d) into heads: (1, T, H, D)."""
    return projected.reshape(1, -1, block.n_head, block.head_width)
