"""The whole model in eager torch, without a cache: what every lowered program is held against."""

from typing import cast

import torch
from torch import Tensor, nn

from whisperport.checkpoint import Checkpoint
from whisperport.dims import Dims
from whisperport.model.decoder import Decoder, DecoderBlock
from whisperport.model.encoder import Encoder
from whisperport.model.short_window import AudioPadding, shortened, silent_features
from whisperport.window import Window


class Whisper(nn.Module):
    """Encoder and decoder with a checkpoint's weights, in float32.

    `logits` recomputes every row from the tokens alone. It shares the weights of the lowered programs
    and none of their self-attention cache, so a fault in cache, mask or position shows.
    """

    def __init__(self, dims: Dims, window: Window | None = None) -> None:
        """window: where it is not the checkpoint's own; `dims` are then of that window."""
        super().__init__()
        self.dims = dims
        self.window = window
        self.padding = AudioPadding(window) if window else None
        self.encoder = Encoder(dims)
        self.decoder = Decoder(dims)

    @torch.no_grad()
    def encode(self, mel: Tensor) -> Tensor:
        """mel (1, n_mels, 2T) to features (1, T, d)."""
        return cast(Tensor, self.encoder(mel))

    @torch.no_grad()
    def cross_kv(
        self, features: Tensor, *, padded: bool = True
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """features (1, T, d) to cross-attention keys (H, D, T) and values (H, T, D) of each layer.

        With a short window, keys and values are padded to the positions that are heard, unless told
        otherwise.
        """
        attentions = [cast(DecoderBlock, block).cross_attn for block in self.decoder.blocks]
        if (pad := self.padding) is None or not padded:
            return tuple((a.keys(features), a.values(features)) for a in attentions)
        features = pad.of_features(features)
        return tuple(
            (pad.of_keys(a.keys(features)), pad.of_values(a.values(features))) for a in attentions
        )

    @torch.no_grad()
    def logits(
        self, tokens: Tensor, cross_kv: tuple[tuple[Tensor, Tensor], ...], *, first: int = 0
    ) -> Tensor:
        """tokens (S,) int64 and what `cross_kv` gave to logits (S - first, V), from row `first` on."""
        rows = self._hidden(tokens, cross_kv)[first:]
        return rows @ self.decoder.token_embedding.weight.T

    def unload(self) -> None:
        """Free the weights, whatever still refers to the parameters; the model cannot be used any more.

        The rewrite rules of onnxscript 0.7.2 keep the graph that they matched last, with its weights.
        """
        for parameter in self.parameters():
            parameter.data = torch.empty(0)

    def _hidden(self, tokens: Tensor, cross_kv: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
        """The decoder's rows (S, d), normalized."""
        decoder, n_rows = self.decoder, tokens.shape[0]
        x = (decoder.token_embedding(tokens) + decoder.positional_embedding[:n_rows])[None]
        mask = torch.full((n_rows, n_rows), -torch.inf).triu(1)
        for block, (keys, values) in zip(decoder.blocks, cross_kv, strict=True):
            x = _decode_block(cast(DecoderBlock, block), x, mask, keys, values)
        return cast(Tensor, decoder.ln(x)[0])


def _decode_block(
    block: DecoderBlock, x: Tensor, mask: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    attention, normed = block.attn, block.attn_ln(x)
    scores = torch.bmm(attention.queries(normed), attention.keys(normed)) + mask
    x = x + attention.merge(torch.bmm(scores.softmax(-1), attention.values(normed)))
    queries = block.cross_attn.queries(block.cross_attn_ln(x))
    x = x + block.cross_attn.attend(queries, keys, values)
    return x + cast(Tensor, block.mlp(block.mlp_ln(x)))


def build_model(checkpoint: Checkpoint, window: Window | None = None) -> Whisper:
    """The model with this checkpoint's weights, float32, in evaluation mode.

    Parameters are created on the `meta` device and then assigned, so nothing is allocated twice.
    """
    if window is None:
        return _model(checkpoint, None)
    model = _model(shortened(checkpoint, window.positions), window)
    if window.padding == "silence":
        whole = _model(checkpoint, None).encoder
        model.padding = AudioPadding(window, silent_features(whole, window, checkpoint.dims))
    return model


def _model(checkpoint: Checkpoint, window: Window | None) -> Whisper:
    with torch.device("meta"):
        model = Whisper(checkpoint.dims, window)
    weights = {name: tensor.float() for name, tensor in checkpoint.weights.items()}
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval().requires_grad_(False)
