"""An encoder that reads samples, and a decoder that keeps its cache: for apps whose programs hold state.

    encode   waveform ─ log-mel spectrogram ─ encoder ─ keys and values of the cross-attention, packed
    decode   token, position, packed keys and values ─ decoder with its cache inside ─ logits

Such an app hands the decoder whatever the encoder returned. Other exports return the encoder's features
there, so that the decoder projects them again for every token: the largest part of its work. Here they are
projected once.
"""

import math
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisperport.model.network.decoder import CrossKV, Decode
from whisperport.program.masks import MASKED
from whisperport.speech.audio.mel import DYNAMIC_RANGE, HOP_LENGTH, LOWEST, N_FFT, mel_filters

if TYPE_CHECKING:
    from whisperport.model.network.whisper import Whisper
    from whisperport.program.dims import Dims


class Spectrogram(nn.Module):
    """Compute the log-mel spectrogram of a window, as `whisperport.speech.audio.log_mel` does."""

    def __init__(self, dims: "Dims") -> None:
        super().__init__()
        self.n_samples = dims.n_frames * HOP_LENGTH
        n_bins = N_FFT // 2 + 1
        turns = torch.arange(n_bins, dtype=torch.float64)[:, None] * torch.arange(N_FFT) / N_FFT
        angles, hann = 2 * math.pi * turns, torch.hann_window(N_FFT, dtype=torch.float64)
        waves = torch.cat([angles.cos() * hann, angles.sin() * hann])
        self.transform = nn.Conv1d(1, 2 * n_bins, N_FFT, stride=HOP_LENGTH, bias=False)
        self.transform.weight = _constant(waves[:, None].float())
        filters = torch.from_numpy(mel_filters(dims.n_mels).copy())
        self.filters = nn.Conv1d(2 * n_bins, dims.n_mels, 1, bias=False)
        self.filters.weight = _constant(torch.cat([filters, filters], dim=1)[:, :, None])

    def forward(self, waveform: Tensor) -> Tensor:
        """Compute (1, n_mels, 2T) of 201 to 160 · 2T samples (n,), 16 kHz, within [-1, 1]."""
        samples = F.pad(waveform, (0, self.n_samples))[: self.n_samples]
        half = N_FFT // 2
        start, end = samples[1 : half + 1].flip(0), samples[-half - 1 : -1].flip(0)
        spectrum = self.transform(torch.cat([start, samples, end])[None, None])
        power = self.filters(spectrum * spectrum)[:, :, :-1]
        logs = power.clamp(min=LOWEST).log() * (1 / math.log(10))
        logs = torch.maximum(logs, logs.amax((1, 2), keepdim=True) - DYNAMIC_RANGE)
        return (logs + 4.0) * 0.25


class PackedAudio(nn.Module):
    """The encoder, and the keys and values of every decoder layer in one tensor."""

    def __init__(self, model: "Whisper") -> None:
        super().__init__()
        self.positions = model.dims.n_audio_ctx
        self.encoder, self.cross_kv = model.encoder, CrossKV(model.decoder)

    def forward(self, mel: Tensor) -> Tensor:
        """Encode mel (1, n_mels, 2T) into (1, T, 2·L·d): L keys (H, D, T), L values (H, T, D), flat."""
        layers = [rows.reshape(-1) for rows in self.cross_kv(self.encoder(mel))]
        return torch.cat(layers).reshape(1, self.positions, -1)


class Encode(nn.Module):
    """The method `encode`; `packed` is a `PackedAudio`, as it is or rewritten."""

    def __init__(self, dims: "Dims", packed: nn.Module) -> None:
        super().__init__()
        self.spectrogram, self.packed = Spectrogram(dims), packed

    def forward(self, waveform: Tensor) -> Tensor:
        """Encode samples (n,) into the packed keys and values (1, T, 2·L·d)."""
        return cast(Tensor, self.packed(self.spectrogram(waveform)))


