"""Attention of the NCHW variants: with the batch axis, in rank 4.

    x (1,P,d) ─ query · s ─ reshape (1,P,H,D) ─ perm (1,H,P,D) ─┐
    y (1,T,d) ─ key ─────── reshape (1,T,H,D) ─ perm (1,H,D,T) ─┴─ matmul ─ + mask ─ softmax ─┐
    y (1,T,d) ─ value ───── reshape (1,T,H,D) ─ perm (1,H,T,D) ────────────────────────────┴─ matmul ─┐
                                            out ◄─ reshape (1,P,d) ─ perm (1,P,H,D) ◄─ (1,H,P,D) ──────┘

Compilers of vision models are known to have compiled encoders and decoders of these shapes. Of the rank-3
products of the other variants, which drop the batch axis, none is known. The targets that choose these
variants name their source.
"""

from typing import cast

import torch
from torch import Tensor

from whisperport.model.attention import Projections


def attend(block: Projections, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """x (1, P, d) attends to y (1, T, d), with `mask` (P, T) added to the scores: (1, P, d)."""
    queries = _heads(block, cast(Tensor, block.query(x)) * block.head_width**-0.5)
    scores = torch.matmul(
        queries.permute(0, 2, 1, 3), _heads(block, block.key(y)).permute(0, 2, 3, 1)
    )
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    seen = torch.matmul(weights, _heads(block, block.value(y)).permute(0, 2, 1, 3))
    return cast(Tensor, block.out(seen.permute(0, 2, 1, 3).reshape(x.shape)))


def _heads(block: Projections, rows: Tensor) -> Tensor:
    """rows (1, T, d) to (1, T, H, D)."""
    return rows.reshape(1, -1, block.n_head, block.head_width)
