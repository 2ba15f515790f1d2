"""Models with a window shorter than 30 s: fewer encoder positions, and padding for the cross-attention.

The decoder was trained with cross-attention keys and values of 30 s. With fewer, all of speech, it does not
find the end of the text. The `cross_kv` program adds the padding, so the decoder programs and the engine
need no change.
"""

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisperport.model.checkpoint import Checkpoint
from whisperport.model.network.decoder import CrossKV, Decoder
from whisperport.program.dims import Dims
from whisperport.program.window import Window

POSITIONS = "encoder.positional_embedding"


class AudioPadding(nn.Module):
    """Padding of the cross-attention after the positions of the window, by kind.

    features         zeros after the encoder's output: the keys are 0, the values equal their bias
    keys-and-values  zeros after the keys and after the values
    silence          the encoder's output for 30 s of silence, at the padded positions
    """

    silence: Tensor

    def __init__(self, window: Window, silence: Tensor | None = None) -> None:
        """Keep the kind and the length of a window's padding.

        Args:
            window: the window.
            silence: (1, padded, d) features of silence; needed for the padding "silence" only.
        """
        super().__init__()
        self.kind, self.n_padded = window.padding, window.padded
        if silence is not None:
            self.register_buffer("silence", silence, persistent=False)

    def pad_features(self, features: Tensor) -> Tensor:
        """Pad features (1, T, d) to (1, context_positions, d), if the kind of padding does so."""
        if self.kind == "features":
            return F.pad(features, (0, 0, 0, self.n_padded))
        if self.kind == "silence":
            return torch.cat([features, self.silence], dim=1)
        return features

    def pad_keys(self, keys: Tensor) -> Tensor:
        """Pad keys (H, D, T) to (H, D, context_positions), if the kind of padding does so."""
        return F.pad(keys, (0, self.n_padded)) if self.kind == "keys-and-values" else keys

    def pad_values(self, values: Tensor) -> Tensor:
        """Pad values (H, T, D) to (H, context_positions, D), if the kind of padding does so."""
        return F.pad(values, (0, 0, 0, self.n_padded)) if self.kind == "keys-and-values" else values


class PaddedCrossKV(CrossKV):
    """The `cross_kv` program of a model with a short window."""

    def __init__(self, decoder: Decoder, padding: AudioPadding) -> None:
        super().__init__(decoder)
        self.padding = padding

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        """Project features (1, T, d) to L keys (H, D, C), then L values (H, C, D).

        C is the window's `context_positions`.
        """
        cross_kv = super().forward(self.padding.pad_features(features))
        n_layer = len(cross_kv) // 2
        keys = [self.padding.pad_keys(keys) for keys in cross_kv[:n_layer]]
        return (*keys, *(self.padding.pad_values(values) for values in cross_kv[n_layer:]))


def shorten_checkpoint(checkpoint: Checkpoint, positions: int) -> Checkpoint:
    """Return the checkpoint with only the first `positions` of the encoder's positional embedding."""
    table = checkpoint.weights[POSITIONS][:positions]
    return replace(
        checkpoint,
        dims=replace(checkpoint.dims, n_audio_ctx=positions),
        weights={**checkpoint.weights, POSITIONS: table},
    )


def silent_features(encoder: nn.Module, dims: Dims) -> Tensor:
    """Return the features of a window of silence: (1, T, d).

    Silence is zeros in the spectrogram, as in openai-whisper after the end of the audio.

    Args:
        encoder: the encoder of the checkpoint's own window.
        dims: sizes of the checkpoint.
    """
    with torch.no_grad():
        return cast(Tensor, encoder(torch.zeros(1, dims.n_mels, dims.n_frames)))
