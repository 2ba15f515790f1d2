"""Sizes of ggml's tensor types, and the values of the quantized ones.

A block of a quantized row holds 32 values: float16 scale, for the types `_1` float16 minimum, for five bits
the fifth bits of all values (32 bits), then the lower four bits of values i and i + 16 in byte i, or one
byte each.
Source: ggml-org/whisper.cpp@233fe1f, ggml/src/ggml-common.h and ggml-quants.c, dequantize_row_*.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # values in a block


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantized type."""

    name: str
    bits: int
    has_minimum: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of one block."""
        return 2 + 2 * self.has_minimum + self.bits * BLOCK // 8


FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
BLOCK_TYPES = {
    2: BlockType("Q4_0", 4, False),
    3: BlockType("Q4_1", 4, True),
    6: BlockType("Q5_0", 5, False),
    7: BlockType("Q5_1", 5, True),
    8: BlockType("Q8_0", 8, False),
}


def dequantize(blocks: Tensor, kind: BlockType) -> Tensor:
    """Compute the values of blocks, in float32 as ggml does.

    Args:
        blocks: (n, kind.n_bytes) uint8.
        kind: their type.

    Returns:
        (n, 32) float32.
    """
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    at = 2
    minimum = None
    if kind.has_minimum:
        minimum = blocks[:, 2:4].contiguous().view(torch.float16).float()
        at = 4
    if kind.bits == 8:
        return blocks[:, at:].contiguous().view(torch.int8).float().mul_(scale)
    fifth = None
    if kind.bits == 5:
        bits = torch.arange(8, dtype=torch.uint8)
        fifth = (blocks[:, at : at + 4, None] >> bits & 1).reshape(-1, BLOCK)
        at += 4
    low = torch.cat([blocks[:, at:] & 15, blocks[:, at:] >> 4], dim=1)
    whole = low if fifth is None else low + 16 * fifth
    if minimum is not None:
        return whole.float().mul_(scale).add_(minimum)
    return whole.float().sub_(1 << (kind.bits - 1)).mul_(scale)
