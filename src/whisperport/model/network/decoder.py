"""The decoder programs: `cross_kv` once per window, `prefill` for the prompt, `step` once per token.

No program has both audio features and tokens as inputs, so cross-attention keys and values cannot be
projected again for every token. The host looks up embeddings, adds positions and writes the cache.
`vocab_projection` is separate where it has another placement than the decoder.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from whisperport.model.network.attention import Attention, CachedAttention, Projections
from whisperport.program.dims import Dims


class DecoderBlock(nn.Module):
    """One decoder layer. Parameter names are openai-whisper's."""

    def __init__(self, width: int, n_head: int, inner: int) -> None:
        super().__init__()
        self.attn_ln = nn.LayerNorm(width)
        self.attn = CachedAttention(width, n_head)
        self.cross_attn_ln = nn.LayerNorm(width)
        self.cross_attn = Attention(width, n_head)
        self.mlp_ln = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

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
        """Run the layer on P new tokens.

        Args:
            x: (1, P, d) hidden states of the new tokens.
            mask: (1, P, N + P) added to the self-attention scores.
            self_k: (H, D, N) self-attention keys of the earlier tokens.
            self_v: (H, N, D) self-attention values of the earlier tokens.
            cross_k: (H, D, T) cross-attention keys.
            cross_v: (H, T, D) cross-attention values.
            heads: cross-attention heads whose scores are returned.

        Returns:
            The output (1, P, d), the new self-attention keys (H, D, P) and values (H, P, D), and the
            cross-attention scores (1, P, T) of each of `heads`.
        """
        attended, new_k, new_v = self.attn(self.attn_ln(x), mask, self_k, self_v)
        x = x + attended
        queries = self.cross_attn.queries(self.cross_attn_ln(x))
        scores = [torch.bmm(queries[h : h + 1], cross_k[h : h + 1]) for h in heads]
        x = x + self.cross_attn.attend(queries, cross_k, cross_v)
        return x + cast(Tensor, self.mlp(self.mlp_ln(x))), new_k, new_v, scores


class TokenEmbedding(nn.Embedding):
    """An embedding that is not initialized on `meta`: torch 2.13 would import its compiler to do so."""

    def reset_parameters(self) -> None:
        """Initialize the weights, if they have memory."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Decoder(nn.Module):
    """Whisper's text decoder: the weights that the decoder programs share."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        width = dims.n_text_state
        self.token_embedding = TokenEmbedding(dims.n_vocab, width)
        self.positional_embedding = nn.Parameter(torch.empty(dims.n_text_ctx, width))
        self.blocks = nn.ModuleList(
            DecoderBlock(width, dims.n_text_head, dims.n_text_ffn) for _ in range(dims.n_text_layer)
        )
        self.ln = nn.LayerNorm(width)


class CrossKV(nn.Module):
    """The `cross_kv` program: the cross-attention keys and values of every decoder layer."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        blocks = [cast(DecoderBlock, block) for block in decoder.blocks]
        self.attentions = nn.ModuleList(block.cross_attn for block in blocks)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Project features (1, T, d) to L keys (H, D, T), then L values (H, T, D)."""
        attentions = [cast(Attention, attention) for attention in self.attentions]
        keys = [attention.keys(features) for attention in attentions]
        values = [attention.values(features) for attention in attentions]
        return (*keys, *values)


