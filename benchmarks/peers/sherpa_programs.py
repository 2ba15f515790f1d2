"""The two programs that sherpa-onnx runs, as modules over the weights of an openai-whisper model.

Shapes: B 1, L layers, N positions of the cache, T positions of audio, d width. The cache holds K and V of
all positions; a run writes those from `offset` on.
"""

import torch
import whisper.tokenizer
from torch import nn
from torch.nn import functional


class EncoderWithCrossKV(nn.Module):
    """mel (B, n_mels, frames) -> K and V of the cross-attention of each layer, (L, B, T, d)."""

    def __init__(self, model):
        super().__init__()
        self.encoder, self.blocks = model.encoder, model.decoder.blocks
        self.n_head = model.dims.n_audio_head

    def forward(self, mel):
        x = functional.gelu(self.encoder.conv1(mel))
        x = functional.gelu(self.encoder.conv2(x)).permute(0, 2, 1)
        x = x + self.encoder.positional_embedding[: x.shape[1]]
        for block in self.encoder.blocks:
            attention, at = block.attn, block.attn_ln(x)
            q, k, v = attention.query(at), attention.key(at), attention.value(at)
            x = x + attention.out(attend(q, k, v, self.n_head))
            x = x + block.mlp(block.mlp_ln(x))
        x = self.encoder.ln_post(x)
        return (
            torch.stack([block.cross_attn.key(x) for block in self.blocks]),
            torch.stack([block.cross_attn.value(x) for block in self.blocks]),
        )


class DecoderWithCache(nn.Module):
    """Tokens (B, n), the cache, and the audio's K and V -> logits (B, n, n_vocab), and the new cache."""

    def __init__(self, model):
        super().__init__()
        self.decoder, self.n_head = model.decoder, model.dims.n_text_head

    def forward(self, tokens, self_k, self_v, cross_k, cross_v, offset):
        start, n = offset[0], tokens.shape[1]
        end = start + n
        x = self.decoder.token_embedding(tokens)
        x = x + self.decoder.positional_embedding[start:end]
        mask = self.decoder.mask[start:end, :end]
        new_k, new_v = [], []
        for layer, block in enumerate(self.decoder.blocks):
            at = block.attn_ln(x)
            k = torch.cat([self_k[layer, :, :start], block.attn.key(at)], dim=1)
            v = torch.cat([self_v[layer, :, :start], block.attn.value(at)], dim=1)
            x = x + block.attn.out(attend(block.attn.query(at), k, v, self.n_head, mask))
            new_k.append(torch.cat([k, self_k[layer, :, end:]], dim=1))
            new_v.append(torch.cat([v, self_v[layer, :, end:]], dim=1))
            query = block.cross_attn.query(block.cross_attn_ln(x))
            audio = attend(query, cross_k[layer], cross_v[layer], self.n_head)
            x = x + block.cross_attn.out(audio)
            x = x + block.mlp(block.mlp_ln(x))
        logits = self.decoder.ln(x) @ self.decoder.token_embedding.weight.T
        return logits, torch.stack(new_k), torch.stack(new_v)


def attend(q, k, v, n_head, mask=None):
    """Attention of several heads without a projection: (B, n, d), (B, m, d), (B, m, d) -> (B, n, d)."""
    q, k, v = (x.unflatten(2, (n_head, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


def metadata(dims, n_positions):
    """Return what sherpa-onnx reads from the encoder's file; it decodes `n_positions` / 2 tokens."""
    tokenizer = whisper.tokenizer.get_tokenizer(multilingual=True, language="en", task="transcribe")
    numbers = {
        "n_mels": dims.n_mels,
        "n_audio_ctx": dims.n_audio_ctx,
        "n_audio_state": dims.n_audio_state,
        "n_audio_head": dims.n_audio_head,
        "n_audio_layer": dims.n_audio_layer,
        "n_vocab": dims.n_vocab,
        "n_text_ctx": n_positions,
        "n_text_state": dims.n_text_state,
        "n_text_head": dims.n_text_head,
        "n_text_layer": dims.n_text_layer,
        "sot": tokenizer.sot,
        "sot_index": 0,
        "eot": tokenizer.eot,
        "blank_id": tokenizer.encode(" ")[0],
        "is_multilingual": 1,
        "no_speech": tokenizer.no_speech,
        "transcribe": tokenizer.transcribe,
        "translate": tokenizer.translate,
        "no_timestamps": tokenizer.no_timestamps,
    }
    lists = {
        "sot_sequence": tokenizer.sot_sequence,
        "all_language_tokens": tokenizer.all_language_tokens,
        "all_language_codes": tokenizer.all_language_codes,
    }
    joined = {name: ",".join(map(str, values)) for name, values in lists.items()}
    return {"model_type": "whisper", **{k: str(v) for k, v in numbers.items()}, **joined}
