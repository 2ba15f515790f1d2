"""The `encoder` program: computes audio features from a log-mel spectrogram.

`NchwEncoder` is its `nchw` variant: a channels-first 4-D input and rank-4 convolutions.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisperport.model.network.attention import Attention
from whisperport.model.network.rank4 import attend
from whisperport.program.dims import Dims


class EncoderBlock(nn.Module):
    """One encoder layer. Parameter names are openai-whisper's."""

    def __init__(self, width: int, n_head: int, inner: int) -> None:
        super().__init__()
        self.attn_ln = nn.LayerNorm(width)
        self.attn = Attention(width, n_head)
        self.mlp_ln = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: x (1, T, d) to (1, T, d)."""
        x = x + self.attn(self.attn_ln(x))
        return x + cast(Tensor, self.mlp(self.mlp_ln(x)))


class Encoder(nn.Module):
    """Whisper's audio encoder. Parameter names are openai-whisper's, without the prefix `encoder.`."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        width = dims.n_audio_state
        self.conv1 = nn.Conv1d(dims.n_mels, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.positional_embedding = nn.Parameter(torch.empty(dims.n_audio_ctx, width))
        self.blocks = nn.ModuleList(
            EncoderBlock(width, dims.n_audio_head, dims.n_audio_ffn)
            for _ in range(dims.n_audio_layer)
        )
        self.ln_post = nn.LayerNorm(width)

    def forward(self, mel: Tensor) -> Tensor:
        """Encode mel (1, n_mels, 2T) float32 into features (1, T, d)."""
        x = F.gelu(self.conv1(mel))
        x = F.gelu(self.conv2(x))
        x = x.permute(0, 2, 1) + self.positional_embedding
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.ln_post(x))


class NchwEncoder(nn.Module):
    """The encoder with the weights of an `Encoder`, in shapes that compilers of vision models support.

    The targets that use this variant name the source.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.conv1 = _conv2d(encoder.conv1)
        self.conv2 = _conv2d(encoder.conv2)
        self.positional_embedding = encoder.positional_embedding
        self.blocks = encoder.blocks
        self.ln_post = encoder.ln_post

    def forward(self, mel: Tensor) -> Tensor:
        """Encode mel (1, n_mels, 1, 2T) float32 into features (1, T, d)."""
        x = F.gelu(self.conv1(mel))
        x = F.gelu(self.conv2(x))
        x = x.flatten(2).permute(0, 2, 1) + self.positional_embedding
        for block in (cast(EncoderBlock, block) for block in self.blocks):
            normed = block.attn_ln(x)
            x = x + attend(block.attn, normed, normed)
            x = x + cast(Tensor, block.mlp(block.mlp_ln(x)))
        return cast(Tensor, self.ln_post(x))


def _conv2d(conv: nn.Conv1d) -> nn.Conv2d:
    """Return the convolution for inputs (1, channels, 1, frames), with the same weight in 4-D."""
    conv2d = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        kernel_size=(1, conv.kernel_size[0]),
        stride=(1, conv.stride[0]),
        padding=(0, int(conv.padding[0])),
        device="meta",
    )
    conv2d.weight = nn.Parameter(conv.weight.unsqueeze(2), requires_grad=False)
    conv2d.bias = conv.bias
    return conv2d
