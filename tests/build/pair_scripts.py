"""Encoder and decoder as the scripts of vendors and toolkits export them, of openai-whisper's model.

Each function follows the script that `forms.py` names: the same modules, shapes, names and opset.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("whisper")
import torch
import torch.nn.functional as F
from torch import nn
from whisper.model import ModelDimensions, MultiHeadAttention, Whisper


def model_of(checkpoint: Any) -> Any:
    """Return openai-whisper's model with the weights of a checkpoint."""
    names = [field.name for field in fields(ModelDimensions)]
    sizes = asdict(checkpoint.dims)
    model = Whisper(ModelDimensions(**{name: sizes[name] for name in names}))
    model.load_state_dict({name: w.float() for name, w in checkpoint.weights.items()}, strict=False)
    return model.eval().requires_grad_(False)


def export(
    module: Any, inputs: Sequence[Any], path: Path, names: list[str], outputs: list[str], opset: int
) -> None:
    """Export as the scripts do, with the exporter of their time."""
    used, MultiHeadAttention.use_sdpa = MultiHeadAttention.use_sdpa, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                tuple(inputs),
                path,
                input_names=names,
                output_names=outputs,
                opset_version=opset,
                dynamo=False,
            )
    finally:
        MultiHeadAttention.use_sdpa = used


def encoded(encoder: Any, x: Any, first: int) -> Any:
    """Encode a window whose positions begin at a row of the table."""
    x = F.gelu(encoder.conv1(x))
    x = F.gelu(encoder.conv2(x))
    x = x.flatten(2).permute(0, 2, 1)
    x = x + encoder.positional_embedding[first : first + x.shape[1]]
    for block in encoder.blocks:
        x = block(x)
    return encoder.ln_post(x)


class Encoder(nn.Module):
    def __init__(self, model: Any, first: int = 0) -> None:
        super().__init__()
        self.encoder, self.first = model.encoder, first

    def forward(self, x: Any) -> Any:
        return encoded(self.encoder, x, self.first)


def rockchip(model: Any, folder: Path) -> None:
    """rknn_model_zoo: 20 s with the last positions, 12 tokens without a cache."""
    mel = torch.zeros(1, 80, 2000)
    encoder = Encoder(model, first=500)
    export(encoder, [mel], folder / "whisper_encoder_base.onnx", ["x"], ["out"], 12)
    tokens = torch.zeros(1, 12, dtype=torch.long)
    names = ["tokens", "audio"]
    path = folder / "whisper_decoder_base.onnx"
    export(model.decoder, [tokens, encoder(mel)], path, names, ["out"], 12)


