"""The `rank4` variants of the decoder programs: attention with four axes, of which the first is 1.

They compute what the programs of `decoder.py` compute. Mask, logits and all K/V have one more axis, the
first one, of size 1, so the host passes its own arrays without a copy. Compilers for NPUs were made for
images: some reshape tensors to four axes, and published Whisper decoders for them have a mask and caches of
four. Targets that use these variants name the source.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from whisperport.model.network.attention import Attention
from whisperport.model.network.decoder import CrossKV, Decode, Decoder, DecoderBlock, Prefill
from whisperport.model.network.rank4_attention import keys, merge, queries, values
from whisperport.model.network.short_window import AudioPadding


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
