"""Write checkpoints in the formats of CTranslate2 and whisper.cpp, as their converters do."""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whisperport.program.dims import Dims

CT2_FUSED = {
    "self_attention/linear_0": ("attn.query", "attn.key", "attn.value"),
    "self_attention/linear_1": ("attn.out",),
    "attention/linear_0": ("cross_attn.query",),
    "attention/linear_1": ("cross_attn.key", "cross_attn.value"),
    "attention/linear_2": ("cross_attn.out",),
    "ffn/linear_0": ("mlp.0",),
    "ffn/linear_1": ("mlp.2",),
}
CT2_NORMS = {
    "self_attention/layer_norm": "attn_ln",
    "attention/layer_norm": "cross_attn_ln",
    "ffn/layer_norm": "mlp_ln",
}
CT2_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
NUMBERS = {
    "decoder/activation": 3,
    "decoder/alignment_layer": -1,
    "decoder/pre_norm": 1,
    "decoder/scale_embeddings": 0,
}


def ctranslate2_variables(dims: Dims, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of `model.bin`: name -> tensor."""
    import torch

    found = {
        "encoder/conv1/weight": weights["encoder.conv1.weight"],
        "encoder/conv1/bias": weights["encoder.conv1.bias"],
        "encoder/conv2/weight": weights["encoder.conv2.weight"],
        "encoder/conv2/bias": weights["encoder.conv2.bias"],
        "encoder/layer_norm/gamma": weights["encoder.ln_post.weight"],
        "encoder/layer_norm/beta": weights["encoder.ln_post.bias"],
        "decoder/embeddings/weight": weights["decoder.token_embedding.weight"],
        "decoder/layer_norm/gamma": weights["decoder.ln.weight"],
        "decoder/layer_norm/beta": weights["decoder.ln.bias"],
    }
    layers = {"encoder": dims.n_audio_layer, "decoder": dims.n_text_layer}
    heads = {"encoder": dims.n_audio_head, "decoder": dims.n_text_head}
    for side in layers:
        found[f"{side}/position_encodings/encodings"] = weights[f"{side}.positional_embedding"]
        found[f"{side}/num_heads"] = torch.tensor(heads[side], dtype=torch.int16)
        for layer in range(layers[side]):
            theirs, ours = f"{side}/layer_{layer}", f"{side}.blocks.{layer}"
            for name, module in CT2_NORMS.items():
                if f"{ours}.{module}.weight" in weights:
                    found[f"{theirs}/{name}/gamma"] = weights[f"{ours}.{module}.weight"]
                    found[f"{theirs}/{name}/beta"] = weights[f"{ours}.{module}.bias"]
            for name, modules in CT2_FUSED.items():
                if f"{ours}.{modules[0]}.weight" not in weights:
                    continue
                parts = [weights[f"{ours}.{module}.weight"] for module in modules]
                zero = torch.zeros(len(parts[0]), dtype=parts[0].dtype)
                biases = [weights.get(f"{ours}.{module}.bias", zero) for module in modules]
                found[f"{theirs}/{name}/weight"] = torch.cat(parts)
                found[f"{theirs}/{name}/bias"] = torch.cat(biases)
    found |= {name: torch.tensor(number, dtype=torch.int8) for name, number in NUMBERS.items()}
    return found


def int8_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Quantize the matrices as CTranslate2 does: rows of int8, each with a scale."""
    import torch

    found = {}
    for name, tensor in variables.items():
        if name.endswith("/weight"):
            rows = tensor.float().flatten(1)
            scale = 127 / rows.abs().amax(1)
            whole = (rows * scale[:, None]).round().to(torch.int8)
            found |= {name: whole.reshape(tensor.shape), f"{name}_scale": scale}
        else:
            found[name] = tensor
    return found


def model_bin(
    variables: Mapping[str, Any], *, name: str = "WhisperSpec", revision: int = 3
) -> bytes:
    """Return the bytes of a `model.bin`."""
    import torch

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", 6), text(name), struct.pack("<II", revision, len(variables))]
    for variable, tensor in variables.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = CT2_TYPES.index(str(tensor.dtype).removeprefix("torch."))
        shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        parts += [text(variable), shape, struct.pack("<BI", kind, len(data)), data]
    alias = text("decoder/projection/weight") + text("decoder/embeddings/weight")
    return b"".join((*parts, struct.pack("<I", 1), alias))


def write_ctranslate2(
    folder: Path, variables: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: bytes
) -> None:
    """Write a folder; `settings` are the contents of its config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(model_bin(variables))
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes(tokenizer)


def ggml_head(dims: Dims, *, sizes: Mapping[str, int] | None = None) -> bytes:
    """Return a ggml file up to its tensors, with OpenAI's vocabulary; `sizes` are stated instead."""
    from whisperport.speech.audio.mel import mel_filters
    from whisperport.speech.text.vocabulary import openai_text_tokens

    names = "n_vocab n_audio_ctx n_audio_state n_audio_head n_audio_layer n_text_ctx n_text_state"
    names += " n_text_head n_text_layer n_mels"
    stated = {**asdict(dims), **(sizes or {})}
    filters = mel_filters(dims.n_mels)
    tokens = openai_text_tokens(dims.n_vocab)
    return b"".join(
        (
            struct.pack("<I11i", 0x67676D6C, *(stated[name] for name in names.split()), 1),
            struct.pack("<2i", *filters.shape) + filters.tobytes(),
            struct.pack("<i", len(tokens)),
            *(struct.pack("<I", len(token)) + token for token in tokens),
        )
    )


def ggml_tensor(name: str, shape: tuple[int, ...], kind: int, data: bytes) -> bytes:
    """Return a tensor of a ggml file."""
    head = struct.pack("<3i", len(shape), len(name.encode()), kind)
    return head + struct.pack(f"<{len(shape)}i", *reversed(shape)) + name.encode() + data


def ggml_bytes(dims: Dims, weights: Mapping[str, Any], *, half: bool) -> bytes:
    """Return a ggml file; `half`: matrices in float16, as whisper.cpp's converter writes by default."""
    import torch

    parts = [ggml_head(dims)]
    for name, tensor in weights.items():
        shape = tuple(tensor.shape)
        if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
            shape = (*shape, 1)
        small = half and tensor.dim() > 1 and "positional" not in name
        data = tensor.to(torch.float16 if small else torch.float32).numpy().tobytes()
        parts.append(ggml_tensor(name, shape, int(small), data))
    return b"".join(parts)
