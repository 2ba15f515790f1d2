"""The decoder with a cache, in eager torch. It proposes tokens, which a pass without a cache verifies."""

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from whisperport.model.network.decoder import Decode, Decoder


class CachedDecoder:
    """Computes logits of a growing list of tokens, and reuses the keys and values of earlier tokens."""

    def __init__(self, decoder: Decoder, cross_kv: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Args: `cross_kv`, the cross-attention keys (H, D, T) and values (H, T, D) of each layer."""
        self._decoder = decoder
        self._decode = Decode(decoder)
        self._cross_k, self._cross_v = (list(layers) for layers in zip(*cross_kv, strict=True))
        self._tokens: list[int] = []  # whose keys and values are cached
        self._self_k = [keys[:, :, :0] for keys in self._cross_k]  # L × (H, D, cached)
        self._self_v = [values[:, :0] for values in self._cross_v]  # L × (H, cached, D)

    @torch.no_grad()
    def __call__(self, tokens: list[int]) -> Tensor:
        """Return the logits (V,) after the last of `tokens`, which has at least one token."""
        n_known = self._keep_shared(tokens[:-1])
        n_new = len(tokens) - n_known
        embedded = self._decoder.token_embedding(torch.tensor(tokens[n_known:]))
        x = (embedded + self._decoder.positional_embedding[n_known : len(tokens)])[None]
        mask = torch.full((1, n_new, len(tokens)), -torch.inf).triu(n_known + 1)
        caches = (self._self_k, self._self_v, self._cross_k, self._cross_v)
        rows, new_k, new_v, _ = self._decode.hidden(x, mask, *caches)
        self._tokens = list(tokens)
        self._self_k = _joined(self._self_k, new_k, axis=2)
        self._self_v = _joined(self._self_v, new_v, axis=1)
        logits: Tensor = self._decode.head(rows[0, -1])
        return logits

    def _keep_shared(self, tokens: list[int]) -> int:
        """Keep the cache rows of the leading tokens that are equal to `tokens`; return their number."""
        pairs = zip(self._tokens, tokens, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._self_k = [keys[:, :, :kept] for keys in self._self_k]
        self._self_v = [values[:, :kept] for values in self._self_v]
        return kept


def _joined(cached: list[Tensor], new: list[Tensor], *, axis: int) -> list[Tensor]:
    return [torch.cat(pair, dim=axis) for pair in zip(cached, new, strict=True)]