class SplitVocabulary(nn.Module):
    """hailo-whisper's decoder: the vocabulary in four parts."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Any, features: Any) -> Any:
        decoder = self.decoder
        x = decoder.token_embedding(ids) + decoder.positional_embedding[: ids.shape[1]]
        x = x.unsqueeze(1).transpose(1, -1).flatten(2).permute(0, 2, 1)
        for block in decoder.blocks:
            x = block(x, features, mask=decoder.mask)
        x = decoder.ln(x)
        table = decoder.token_embedding.weight
        n = len(table) // 4
        parts = [table[i * n : (i + 1) * n if i < 3 else len(table)] for i in range(4)]
        return torch.cat([torch.matmul(x, part.T) for part in parts], dim=-1)


def hailo(model: Any, folder: Path) -> None:
    """hailo-whisper: 10 s of rank 4, 32 tokens without a cache."""
    encoder = Encoder(model)
    for name in ("conv1", "conv2"):
        conv = getattr(model.encoder, name)
        stride = (1, conv.stride[0])
        flat = nn.Conv2d(conv.in_channels, conv.out_channels, (1, 3), stride, (0, 1))
        flat.weight.data, flat.bias.data = conv.weight.data[:, :, None], conv.bias.data
        setattr(model.encoder, name, flat)
    mel = torch.zeros(1, 80, 1, 1000)
    export(encoder, [mel], folder / "tiny_encoder_10s.onnx", ["x"], ["features"], 17)
    tokens = torch.zeros(1, 32, dtype=torch.long)
    names = ["decoder_input_ids", "encoder_hidden_states"]
    decoder = SplitVocabulary(model.decoder)
    path = folder / "tiny_decoder_10s.onnx"
    export(decoder, [tokens, encoder(mel)], path, names, ["logits"], 13)


class SplitHeads(nn.Module):
    """ai-hub-models' attention: a convolution for each head."""

    def __init__(self, attention: Any, *, is_cross: bool = False) -> None:
        super().__init__()
        width, heads = attention.query.weight.shape[0], attention.n_head
        size = width // heads

        def convs(linear: Any, scale: float = 1.0) -> Any:
            made = []
            for head in range(heads):
                rows = slice(head * size, (head + 1) * size)
                conv = nn.Conv2d(width, size, 1, bias=linear.bias is not None)
                conv.weight.data = linear.weight.data[rows, :, None, None] * scale
                if linear.bias is not None:
                    conv.bias.data = linear.bias.data[rows] * scale
                made.append(conv)
            return nn.ModuleList(made)

        self.q, self.out = convs(attention.query, size**-0.5), conv_of(attention.out)
        self.k, self.v = convs(attention.key), convs(attention.value)
        self.is_cross = is_cross

    def keys(self, x: Any) -> Any:
        return [conv(x).permute(0, 2, 1, 3) for conv in self.k]

    def values(self, x: Any) -> Any:
        return [conv(x).permute(0, 2, 3, 1) for conv in self.v]

    def forward(self, x: Any, past: Any = None, mask: Any = None) -> Any:
        x = x.permute(0, 3, 1, 2)
        queries = [conv(x).permute(0, 2, 3, 1) for conv in self.q]
        if self.is_cross:
            keys, values = torch.split(past[0], 1), torch.split(past[1], 1)
        else:
            keys, values = self.keys(x), self.values(x)
            if past is not None:
                keys = [torch.cat(p, -1) for p in zip(torch.split(past[0], 1), keys, strict=True)]
                values = [
                    torch.cat(p, -2) for p in zip(torch.split(past[1], 1), values, strict=True)
                ]
        scores = [torch.matmul(q, k) for q, k in zip(queries, keys, strict=True)]
        weights = [torch.softmax(s if mask is None else s + mask, -1) for s in scores]
        mixed = [torch.matmul(w, v) for w, v in zip(weights, values, strict=True)]
        result = self.out(torch.cat(mixed, -1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        new = (
            None if self.is_cross else (torch.cat(keys, 0)[..., 1:], torch.cat(values, 0)[:, :, 1:])
        )
        return result, new


def conv_of(linear: Any) -> Any:
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None)
    conv.weight.data = linear.weight.data[:, :, None, None]
    if linear.bias is not None:
        conv.bias.data = linear.bias.data
    return conv


class SplitBlock(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.attn = block, SplitHeads(block.attn)
        self.cross = SplitHeads(block.cross_attn, is_cross=True) if block.cross_attn else None
        self.up, self.down = conv_of(block.mlp[0]), conv_of(block.mlp[2])

    def forward(self, x: Any, past: Any = None, cross: Any = None, mask: Any = None) -> Any:
        rows, new = self.attn(self.block.attn_ln(x), past, mask)
        x = x + rows
        if self.cross is not None:
            x = x + self.cross(self.block.cross_attn_ln(x), cross)[0]
        y = F.gelu(self.up(self.block.mlp_ln(x).permute(0, 3, 1, 2)))
        return x + self.down(y).permute(0, 2, 3, 1), new


class SplitEncoder(nn.Module):
    """ai-hub-models' encoder: returns keys and values of the cross-attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        encoder = model.encoder
        self.encoder, self.n_rows = encoder, len(encoder.positional_embedding)
        self.blocks = nn.ModuleList(SplitBlock(block) for block in encoder.blocks)
        self.cross = nn.ModuleList(SplitHeads(b.cross_attn) for b in model.decoder.blocks)

    def forward(self, mel: Any) -> Any:
        x = F.gelu(self.encoder.conv2(F.gelu(self.encoder.conv1(mel))))
        x = (x.permute(0, 2, 1) + self.encoder.positional_embedding)[:, None]
        for block in self.blocks:
            x, _ = block(x)
        x = self.encoder.ln_post(x).permute(0, 3, 1, 2)
        return [torch.cat(part, 0) for a in self.cross for part in (a.keys(x), a.values(x))]


class SplitDecoder(nn.Module):
    """ai-hub-models' decoder: the cache moves by one place for each token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model.decoder
        self.blocks = nn.ModuleList(SplitBlock(block) for block in model.decoder.blocks)
        table = model.decoder.token_embedding.weight
        self.project = nn.Conv2d(table.shape[1], len(table), 1, bias=False)
        self.project.weight.data = table.data[:, :, None, None]

    def forward(self, ids: Any, mask: Any, *rest: Any) -> Any:
        *caches, position = rest
        pairs = [tuple(caches[i : i + 2]) for i in range(0, len(caches), 2)]
        n = len(self.blocks)
        x = self.decoder.token_embedding(ids) + self.decoder.positional_embedding[position.long()]
        x, outputs = x[None], []
        for i, block in enumerate(self.blocks):
            x, new = block(x, pairs[i], pairs[n + i], mask)
            outputs += new
        x = self.decoder.ln(x).permute(0, 3, 1, 2)
        return self.project(x), *outputs


class Embedded(nn.Module):
    """MTK_model_zoo's decoder: the host looks the embeddings up."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, embeddings: Any, features: Any) -> Any:
        decoder = self.decoder
        x = embeddings + decoder.positional_embedding[: embeddings.shape[1]]
        for block in decoder.blocks:
            x = block(x, features, mask=decoder.mask)
        return decoder.ln(x) @ decoder.token_embedding.weight.T


def mediatek(model: Any, folder: Path) -> None:
    """MTK_model_zoo: 30 s, 48 embeddings without a cache, and their table beside the `.tflite` files.

    Its converter is the vendor's; here it is Google's.
    """
    litert_torch = pytest.importorskip("litert_torch")
    mel, encoder = torch.zeros(1, 80, 3000), Encoder(model)
    embeddings = torch.zeros(1, 48, model.dims.n_text_state)
    used, MultiHeadAttention.use_sdpa = MultiHeadAttention.use_sdpa, False
    try:
        for name, module, inputs in (
            ("encoder_base_80x3000", encoder, (mel,)),
            ("decoder_base_48", Embedded(model.decoder), (embeddings, encoder(mel))),
        ):
            litert_torch.convert(module.eval(), inputs).export(str(folder / f"{name}.tflite"))
    finally:
        MultiHeadAttention.use_sdpa = used
    np.save(folder / "token_embedding.npy", model.decoder.token_embedding.weight.numpy())


def ai_hub(model: Any, folder: Path) -> None:
    """ai-hub-models: 30 s, a cache of 199 tokens that moves, -100 where nothing is seen."""
    heads, n_layer = model.decoder.blocks[0].attn.n_head, len(model.decoder.blocks)
    width = model.dims.n_text_state // heads
    pairs = [f"{kind}_cache_{{}}_{i}" for i in range(n_layer) for kind in "kv"]
    cross = [name.format("cross") for name in pairs]
    encoder = SplitEncoder(model)
    mel = torch.zeros(1, 80, 3000)
    export(encoder, [mel], folder / "encoder.onnx", ["input_features"], cross, 17)
    caches = [
        torch.zeros((heads, 1, width, n) if kind == "k" else (heads, 1, n, width))
        for n in (199, 1500)
        for _ in range(n_layer)
        for kind in "kv"
    ]
    inputs = [
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 200),
        *caches,
        torch.zeros(1, dtype=torch.int32),
    ]
    own = [name.format("self") for name in pairs]
    names = ["input_ids", "attention_mask", *(f"{n}_in" for n in own), *cross, "position_ids"]
    outputs = ["logits", *(f"{name}_out" for name in own)]
    export(SplitDecoder(model), inputs, folder / "decoder.onnx", names, outputs, 17)


class SmallEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(80, 16, 3, stride=2, padding=1)

    def forward(self, mel: Any) -> Any:
        return self.conv(mel).permute(0, 2, 1)


class SmallDecoder(nn.Module):
    """As openai-whisper computes the logits, without the layers before."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(2000, 16)

    def forward(self, tokens: Any, features: Any) -> Any:
        x = self.token_embedding(tokens) + features[:, :1]
        return x @ self.token_embedding.weight.T


def executorch(folder: Path) -> None:
    """Two methods that XNNPACK's partitioner lowers, but for the projection on the vocabulary."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    mel, tokens = torch.zeros(1, 80, 3000), torch.zeros(1, 4, dtype=torch.long)
    encoder, decoder = SmallEncoder().eval(), SmallDecoder().eval()
    programs = {
        "encoder": torch.export.export(encoder, (mel,)),
        "text_decoder": torch.export.export(decoder, (tokens, encoder(mel))),
    }
    lowered = to_edge_transform_and_lower(programs, partitioner=[XnnpackPartitioner()])
    (folder / "model.pte").write_bytes(lowered.to_executorch().buffer)
