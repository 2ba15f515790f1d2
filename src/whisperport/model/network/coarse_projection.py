"""The vocabulary projection with weights of 8 bits, and a bound on the error of each logit.

A step on a CPU takes as long as reading its weights, most of which are the token embedding. With 8 bits
there are a quarter of the bytes. The bound tells which tokens can win, and only these are computed in
float32; see `runtime/engine/coarse.py`.
"""

import math

import torch
from torch import Tensor, nn

from whisperport.errors import LoweringError
from whisperport.model.network.decoder import Decoder

LEVELS = 127  # the largest absolute value of an 8-bit weight; the smallest is its negative
ZERO = 128  # how the weight 0 is stored, in an unsigned byte
LARGEST_BLOCK, SMALLEST_BLOCK = 128, 16
# Rounding of float32 sums, relative to the lengths of both vectors: 2^-24 for each of 64 partial sums.
ROUNDING = 2**-18
TINY = 1e-20  # avoids a division by 0, and bounds of 0 where squares of weights are too small for float32


@torch.library.custom_op("whisperport::matmul_8bits", mutates_args=())
def matmul_8bits(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply rows by the transpose of a matrix of 8-bit weights.

    Args:
        x: (1, R, d).
        weight: (V, d / block, block) uint8; 128 stands for 0.
        scales: (V, d / block) float32, of each block of weights.

    Returns:
        (1, R, V).
    """
    rows, blocks = weight.shape[:2]
    table = (weight.float() - ZERO) * scales.reshape(rows, blocks, 1)
    return x @ table.reshape(rows, -1).transpose(0, 1)


@matmul_8bits.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class CoarseProjection(nn.Module):
    """The `coarse_projection` program, with the embedding of a `Decoder` in 8 bits.

    A runtime may quantize the rows of x to 8 bits too, in the same blocks. Therefore x is given in two
    rows: its part that 8 bits can express, and the rest, whose own error is 127 times smaller.

    Raises:
        LoweringError: the width is not a multiple of 16.
    """

    weight: Tensor
    scales: Tensor
    limits: Tensor

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        table = decoder.token_embedding.weight.detach()
        self.block = block_of(table.shape[1])
        blocks = table.reshape(len(table), -1, self.block)
        scales = blocks.abs().amax(2, keepdim=True).clamp_min(TINY) / LEVELS
        levels = (blocks / scales).round()
        rounded = levels * scales
        self.register_buffer("weight", (levels + ZERO).to(torch.uint8))
        self.register_buffer("scales", scales.squeeze(2))
        size = rounded.norm(dim=2)
        error = (blocks - rounded).norm(dim=2) + ROUNDING * size + TINY
        self.register_buffer("limits", torch.cat([error, size], dim=1).transpose(0, 1).contiguous())

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (1, 1, V) of a hidden state (1, 1, d), and a bound (1, 1, V) on their errors."""
        x = hidden.reshape(-1, self.block)
        steps = x.abs().amax(1, keepdim=True).clamp_min(TINY) / LEVELS
        first = (x / steps).round() * steps
        rest = x - first
        rows = torch.cat([first.reshape(1, 1, -1), rest.reshape(1, 1, -1)], dim=1)
        logits = matmul_8bits(rows, self.weight, self.scales)
        # By Cauchy and Schwarz, per block. A value of `rest` is rounded to a 127th of the largest one.
        lengths = (x * x).sum(1).sqrt()
        rounding = rest.abs().amax(1) * (math.sqrt(self.block) / LEVELS)
        bound = torch.cat([lengths, rounding]).reshape(1, 1, -1) @ self.limits
        return logits[:, :1] + logits[:, 1:], bound


def block_of(width: int) -> int:
    """Return the number of weights that share a scale: the largest power of two that divides the width.

    Raises:
        LoweringError: the width is not a multiple of 16.
    """
    block = math.gcd(width, LARGEST_BLOCK)
    if block < SMALLEST_BLOCK:
        raise LoweringError(
            f"`coarse_projection` cannot be made of a decoder whose width {width} is not a multiple of "
            f"{SMALLEST_BLOCK}",
            why=f"weights of 8 bits have a scale for each {SMALLEST_BLOCK} to {LARGEST_BLOCK} of them",
            hint="export without a placement of `coarse_projection`",
        )
    return block
