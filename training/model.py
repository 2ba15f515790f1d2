"""A Whisper model for training on a CPU, with bfloat16 in the slow parts and a compact softmax.

Parameter names are those of transformers' WhisperForConditionalGeneration, so that export copies them;
only the factored embedding is expanded. The architecture is Whisper's. The computation differs:

* matrix multiplications of the encoder run in bfloat16, the residual stream and the decoder in float32;
* the loss is over the classes of :class:`vocabulary.Vocabulary`;
* the scores of chosen cross-attention heads are returned too, for the alignment loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vocabulary import N_TIMES, Vocabulary


@dataclass(frozen=True)
class Dims:
    """Sizes of the model. ``alignment_heads``: (decoder layer, head) pairs trained to align tokens."""

    width: int = 128
    heads: int = 2
    encoder_layers: int = 4
    decoder_layers: int = 3
    mels: int = 80
    audio_positions: int = 1500
    text_positions: int = 448
    alignment_heads: tuple[tuple[int, int], ...] = ((1, 0), (2, 0))


def sinusoids(length: int, channels: int) -> Tensor:
    """Return Whisper's sinusoidal positions [length, channels]."""
    rates = torch.exp(-np.log(10000) / (channels // 2 - 1) * torch.arange(channels // 2))
    angles = torch.arange(length)[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input. Its parameters are float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )


class Attention(nn.Module):
    """Multi-head attention. ``k_proj`` has no bias, as in Whisper."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.k_proj = Linear(width, width, bias=False)
        self.v_proj = Linear(width, width)
        self.q_proj = Linear(width, width)
        self.out_proj = Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        """Split into heads: [batch, n, width] -> [batch * heads, n, width / heads]."""
        batch, n, width = x.shape
        return (
            x.view(batch, n, self.heads, -1)
            .transpose(1, 2)
            .reshape(batch * self.heads, n, width // self.heads)
        )

    def join(self, x: Tensor) -> Tensor:
        """Join heads: [batch * heads, n, width / heads] -> [batch, n, width]."""
        _, n, part = x.shape
        return x.view(-1, self.heads, n, part).transpose(1, 2).reshape(-1, n, self.heads * part)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend from ``x`` to ``memory``, or to ``x`` itself.

        The matrix multiplications run in the dtype of ``memory``, the softmax in the dtype of ``x``.
        Returns [batch, n, width] and the scores [batch * heads, n, m].
        """
        source = x if memory is None else memory
        q = self.split(self.q_proj(x) * self.scale).to(source.dtype)
        k, v = self.split(self.k_proj(source)), self.split(self.v_proj(source))
        scores = torch.bmm(q, k.transpose(1, 2)).to(x.dtype)
        if mask is not None:
            scores = scores + mask
        attended = torch.bmm(scores.softmax(-1).to(v.dtype), v).to(x.dtype)
        return self.out_proj(self.join(attended)), scores


class EncoderLayer(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.self_attn = Attention(dims.width, dims.heads)
        self.self_attn_layer_norm = nn.LayerNorm(dims.width)
        self.fc1 = Linear(dims.width, 4 * dims.width)
        self.fc2 = Linear(4 * dims.width, dims.width)
        self.final_layer_norm = nn.LayerNorm(dims.width)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x).to(dtype))[0]
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x).to(dtype))))


class DecoderLayer(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.self_attn = Attention(dims.width, dims.heads)
        self.self_attn_layer_norm = nn.LayerNorm(dims.width)
        self.encoder_attn = Attention(dims.width, dims.heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(dims.width)
        self.fc1 = Linear(dims.width, 4 * dims.width)
        self.fc2 = Linear(4 * dims.width, dims.width)
        self.final_layer_norm = nn.LayerNorm(dims.width)

    def forward(self, x: Tensor, audio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.self_attn_layer_norm(x), mask=mask)[0]
        attended, scores = self.encoder_attn(self.encoder_attn_layer_norm(x), audio)
        x = x + attended
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x)))), scores


