"""Attention of four axes, the first of size 1: of the `nchw` variants, and decoder programs with it.

    x (1,P,d) ─ query · s ─ reshape (1,P,H,D) ─ perm (1,H,P,D) ─┐
    y (1,T,d) ─ key ─────── reshape (1,T,H,D) ─ perm (1,H,D,T) ─┴─ matmul ─ + mask ─ softmax ─┐
    y (1,T,d) ─ value ───── reshape (1,T,H,D) ─ perm (1,H,T,D) ────────────────────────────┴─ matmul ─┐
                                            out ◄─ reshape (1,P,d) ─ perm (1,P,H,D) ◄─ (1,H,P,D) ──────┘

The programs compute what those of `decoder.py` compute. Mask, logits and all K/V have one more axis, the
first one, of size 1, so the host passes its own arrays without a copy. Compilers for NPUs were made for
images: some reshape tensors to four axes, and they are known to have compiled encoders and decoders of
these shapes, with a mask and caches of four axes. For the rank-3 matmuls of the other variants, no such
case is known. Targets that use these variants name the source. `UncachedDecoder` is for those that keep no
state: every call computes all tokens.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from whisperport.model.network.attention import Attention, Projections
from whisperport.model.network.decoder import (
    CrossKV,
    Decode,
    Decoder,
    DecoderBlock,
    Prefill,
    vocabulary_pieces,
)
from whisperport.model.network.short_window import AudioPadding
from whisperport.program.spec import UncachedForm


def queries(block: Projections, x: Tensor) -> Tensor:
    """Project x (1, P, d) to scaled queries (1, H, P, D)."""
    return _heads(block, cast(Tensor, block.query(x)) * block.head_width**-0.5).permute(0, 2, 1, 3)


def keys(block: Projections, y: Tensor) -> Tensor:
    """Project y (1, T, d) to transposed keys (1, H, D, T)."""
    return _heads(block, block.key(y)).permute(0, 2, 3, 1)


def values(block: Projections, y: Tensor) -> Tensor:
    """Project y (1, T, d) to values (1, H, T, D)."""
    return _heads(block, block.value(y)).permute(0, 2, 1, 3)


def merge(block: Projections, heads: Tensor, x: Tensor) -> Tensor:
    """Join heads (1, H, P, D), and apply the output projection: a tensor of the shape of x (1, P, d)."""
    return cast(Tensor, block.out(heads.permute(0, 2, 1, 3).reshape(x.shape)))


def attend(block: Projections, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend from x (1, P, d) to y (1, T, d), with `mask` (P, T) added to the scores: (1, P, d)."""
    scores = torch.matmul(queries(block, x), keys(block, y))
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return merge(block, torch.matmul(weights, values(block, y)), x)


def _heads(block: Projections, projected: Tensor) -> Tensor:
    """Split (1, T, d) into heads: (1, T, H, D)."""
    return projected.reshape(1, -1, block.n_head, block.head_width)


class Rank4CrossKV(CrossKV):
    """The `cross_kv` program with keys and values of four axes."""

    def __init__(self, decoder: Decoder, padding: AudioPadding | None = None) -> None:
        super().__init__(decoder)
        self.padding = padding

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Project features (1, T, d) to L keys (1, H, D, C), then L values (1, H, C, D).

        C is T, or with a short window its `context_positions`.
        """
        attentions = [cast(Attention, attention) for attention in self.attentions]
        if (pad := self.padding) is None:
            return (
                *(keys(attention, features) for attention in attentions),
                *(values(attention, features) for attention in attentions),
            )
        padded = pad.pad_features(features)
        return (
            *(pad.pad_keys(keys(attention, padded)) for attention in attentions),
            *(pad.pad_values(values(attention, padded)) for attention in attentions),
        )


class Rank4Decode(Decode):
    """The `step` program with attention of four axes, and the base of `Rank4Prefill`.

    `forward` has the arguments and results of `Decode.forward`. The mask, all K/V and the logits (1, 1, V)
    have one more axis, the first one, of size 1.
    """

    def run_layer(
        self,
        block: nn.Module,
        x: Tensor,
        mask: Tensor,
        *caches: Tensor,
        heads: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Run one layer: the output (1, P, d), new keys (1, H, D, P) and values (1, H, P, D), no scores."""
        assert isinstance(block, DecoderBlock)
        self_k, self_v, cross_k, cross_v = caches
        normed, n_cached = block.attn_ln(x), self_k.shape[3]
        q = queries(block.attn, normed)
        new_k, new_v = keys(block.attn, normed), values(block.attn, normed)
        scores = torch.cat([torch.matmul(q, self_k), torch.matmul(q, new_k)], dim=-1) + mask
        weights = torch.softmax(scores, dim=-1)
        from_cache = torch.matmul(weights[..., :n_cached], self_v)
        from_new = torch.matmul(weights[..., n_cached:], new_v)
        x = x + merge(block.attn, from_cache + from_new, x)
        q = queries(block.cross_attn, block.cross_attn_ln(x))
        weights = torch.softmax(torch.matmul(q, cross_k), dim=-1)
        x = x + merge(block.cross_attn, torch.matmul(weights, cross_v), x)
        return x + cast(Tensor, block.mlp(block.mlp_ln(x))), new_k, new_v, []

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (1, R, V) of hidden states (1, R, d)."""
        return cast(Tensor, self.head(hidden))


class Rank4Prefill(Rank4Decode, Prefill):
    """The `prefill` programs with attention of four axes: `Prefill.forward`, with logits (1, R, V)."""


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