class Step(nn.Module):
    """The decoder for one token, whose caches hold the layers one behind the other."""

    def __init__(self, model: "Whisper") -> None:
        super().__init__()
        self.dims, self.decode = model.dims, Decode(model.decoder)

    def forward(
        self, x: Tensor, mask: Tensor, keys: Tensor, values: Tensor, audio: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode one token.

        Args:
            x: (1, 1, d) embedding of the token plus its position.
            mask: (1, 1, N + 1) added to the self-attention scores.
            keys: (L·H, D, N) of the earlier tokens.
            values: (L·H, N, D) of the earlier tokens.
            audio: (1, T, 2·L·d) packed keys and values of the audio.

        Returns:
            Logits (1, 1, V), new keys (L·H, D, 1) and new values (L·H, 1, D).
        """
        n_layer, n_head = self.dims.n_text_layer, self.dims.n_text_head
        rows = audio.reshape(2 * n_layer * n_head, -1)  # of a head each
        n_audio, width = self.dims.n_audio_ctx, self.dims.n_text_state // n_head
        layers = [slice(i * n_head, (i + 1) * n_head) for i in range(2 * n_layer)]
        logits, *new = self.decode(
            x,
            mask,
            [keys[layer] for layer in layers[:n_layer]],
            [values[layer] for layer in layers[:n_layer]],
            [rows[layer].reshape(n_head, width, n_audio) for layer in layers[:n_layer]],
            [rows[layer].reshape(n_head, n_audio, width) for layer in layers[n_layer:]],
        )
        return logits[None], torch.cat(new[:n_layer]), torch.cat(new[n_layer:])


class DecodeToken(nn.Module):
    """The method `decode`: the tables of tokens and positions, and a cache that stays in the method.

    A position that is decoded again, as the first ones of the next window, overwrites its row; rows behind
    the position are masked.
    """

    def __init__(
        self, model: "Whisper", step: nn.Module, table: nn.Module, n_positions: int
    ) -> None:
        """Share the weights of `model`.

        Args:
            step: a `Step`, as it is or rewritten.
            table: from token to embedding.
            n_positions: N, tokens of the longest text with its prompt.
        """
        super().__init__()
        dims = model.dims
        self.step, self.table = step, table
        self.positions = _constant(model.decoder.positional_embedding[:n_positions].clone())
        # Row p: the p earlier tokens, and the token itself, which is the last column.
        masks = torch.full((n_positions, n_positions + 1), float(MASKED)).triu()
        masks[:, -1] = 0
        self.masks = _constant(masks)
        rows, width = dims.n_text_layer * dims.n_text_head, dims.n_text_state // dims.n_text_head
        self.register_buffer("keys", torch.zeros(rows, width, n_positions))
        self.register_buffer("values", torch.zeros(rows, n_positions, width))

    def forward(self, token: Tensor, position: Tensor, audio: Tensor) -> Tensor:
        """Return logits (1, 1, V) of a token (1, 1) int64 at a position (1,) int64."""
        x = self.table(token) + F.embedding(position, self.positions)
        mask = F.embedding(position, self.masks)[None]
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        logits, new_keys, new_values = self.step(x, mask, keys, values, audio)
        keys.index_copy_(2, position, new_keys)
        values.index_copy_(1, position, new_values)
        return cast(Tensor, logits)


class AudioSecond(nn.Module):
    """A `DecodeToken` for an app that gives the audio before the position."""

    def __init__(self, decode: nn.Module) -> None:
        super().__init__()
        self.decode = decode

    def forward(self, token: Tensor, audio: Tensor, position: Tensor) -> Tensor:
        """Return logits (1, 1, V); see `DecodeToken.forward`."""
        return cast(Tensor, self.decode(token, position, audio))


class Table(nn.Module):
    """The token embedding; the vocabulary projection has weights of its own."""

    def __init__(self, rows: Tensor, steps: Tensor | None = None) -> None:
        """Hold the table.

        Args:
            rows: (V, d), of any type.
            steps: (V, 1) factor of each row; None: 1.
        """
        super().__init__()
        self.rows = _constant(rows)
        self.steps = None if steps is None else _constant(steps)

    def forward(self, token: Tensor) -> Tensor:
        """Return the embeddings (1, P, d) float32 of tokens (1, P)."""
        embedded = F.embedding(token, self.rows).float()
        return embedded if self.steps is None else embedded * F.embedding(token, self.steps)


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
