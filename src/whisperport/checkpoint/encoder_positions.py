"""Compute the encoder's positional embedding, for files that do not contain it."""

import math

import torch
from torch import Tensor


def sinusoids(length: int, width: int) -> Tensor:
    """Return sinusoidal positions: (length, width) float32.

    The first half of the columns are sines, the second half cosines. Their periods form a geometric
    sequence from 2π to 20000π positions.

    Args:
        length: number of positions.
        width: number of columns; even, at least 4.

    Source: openai-whisper's `model.py`, where the encoder has them as a constant buffer.
    """
    half = width // 2
    step = math.log(10_000) / (half - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(half))[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)