class Decode(nn.Module):
    """Run P new tokens with a KV cache: the `step` program with P = 1, and the base of other programs."""

    def __init__(
        self,
        decoder: Decoder,
        heads: Sequence[tuple[int, int]] = (),
        *,
        projected: bool = True,
        summed: bool = False,
    ) -> None:
        """Share the weights of `decoder`.

        Args:
            decoder: the decoder whose weights are used.
            heads: (layer, head) pairs of the cross-attention whose scores `hidden` returns.
            projected: return logits. False: return the hidden states that the program `vocab_projection`
                turns into logits, in place of them.
            summed: return, after the logits, the natural logarithm of the sum of their exponentials.
        """
        super().__init__()
        self.heads = tuple(heads)
        self.blocks = decoder.blocks
        self.ln = decoder.ln
        self.projected = projected
        self.summed = summed
        self.head: nn.Module = _projection(decoder) if projected else nn.Identity()

    def hidden(
        self, x: Tensor, mask: Tensor, *caches: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Run all layers; the arguments are those of `forward`: the four caches have an entry per layer.

        Returns:
            The normalized output of the last layer (1, P, d), the new keys (H, D, P) and values
            (H, P, D) of every layer, and the cross-attention scores (1, P, T) of each of `heads`.
        """
        new_k, new_v, scores = [], [], []
        for layer, (block, *cached) in enumerate(zip(self.blocks, *caches, strict=True)):
            heads = [head for of, head in self.heads if of == layer]
            x, k, v, layer_scores = self.run_layer(block, x, mask, *cached, heads=heads)
            new_k.append(k)
            new_v.append(v)
            scores += layer_scores
        return self.ln(x), new_k, new_v, scores

    def run_layer(
        self,
        block: nn.Module,
        x: Tensor,
        mask: Tensor,
        *caches: Tensor,
        heads: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Run one layer, with the arguments and results of `DecoderBlock.forward`."""
        return cast(tuple[Tensor, Tensor, Tensor, list[Tensor]], block(x, mask, *caches, heads))

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        self_k: list[Tensor],
        self_v: list[Tensor],
        cross_k: list[Tensor],
        cross_v: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Decode one token.

        Args:
            x: (1, 1, d) embedding of the token plus its position.
            mask: (1, 1, N + 1) added to the self-attention scores.
            self_k: L × (H, D, N) self-attention keys of the earlier tokens.
            self_v: L × (H, N, D) self-attention values of the earlier tokens.
            cross_k: L × (H, D, T) cross-attention keys.
            cross_v: L × (H, T, D) cross-attention values.

        Returns:
            Logits (1, V), or hidden states (1, 1, d) if not `projected`; their `logsumexp` (1, 1) if
            `summed`; then L new keys (H, D, 1), then L new values (H, 1, D).
        """
        hidden, new_k, new_v, _ = self.hidden(x, mask, self_k, self_v, cross_k, cross_v)
        return (*self.results(self.rows(hidden)), *new_k, *new_v)

    def rows(self, hidden: Tensor) -> Tensor:
        """Return hidden states as (1, R, d); a variant may have another order of axes."""
        return hidden

    def results(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs before the new keys and values from hidden states (1, R, d).

        Returns:
            The logits, or the hidden states if not `projected`; and if `summed`, the `logsumexp` (R, 1) of
            the logits.
        """
        if not self.projected:
            return (hidden,)
        logits = self.logits(hidden)
        return (logits, _log_sum_exp(logits)) if self.summed else (logits,)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (R, V) of hidden states (1, R, d)."""
        return cast(Tensor, self.head(hidden)).reshape(hidden.shape[1], -1)


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row of (R, V): (R, 1).

    If a logit is a NaN or +inf, it is not finite. It consists of operators that runtimes compute with
    vector instructions on several threads; ONNX Runtime's ReduceLogSumExp takes 5 times as long.
    """
    peak = logits.amax(-1, keepdim=True)
    return peak + (logits - peak).exp().sum(-1, keepdim=True).log()


def _projection(decoder: Decoder) -> nn.Linear:
    """Return the vocabulary projection, whose weight is tied to the embedding.

    The weight is constant, so that targets delegate a linear layer.
    """
    n_vocab, width = decoder.token_embedding.weight.shape
    head = nn.Linear(width, n_vocab, bias=False, device="meta")
    head.weight = decoder.token_embedding.weight
    return head


class Align(Decode):
    """The `align` program: cross-attention scores of the alignment heads, for word timestamps."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        self_k: list[Tensor],
        self_v: list[Tensor],
        cross_k: list[Tensor],
        cross_v: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Run P tokens of a text. The caller masks the positions after its end and ignores their outputs.

        Args:
            x: (1, P, d) embeddings plus positions.
            mask: (1, P, N + P) added to the self-attention scores.
            self_k: L × (H, D, N) self-attention keys of the earlier tokens.
            self_v: L × (H, N, D) self-attention values of the earlier tokens.
            cross_k: L × (H, D, T) cross-attention keys.
            cross_v: L × (H, T, D) cross-attention values.

        Returns:
            Hidden states (1, P, d), from which the caller computes logits; scores (A, P, T) of the A
            alignment heads, before the softmax; L new keys (H, D, P); L new values (H, P, D).
        """
        hidden, new_k, new_v, scores = self.hidden(x, mask, self_k, self_v, cross_k, cross_v)
        # Some targets do not support a concatenation of one tensor.
        joined = torch.cat(scores) if len(scores) > 1 else scores[0]
        return (hidden, joined, *new_k, *new_v)


class Prefill(Decode):
    """The `prefill` programs: P tokens of a prompt in one call, with logits at R chosen positions."""

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
        """Run P tokens of a prompt. The caller masks the positions after its end and ignores their outputs.

        Args:
            x: (1, P, d) embeddings plus positions.
            mask: (1, P, N + P) added to the self-attention scores.
            pick: (1, R, P) one row per position whose logits are needed: 1 at the position, 0 elsewhere.
            self_k: L × (H, D, N) self-attention keys of the earlier tokens.
            self_v: L × (H, N, D) self-attention values of the earlier tokens.
            cross_k: L × (H, D, T) cross-attention keys.
            cross_v: L × (H, T, D) cross-attention values.

        Returns:
            Logits (R, V), or hidden states (1, R, d) if not `projected`; then L new keys (H, D, P), then L
            new values (H, P, D).
        """
        hidden, new_k, new_v, _ = self.hidden(x, mask, self_k, self_v, cross_k, cross_v)
        return (*self.results(torch.bmm(pick, hidden)), *new_k, *new_v)


class VocabProjection(nn.Module):
    """The `vocab_projection` program, with the embedding of a `Decoder` as its weight.

    Args:
        decoder: the decoder whose token embedding is used.
        pieces: number of outputs, for targets on which one matmul as wide as the vocabulary is too large.
    """

    def __init__(self, decoder: Decoder, pieces: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList(vocabulary_pieces(decoder.token_embedding.weight, pieces))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Multiply a hidden state (1, 1, d) by the embedding: logits (1, 1, V / pieces) of each piece."""
        return tuple(head(hidden) for head in self.heads)


def vocabulary_pieces(table: Tensor, count: int) -> list[nn.Linear]:
    """Split the vocabulary into consecutive parts, and return a linear layer for each.

    The sizes of the parts differ by at most 1. 51865 tokens in four parts are 12966, 12966, 12966 and
    12967, as in the published graphs.

    Args:
        table: the token embedding (V, d).
        count: number of parts.
    """
    n_vocab, width = table.shape
    pieces = []
    for i in range(count):
        part = table[n_vocab * i // count : n_vocab * (i + 1) // count]
        piece = nn.Linear(width, len(part), bias=False, device="meta")
        piece.weight = nn.Parameter(part, requires_grad=False)
        pieces.append(piece)
    return pieces


class BatchDecode(Decode):
    """The `step` program for B texts, so that weights are read once for all of them.

    The rows of a batch share nothing but the weights: each has its own mask, cache and audio. The heads b·H
    to (b + 1)·H of every cache belong to row b. With one token per row, heads and rows are one axis without
    any permutation, and no tensor has more than three axes.

    `forward` has the arguments and results of `Decode.forward`: x (B, 1, d), the mask (B, 1, N + 1), keys
    (B·H, D, N) and values (B·H, N, D) of the self-attention, and of the cross-attention with T for N;
    logits (B, V), or hidden states (1, B, d), `logsumexp` (B, 1), new keys (B·H, D, 1) and values
    (B·H, 1, D).
    """

    def hidden(
        self, x: Tensor, mask: Tensor, *caches: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Run all layers; the arguments are those of `forward`.

        Returns:
            The normalized output of the last layer (B, 1, d), the new keys (B·H, D, 1) and values
            (B·H, 1, D) of every layer, and no scores.
        """
        # (B, d): a runtime's matrix multiplication of rank 2 needs no reshapes
        rows, new_k, new_v, scores = super().hidden(x.squeeze(1), mask, *caches)
        return rows.unsqueeze(1), new_k, new_v, scores

    def run_layer(
        self,
        block: nn.Module,
        x: Tensor,
        mask: Tensor,
        *caches: Tensor,
        heads: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Run one layer on x (B, d): the output (B, d), the new keys and values, and no scores."""
        assert isinstance(block, DecoderBlock)
        self_k, self_v, cross_k, cross_v = caches
        own, normed = block.attn, block.attn_ln(x)
        n_heads, n_cached = own.n_head, self_k.shape[2]
        q, new_k = _queries(own, normed), own.key(normed).reshape(-1, own.head_width, 1)
        new_v = own.value(normed).reshape(-1, 1, own.head_width)
        scores = torch.cat([torch.bmm(q, self_k), torch.bmm(q, new_k)], dim=-1)
        by_row = (
            scores.reshape(-1, n_heads, n_cached + 1) + mask
        )  # a row's mask is that of all its heads
        weights = torch.softmax(by_row, dim=-1).reshape(-1, 1, n_cached + 1)
        from_cache = torch.bmm(weights[:, :, :n_cached], self_v)
        from_new = torch.bmm(weights[:, :, n_cached:], new_v)
        x = x + _merge(own, from_cache + from_new)
        q = _queries(block.cross_attn, block.cross_attn_ln(x))
        weights = torch.softmax(torch.bmm(q, cross_k), dim=-1)
        x = x + _merge(block.cross_attn, torch.bmm(weights, cross_v))
        return x + cast(Tensor, block.mlp(block.mlp_ln(x))), new_k, new_v, []

    def rows(self, hidden: Tensor) -> Tensor:
        """Return hidden states (B, 1, d) as (1, B, d)."""
        return hidden.permute(1, 0, 2)


def _queries(attention: Projections, x: Tensor) -> Tensor:
    """Project x (B, d) to scaled queries (B·H, 1, D)."""
    scaled = attention.query(x) * attention.head_width**-0.5
    return cast(Tensor, scaled).reshape(-1, 1, attention.head_width)


def _merge(attention: Projections, heads: Tensor) -> Tensor:
    """Join heads (B·H, 1, D), and apply the output projection: (B, d)."""
    rows = heads.reshape(-1, attention.n_head * attention.head_width)
    return cast(Tensor, attention.out(rows))
