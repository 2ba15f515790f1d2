"""Whisper as openai-whisper and transformers write it, in programs: tensors in, tensors out.

Odd sizes: one layer, width 48, 3 heads, 50 encoder positions, 11 tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from whisperport.model.trace.program import Program, trace

TOKENS = torch.arange(1, 12)[None]
FEATURES = torch.zeros(1, 50, 48)
MEL = torch.zeros(1, 80, 100)


class Encoder(nn.Module):
    """transformers' encoder returns an object of its own; a program returns tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, mel: Tensor) -> Tensor:
        return self.encoder(mel).last_hidden_state


class Decoder(nn.Module):
    """transformers' decoder with its projection, which shares its weight with the embedding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.projection = model.model.decoder, model.proj_out

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        found = self.decoder(input_ids=tokens, encoder_hidden_states=features, use_cache=False)
        return self.projection(found.last_hidden_state)


class FusedAttention(nn.Module):
    """Queries, keys and values by one matmul, then five axes, as timm's and many speech encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        split = self.qkv(x).reshape(batch, rows, 3, 3, width // 3).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(batch, rows, width))


def small_openai(random_openai_whisper: Callable[..., Any]) -> Any:
    return random_openai_whisper(
        n_audio_ctx=50,
        n_audio_state=48,
        n_audio_head=3,
        n_audio_layer=1,
        n_text_ctx=40,
        n_text_state=48,
        n_text_head=3,
        n_text_layer=1,
    )


def small_transformers(random_hf_whisper: Callable[..., Any], attention: str) -> Any:
    model = random_hf_whisper(
        d_model=48,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=80,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        decoder_ffn_dim=80,
        max_source_positions=50,
        max_target_positions=40,
    )
    model.set_attn_implementation(attention)
    return model


def third_party_programs(
    random_hf_whisper: Callable[..., Any], random_openai_whisper: Callable[..., Any]
) -> dict[str, Program]:
    """Their encoders and decoders, with each form of attention, as torch.export gives them."""
    openai = small_openai(random_openai_whisper)
    found = {
        "fused attention": trace("theirs", FusedAttention(), (FEATURES,)),
        "openai-whisper's encoder": trace("theirs", openai.encoder, (MEL,)),
        "openai-whisper's decoder": trace("theirs", openai.decoder, (TOKENS.int(), FEATURES)),
    }
    for attention in ("eager", "sdpa"):
        model = small_transformers(random_hf_whisper, attention)
        found |= {
            f"transformers' {attention} encoder": trace("theirs", Encoder(model), (MEL,)),
            f"transformers' {attention} decoder": trace(
                "theirs", Decoder(model), (TOKENS, FEATURES)
            ),
        }
    return found
