"""The decoder without KV cache, for targets that keep no state: it computes every token again."""

from typing import cast

import torch
from torch import Tensor, nn

from whisperport.model.decoder import Decoder, DecoderBlock
from whisperport.model.nchw_attention import attend
from whisperport.spec import UncachedForm

# As in the published graphs that are known to compile; the targets that export this program name them.
# A finite value would extend the range that a quantizer divides: with -30000, 16 bits leave the scores
# steps of 0.46.
MASKED = -torch.inf


class UncachedDecoder(nn.Module):
    """The `uncached_decoder` program, over the weights of `decoder`.

    The host looks up the tokens' embeddings and joins the pieces of the logits: published graphs are cut at
    the same places. The targets that export this program name their source.
    """

    causal: Tensor
    positions: Tensor

    def __init__(self, decoder: Decoder, form: UncachedForm) -> None:
        super().__init__()
        self.blocks, self.ln, self.form = decoder.blocks, decoder.ln, form
        causal = torch.full((form.sequence_length, form.sequence_length), MASKED).triu(1)
        self.register_buffer("causal", causal, persistent=False)
        if form.positions == "graph":
            positions = decoder.positional_embedding[: form.sequence_length].clone()
            self.register_buffer("positions", positions, persistent=False)
        self.heads = nn.ModuleList(_pieces(decoder.token_embedding.weight, form.pieces))

    def forward(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, ...]:
        """S tokens; earlier tokens do not attend to those after the last one, which the caller ignores.

        features    (1, T, d)     the output of the encoder
        embeddings  (1, d, S, 1)  of the tokens, with positions added, or
                    (1, d, 1, S)  without them, where the graph adds them
        returns     logits of each piece of the vocabulary, (1, S, V / pieces)
        """
        x = embeddings.flatten(2).permute(0, 2, 1)
        if self.form.positions == "graph":
            x = x + self.positions
        for block in (cast(DecoderBlock, block) for block in self.blocks):
            normed = block.attn_ln(x)
            x = x + attend(block.attn, normed, normed, self.causal)
            x = x + attend(block.cross_attn, block.cross_attn_ln(x), features)
            x = x + cast(Tensor, block.mlp(block.mlp_ln(x)))
        x = self.ln(x)
        return tuple(head(x) for head in self.heads)


def _pieces(table: Tensor, count: int) -> list[nn.Linear]:
    """Linear layers over consecutive parts of the vocabulary, whose sizes differ by 1 at most.

    51865 in four is 12966, 12966, 12966 and 12967, as in published graphs.
    """
    n_vocab, width = table.shape
    pieces = []
    for i in range(count):
        part = table[n_vocab * i // count : n_vocab * (i + 1) // count]
        piece = nn.Linear(width, len(part), bias=False, device="meta")
        piece.weight = nn.Parameter(part, requires_grad=False)
        pieces.append(piece)
    return pieces
