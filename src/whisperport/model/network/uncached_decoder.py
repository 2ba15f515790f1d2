"""The decoder without KV cache, for targets that keep no state. Every call computes all tokens."""

from typing import cast

import torch
from torch import Tensor, nn

from whisperport.model.network.decoder import Decoder, DecoderBlock, vocabulary_pieces
from whisperport.model.network.rank4 import attend
from whisperport.program.spec import UncachedForm

# -inf as in the published graphs that are known to compile; the targets that export this program name them.
# A finite value extends the range of the scores that a quantizer covers: with -30000, the step of 16-bit
# scores is 0.46.
MASKED = -torch.inf


class UncachedDecoder(nn.Module):
    """The `uncached_decoder` program, with the weights of a `Decoder`.

    The host looks up the embeddings of the tokens and joins the pieces of the logits, as for the published
    graphs. The targets that export this program name the source.
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
        self.heads = nn.ModuleList(vocabulary_pieces(decoder.token_embedding.weight, form.pieces))

    def forward(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, ...]:
        """Decode a sequence of S tokens. The caller ignores the outputs after its last token.

        Args:
            features: (1, T, d) output of the encoder.
            embeddings: (1, d, S, 1) embeddings of the tokens plus positions; or, if the graph adds the
                positions, (1, d, 1, S) embeddings only.

        Returns:
            The logits of each piece of the vocabulary, (1, S, V / pieces).
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
