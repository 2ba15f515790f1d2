"""The feed-forward half of a transformer block, under the checkpoint's own names."""

from torch import nn


def feed_forward(width: int, inner: int) -> nn.Sequential:
    """(1, T, width) to (1, T, width); parameters are `0.weight` … `2.bias`, as in openai-whisper."""
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
