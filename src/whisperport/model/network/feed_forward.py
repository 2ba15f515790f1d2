"""The feed-forward network of a transformer layer, with openai-whisper's parameter names."""

from torch import nn


def feed_forward(width: int, inner: int) -> nn.Sequential:
    """Return a network of two linear layers: (1, T, width) to (1, T, width), with `inner` hidden units.

    Its parameters are `0.weight`, `0.bias`, `2.weight` and `2.bias`, as in openai-whisper.
    """
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
