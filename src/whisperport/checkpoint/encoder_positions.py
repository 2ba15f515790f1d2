"""The encoder's table of positions, computed where a file leaves it out."""

import math

import torch
from torch import Tensor


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width) float32: sines in the first half of the columns, cosines in the second.

    Their periods form a geometric row from 2π to 20000π positions; `width` is even and at least 4.
    From openai-whisper's `model.py`, whose encoder holds it as a buffer that is never trained.
    """
    half = width // 2
    step = math.log(10_000) / (half - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(half))[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)
