"""A model of shorter windows: the first positions of its table, and padding for the cross-attention.

The decoder was trained on keys and values of 30 s. Given fewer, all of them of speech, it does not find
the end. Padding is part of the `cross_kv` program, so the encoder's output goes straight into it, and
neither the decode programs nor the engine know of it.
"""

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisperport.checkpoint import Checkpoint
from whisperport.dims import Dims
from whisperport.model.decoder import CrossKV, Decoder
from whisperport.window import Window

POSITIONS = "encoder.positional_embedding"


class AudioPadding(nn.Module):
    """What follows the sound in the decoder's cross-attention.

    features         rows of zeros after the encoder's output: keys are 0, values their bias
    keys-and-values  zeros after the keys and the values
    silence          what the encoder makes of silence at these positions of a whole window
    """

    silence: Tensor

    def __init__(self, window: Window, silence: Tensor | None = None) -> None:
        """silence (1, padded, d), for the padding of that name."""
        super().__init__()
        self.kind, self.rows = window.padding, window.padded
        if silence is not None:
            self.register_buffer("silence", silence, persistent=False)

    def of_features(self, features: Tensor) -> Tensor:
        """features (1, T, d) to (1, T or heard, d)."""
        if self.kind == "features":
            return F.pad(features, (0, 0, 0, self.rows))
        if self.kind == "silence":
            return torch.cat([features, self.silence], dim=1)
        return features

    def of_keys(self, keys: Tensor) -> Tensor:
        """keys (H, D, T) to (H, D, heard)."""
        return F.pad(keys, (0, self.rows)) if self.kind == "keys-and-values" else keys

    def of_values(self, values: Tensor) -> Tensor:
        """values (H, T, D) to (H, heard, D)."""
        return F.pad(values, (0, 0, 0, self.rows)) if self.kind == "keys-and-values" else values


class PaddedCrossKV(CrossKV):
    """The `cross_kv` program of a short window."""

    def __init__(self, decoder: Decoder, padding: AudioPadding) -> None:
        super().__init__(decoder)
        self.padding = padding

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """features (1, T, d) to L keys (H, D, heard), then L values (H, heard, D)."""
        cross_kv = super().forward(self.padding.of_features(features))
        n_layer = len(cross_kv) // 2
        keys = [self.padding.of_keys(keys) for keys in cross_kv[:n_layer]]
        return (*keys, *(self.padding.of_values(values) for values in cross_kv[n_layer:]))


def shortened(checkpoint: Checkpoint, positions: int) -> Checkpoint:
    """The checkpoint with the first `positions` rows of the encoder's table of positions."""
    table = checkpoint.weights[POSITIONS][:positions]
    return replace(
        checkpoint,
        dims=replace(checkpoint.dims, n_audio_ctx=positions),
        weights={**checkpoint.weights, POSITIONS: table},
    )


def silent_features(encoder: nn.Module, window: Window, dims: Dims) -> Tensor:
    """What the whole encoder makes of a silent window, at the positions padded: (1, padded, d).

    Silence is zeros in the spectrogram: with them openai-whisper fills a window after the sound's end.
    """
    with torch.no_grad():
        features = cast(Tensor, encoder(torch.zeros(1, dims.n_mels, dims.n_frames)))
    return features[:, window.positions : window.context_positions].clone()
