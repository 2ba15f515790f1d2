"""A third-party Whisper decoder: [1, 32] tokens, no KV cache, full attention, one vocabulary projection."""

import torch
from torch import Tensor, nn

WIDTH, HEADS, TOKENS, POSITIONS = 24, 2, 32, 20
VOCABULARY = 51_865


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(source)), split(self.value(source))
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        if mask is not None:
            scores = scores + mask
        attended = torch.softmax(scores, dim=-1) @ v
        return self.out(attended.transpose(1, 2).reshape(1, -1, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.own(normed, normed, mask)
        x = x + self.cross(self.norms[1](x), features)
        return x + self.mlp(self.norms[2](x))


class ThirdPartyDecoder(nn.Module):
    """Logits (1, 32, 51865) of 32 tokens and the encoder's features.

    Args:
        reshape: pass the embedded tokens through (1, d, 32, 1), as published graphs do.
    """

    def __init__(self, *, reshape: bool = True, blocks: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(40, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.reshape = nn.LayerNorm(WIDTH), reshape

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[-1]]
        x = nn.functional.dropout(x, 0.1, self.training)
        if self.reshape:
            x = x.unsqueeze(1).transpose(1, -1).flatten(2).permute(0, 2, 1)
        rows = tokens.shape[-1]
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        for block in self.blocks:
            x = block(x, features, mask)
        return self.norm(x) @ self.embedding.weight.T


def third_party_decoder(*, reshape: bool = True) -> torch.export.ExportedProgram:
    """Return the exported decoder with random weights."""
    torch.manual_seed(0)
    inputs = torch.zeros(1, TOKENS, dtype=torch.long), torch.zeros(1, POSITIONS, WIDTH)
    return torch.export.export(ThirdPartyDecoder(reshape=reshape).eval(), inputs, strict=False)
