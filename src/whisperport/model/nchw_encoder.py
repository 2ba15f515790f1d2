"""The `nchw` variant of the encoder: a channels-first 4-D input and rank-4 convolutions."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from whisperport.model.encoder import Encoder, EncoderBlock
from whisperport.model.rank4_attention import attend


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
