"""The complete model in eager torch, without a cache: the reference of every lowered program.

`CachedDecoder` proposes tokens, which a pass without a cache verifies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import cast

import torch
from torch import Tensor, nn

from whisperport.model.checkpoint import Checkpoint
from whisperport.model.network.decoder import Decode, Decoder, DecoderBlock
from whisperport.model.network.encoder import Encoder
from whisperport.model.network.short_window import (
    POSITIONS,
    AudioPadding,
    shorten_checkpoint,
    silent_features,
)
from whisperport.program.dims import Dims
from whisperport.program.window import Window


class Whisper(nn.Module):
    """Encoder and decoder with a checkpoint's weights, in float32.

    `logits` computes all tokens in one pass. It uses the weights of the lowered programs but no
    self-attention cache, so that it detects faults in their cache, mask and positions.
    """

    def __init__(self, dims: Dims, window: Window | None = None) -> None:
        """Create the modules.

        Args:
            dims: sizes of the model; with `window`, those of the short window.
            window: a window shorter than the checkpoint's; None: the checkpoint's own.
        """
        super().__init__()
        self.dims = dims
        self.window = window
        self.padding = AudioPadding(window) if window else None
        self.encoder = Encoder(dims)
        self.decoder = Decoder(dims)

    @torch.no_grad()
    def encode(self, mel: Tensor) -> Tensor:
        """Encode mel (1, n_mels, 2T) into features (1, T, d)."""
        return cast(Tensor, self.encoder(mel))

    @torch.no_grad()
    def cross_kv(
        self, features: Tensor, *, padded: bool = True
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Project features (1, T, d) to keys (H, D, T) and values (H, T, D) of each layer.

        With a short window, keys and values are padded to its `context_positions`, unless `padded` is
        False.
        """
        attentions = [cast(DecoderBlock, block).cross_attn for block in self.decoder.blocks]
        if (pad := self.padding) is None or not padded:
            return tuple((a.keys(features), a.values(features)) for a in attentions)
        features = pad.pad_features(features)
        return tuple(
            (pad.pad_keys(a.keys(features)), pad.pad_values(a.values(features))) for a in attentions
        )

    @torch.no_grad()
    def logits(
        self,
        tokens: Tensor,
        cross_kv: tuple[tuple[Tensor, Tensor], ...],
        *,
        first: int = 0,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits after each token from the index `first` on: (S - first, V).

        Args:
            tokens: (S,) int64.
            cross_kv: keys and values of each layer, as `cross_kv` returns them.
            first: index of the first token whose logits are computed.
            positions: (S,) of the tokens; None: 0 to S - 1. A wrong graph may have others.
            mask: (S, S), added to the scores of self-attention; None: a token sees no later one.
        """
        hidden = self._hidden(tokens, cross_kv, positions, mask)[first:]
        return hidden @ self.decoder.token_embedding.weight.T

    def cross_scores(
        self,
        tokens: Tensor,
        cross_kv: tuple[tuple[Tensor, Tensor], ...],
        heads: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Compute the cross-attention scores of some heads before the softmax: (A, S, T).

        Args:
            tokens: (S,) int64.
            cross_kv: keys and values of each layer, as `cross_kv` returns them.
            heads: (layer, head) of each of the A heads.
        """
        queries = [layer_queries for _, layer_queries in self._layers(tokens, cross_kv)]
        return torch.stack(
            [queries[layer][head] @ cross_kv[layer][0][head] for layer, head in heads]
        )

    def unload(self) -> None:
        """Free the memory of the weights. The model cannot be used after this call.

        Deleting the model is not enough: the rewrite rules of onnxscript 0.7.2 keep a reference to the
        graph that they matched last, with its weights.
        """
        for parameter in self.parameters():
            parameter.data = torch.empty(0)

    def _hidden(
        self,
        tokens: Tensor,
        cross_kv: tuple[tuple[Tensor, Tensor], ...],
        positions: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """Return the normalized output of the last decoder layer: (S, d)."""
        *_, (x, _) = self._layers(tokens, cross_kv, positions, mask)
        return cast(Tensor, self.decoder.ln(x)[0])

    def _layers(
        self,
        tokens: Tensor,
        cross_kv: tuple[tuple[Tensor, Tensor], ...],
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the output (1, S, d) and the cross-attention queries (H, S, D) of each decoder layer."""
        decoder, length = self.decoder, tokens.shape[0]
        places = torch.arange(length) if positions is None else positions
        x = (decoder.token_embedding(tokens) + decoder.positional_embedding[places])[None]
        if mask is None:
            mask = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        for block, (keys, values) in zip(decoder.blocks, cross_kv, strict=True):
            x, queries = _decode_block(cast(DecoderBlock, block), x, mask, keys, values)
            yield x, queries


def _decode_block(
    block: DecoderBlock, x: Tensor, mask: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    attention, normed = block.attn, block.attn_ln(x)
    scores = torch.bmm(attention.queries(normed), attention.keys(normed)) + mask
    x = x + attention.merge(torch.bmm(scores.softmax(-1), attention.values(normed)))
    queries = block.cross_attn.queries(block.cross_attn_ln(x))
    x = x + block.cross_attn.attend(queries, keys, values)
    return x + cast(Tensor, block.mlp(block.mlp_ln(x))), queries


def build_model(checkpoint: Checkpoint, window: Window | None = None) -> Whisper:
    """Build the model with a checkpoint's weights, in float32 and evaluation mode.

    The parameters are created on the `meta` device and then assigned, so that no memory is allocated twice.

    Args:
        checkpoint: sizes and weights.
        window: a window shorter than the checkpoint's; None: the checkpoint's own.
    """
    if window is None:
        return _model(checkpoint, None)
    model = _model(shorten_checkpoint(checkpoint, window.positions), window)
    if window.padding == "silence":
        encoder = _model(checkpoint, None).encoder
        silence = silent_features(encoder, checkpoint.dims)
        padding = silence[:, window.positions : window.context_positions].clone()
        model.padding = AudioPadding(window, padding)
    return model


def shortened(model: Whisper, positions: int) -> Whisper:
    """Return the model for `positions` encoder positions and nothing behind them, with the same weights.

    Args:
        model: of the checkpoint's own window.
        positions: fewer than the model has.
    """
    with torch.device("meta"):
        short = Whisper(replace(model.dims, n_audio_ctx=positions))
    weights = model.state_dict()
    weights[POSITIONS] = weights[POSITIONS][:positions].clone()
    short.load_state_dict(weights, strict=True, assign=True)
    return short.eval().requires_grad_(False)


def _model(checkpoint: Checkpoint, window: Window | None) -> Whisper:
    with torch.device("meta"):
        model = Whisper(checkpoint.dims, window)
    weights = {name: tensor.float() for name, tensor in checkpoint.weights.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval().requires_grad_(False)


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

    @property
    def caches(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys (H, D, S) and values (H, S, D) of the tokens in self-attention, of each layer."""
        return tuple(zip(self._self_k, self._self_v, strict=True))

    def _keep_shared(self, tokens: list[int]) -> int:
        """Keep the cache rows of the leading tokens that are equal to `tokens`; return their number."""
        pairs = zip(self._tokens, tokens, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._self_k = [keys[:, :, :kept] for keys in self._self_k]
        self._self_v = [values[:, :kept] for values in self._self_v]
        return kept


def _joined(cached: list[Tensor], new: list[Tensor], *, axis: int) -> list[Tensor]:
    return [torch.cat(pair, dim=axis) for pair in zip(cached, new, strict=True)]
