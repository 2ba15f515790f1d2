"""The decode programs: `cross_kv` once per window, `prefill` once per prompt, `step` once per token.

None of them takes audio features together with tokens, so nothing can project the sound's keys and
values again for every token. The host looks up embeddings, adds positions and writes the cache.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from whisperport.dims import Dims
from whisperport.model.attention import Attention, CachedAttention
from whisperport.model.feed_forward import feed_forward


class DecoderBlock(nn.Module):
    """One decoder layer; parameter names are the checkpoint's."""

    def __init__(self, width: int, n_head: int, inner: int) -> None:
        super().__init__()
        self.attn_ln = nn.LayerNorm(width)
        self.attn = CachedAttention(width, n_head)
        self.cross_attn_ln = nn.LayerNorm(width)
        self.cross_attn = Attention(width, n_head)
        self.mlp_ln = nn.LayerNorm(width)
        self.mlp = feed_forward(width, inner)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        self_k: Tensor,
        self_v: Tensor,
        cross_k: Tensor,
        cross_v: Tensor,
        heads: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """x (1, P, d) to (1, P, d), with the new self-attention keys (H, D, P) and values (H, P, D),
        and the cross-attention scores (1, P, T) of the heads asked for.
        """
        attended, new_k, new_v = self.attn(self.attn_ln(x), mask, self_k, self_v)
        x = x + attended
        queries = self.cross_attn.queries(self.cross_attn_ln(x))
        scores = [torch.bmm(queries[h : h + 1], cross_k[h : h + 1]) for h in heads]
        x = x + self.cross_attn.attend(queries, cross_k, cross_v)
        return x + cast(Tensor, self.mlp(self.mlp_ln(x))), new_k, new_v, scores


class Decoder(nn.Module):
    """Whisper's text decoder, holding the weights that the decode programs below share."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        width = dims.n_text_state
        self.token_embedding = nn.Embedding(dims.n_vocab, width)
        self.positional_embedding = nn.Parameter(torch.empty(dims.n_text_ctx, width))
        self.blocks = nn.ModuleList(
            DecoderBlock(width, dims.n_text_head, dims.n_text_ffn) for _ in range(dims.n_text_layer)
        )
        self.ln = nn.LayerNorm(width)


class CrossKV(nn.Module):
    """The `cross_kv` program: keys and values of the sound, for every decoder layer."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        blocks = [cast(DecoderBlock, block) for block in decoder.blocks]
        self.attentions = nn.ModuleList(block.cross_attn for block in blocks)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """features (1, T, d) to L keys (H, D, T), then L values (H, T, D)."""
        attentions = [cast(Attention, attention) for attention in self.attentions]
        keys = [attention.keys(features) for attention in attentions]
        values = [attention.values(features) for attention in attentions]
        return (*keys, *values)


class Decode(nn.Module):
    """Run P new rows against the caches: the `step` program with P = 1, and the others' base."""

    def __init__(self, decoder: Decoder, heads: Sequence[tuple[int, int]] = ()) -> None:
        """heads: (decoder layer, head) pairs whose scores `hidden` returns."""
        super().__init__()
        self.heads = tuple(heads)
        self.blocks = decoder.blocks
        self.ln = decoder.ln
        n_vocab, width = decoder.token_embedding.weight.shape
        self.head = nn.Linear(width, n_vocab, bias=False, device="meta")
        self.head.weight = (
            decoder.token_embedding.weight
        )  # tied, and constant: delegated as a linear

    def hidden(
        self,
        x: Tensor,
        mask: Tensor,
        self_k: list[Tensor],
        self_v: list[Tensor],
        cross_k: list[Tensor],
        cross_v: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """The last layer's rows (1, P, d), normalized, the new keys and values of every layer, and
        the scores (1, P, T) of each of `heads`.
        """
        new_k, new_v, scores = [], [], []
        caches = zip(self_k, self_v, cross_k, cross_v, strict=True)
        for layer, (block, cached) in enumerate(zip(self.blocks, caches, strict=True)):
            wanted = [head for of, head in self.heads if of == layer]
            x, k, v, found = block(x, mask, *cached, wanted)
            new_k.append(k)
            new_v.append(v)
            scores += found
        return self.ln(x), new_k, new_v, scores

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        self_k: list[Tensor],
        self_v: list[Tensor],
        cross_k: list[Tensor],
        cross_v: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """One token.

        x        (1, 1, d)      its embedding plus its position
        mask     (1, 1, N + 1)  added to the self-attention scores
        self_k   L × (H, D, N), self_v L × (H, N, D), cross_k L × (H, D, T), cross_v L × (H, T, D)
        returns  logits (1, V), then L new keys (H, D, 1), then L new values (H, 1, D)
        """
        rows, new_k, new_v, _ = self.hidden(x, mask, self_k, self_v, cross_k, cross_v)
        return (self.head(rows).reshape(1, -1), *new_k, *new_v)


class Align(Decode):
    """The `align` program: where in the sound the alignment heads look, for the times of words."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        self_k: list[Tensor],
        self_v: list[Tensor],
        cross_k: list[Tensor],
        cross_v: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """P rows of text; rows beyond its end are masked out by the caller and ignored.

        x        (1, P, d)
        mask     (1, P, N + P)
        returns  rows (1, P, d) that the embedding turns into logits; scores (A, P, T), before the
                 softmax, of the A alignment heads; L new keys (H, D, P); L new values (H, P, D)
        """
        rows, new_k, new_v, scores = self.hidden(x, mask, self_k, self_v, cross_k, cross_v)
        # Targets that join tensors join two at least.
        joined = torch.cat(scores) if len(scores) > 1 else scores[0]
        return (rows, joined, *new_k, *new_v)


class Prefill(Decode):
    """The `prefill` programs: P prompt rows at once, logits only of the rows asked for."""

    def forward(  # type: ignore[override]  # one input more than `step`
        self,
        x: Tensor,
        mask: Tensor,
        pick: Tensor,
        self_k: list[Tensor],
        self_v: list[Tensor],
        cross_k: list[Tensor],
        cross_v: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """P rows of a prompt; rows beyond its end are masked out by the caller and ignored.

        x        (1, P, d)
        mask     (1, P, N + P)
        pick     (1, R, P)      one row per logits wanted: 1 at its position, 0 elsewhere
        returns  logits (R, V), then L new keys (H, D, P), then L new values (H, P, D)
        """
        rows, new_k, new_v, _ = self.hidden(x, mask, self_k, self_v, cross_k, cross_v)
        picked = torch.bmm(pick, rows)
        return (self.head(picked).reshape(pick.shape[1], -1), *new_k, *new_v)