class Encoder(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(dims.mels, dims.width, 3, padding=1)
        self.conv2 = nn.Conv1d(dims.width, dims.width, 3, stride=2, padding=1)
        self.register_buffer(
            "positions", sinusoids(dims.audio_positions, dims.width), persistent=False
        )
        self.layers = nn.ModuleList(EncoderLayer(dims) for _ in range(dims.encoder_layers))
        self.layer_norm = nn.LayerNorm(dims.width)

    def forward(self, mel: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Encode ``mel`` [batch, 80, 2 n]; ``offsets`` [batch] are the first positions of the windows.

        Returns the outputs [batch, n, width] of the last layer, normalized, and of the second layer.
        """
        x = mel.to(dtype)
        for conv in (self.conv1, self.conv2):
            x = F.gelu(
                F.conv1d(x, conv.weight.to(dtype), conv.bias.to(dtype), conv.stride, conv.padding)
            )
        x = x.transpose(1, 2).float()
        x = x + self.positions[offsets[:, None] + torch.arange(x.shape[1])]
        middle = x
        for i, layer in enumerate(self.layers):
            x = layer(x, dtype)
            middle = x if i == 1 else middle
        return self.layer_norm(x), middle


class Decoder(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.embed_positions = nn.Embedding(dims.text_positions, dims.width)
        self.layers = nn.ModuleList(DecoderLayer(dims) for _ in range(dims.decoder_layers))
        self.layer_norm = nn.LayerNorm(dims.width)


class Embedding(nn.Module):
    """The factored embedding.

    Each used token has a row, the timestamps are a linear map of sinusoids, and all other tokens share one
    row.
    """

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(len(vocabulary.tokens), width) * 0.03)
        self.other = nn.Parameter(torch.zeros(1, width))
        self.time_map = nn.Parameter(torch.randn(width, width) * 0.01)
        self.time_bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("times", sinusoids(N_TIMES, width), persistent=False)

    def table(self) -> Tensor:
        """Return the rows of all classes [classes, width]."""
        return torch.cat([self.rows, self.times @ self.time_map + self.time_bias, self.other])


class TrainableWhisper(nn.Module):
    """The model, its embedding, and two output heads that only the training uses."""

    def __init__(self, dims: Dims, vocabulary: Vocabulary, n_phones: int) -> None:
        super().__init__()
        self.dims = dims
        self.n_others = vocabulary.n_others
        self.encoder, self.decoder = Encoder(dims), Decoder(dims)
        self.embedding = Embedding(vocabulary, dims.width)
        self.phone_head = Linear(dims.width, n_phones)
        self.word_head = Linear(dims.width, len(vocabulary.tokens) + 1)
        with torch.no_grad():
            self.decoder.embed_positions.weight.copy_(
                0.1 * sinusoids(dims.text_positions, dims.width)
            )
            for name, parameter in self.named_parameters():
                if name.endswith(("out_proj.weight", "fc2.weight")):
                    parameter.mul_(0.5)

    def decode(
        self, classes: Tensor, offsets: Tensor, audio: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Decode ``classes`` [batch, n] whose first positions are ``offsets`` [batch].

        Returns the logits [batch, n, classes] and the scores of the alignment heads
        [batch, n, audio positions]. The logit of the last class includes log(number of its tokens).
        """
        batch, n = classes.shape
        table = self.embedding.table()
        positions = offsets[:, None] + torch.arange(n)
        positions = positions.clamp_max(
            self.dims.text_positions - 1
        )  # only padding exceeds the maximum
        x = table[classes] + self.decoder.embed_positions.weight[positions]
        mask = torch.full((n, n), -torch.inf).triu(1)
        aligned = []
        for i, layer in enumerate(self.decoder.layers):
            x, scores = layer(x, audio, mask)
            heads = scores.view(batch, self.dims.heads, n, -1)
            aligned += [heads[:, head] for layer_, head in self.dims.alignment_heads if layer_ == i]
        logits = self.decoder.layer_norm(x) @ table.T
        counts = torch.zeros(logits.shape[-1])
        counts[-1] = np.log(self.n_others)
        return logits + counts, aligned
