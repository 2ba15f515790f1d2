"""Models of Whisper's sizes, with random weights or with those of the embedded model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from whisperport.program.dims import Dims

if TYPE_CHECKING:  # measured processes do not import torch
    import torch

    from whisperport.model.checkpoint.checkpoint import Checkpoint

SIZES = {  # width, heads, layers
    "tiny": (384, 6, 4),
    "base": (512, 8, 6),
    "small": (768, 12, 12),
    "medium": (1024, 16, 24),
    "large-v2": (1280, 20, 32),
    "turbo-narrowed": (640, 10, 32),  # turbo's depth at half of its width
}
EMBEDDED = "embedded"
WIDENED = {f"{EMBEDDED}-{size}": size for size in ("tiny", "base", "small")}
DECODER_LAYERS = {"turbo-narrowed": 4}  # where encoder and decoder differ
TINY = Dims(
    n_mels=80,
    n_audio_ctx=1500,
    n_audio_state=384,
    n_audio_head=6,
    n_audio_layer=4,
    n_text_ctx=448,
    n_text_state=384,
    n_text_head=6,
    n_text_layer=4,
    n_vocab=51865,
    n_audio_ffn=1536,
    n_text_ffn=1536,
)


def random_checkpoint(size: str) -> "Checkpoint":
    """Return a checkpoint of Whisper's sizes with random float16 weights, the same in every process."""
    import torch

    from whisperport.model.checkpoint.checkpoint import Checkpoint, Source
    from whisperport.model.network.whisper import Whisper
    from whisperport.speech.text.vocabulary import openai_generation, openai_tokenizer

    width, heads, layers = SIZES[size]
    last = DECODER_LAYERS.get(size, layers) - 1
    sizes: dict[str, int] = {}
    for side, n_layer in (("audio", layers), ("text", last + 1)):
        sizes |= {f"n_{side}_state": width, f"n_{side}_head": heads}
        sizes |= {f"n_{side}_layer": n_layer, f"n_{side}_ffn": 4 * width}
    torch.manual_seed(0)
    model = Whisper(replace(TINY, **sizes)).eval().requires_grad_(False)
    for table in (model.encoder.positional_embedding, model.decoder.positional_embedding):
        torch.nn.init.normal_(table, std=0.02)
    generation = openai_generation(TINY.n_vocab)
    return Checkpoint(
        dims=model.dims,
        generation=replace(generation, alignment_heads=((last, 0), (last, 1))),
        weights={name: weight.half().float() for name, weight in model.state_dict().items()},
        tokenizer_json=openai_tokenizer(TINY.n_vocab).to_str().encode(),
        source=Source(kind="openai", name=size, sha256={}),
    )


def widened_checkpoint(size: str) -> "Checkpoint":
    """Return the embedded model at Whisper's sizes: it says the same words, and costs what they cost."""
    from whisperport.model.checkpoint import load_checkpoint

    narrow = load_checkpoint("default")
    source = replace(narrow.source, name=f"embedded, as wide as {size}", sha256={})
    dims, weights = widened(narrow.dims, narrow.weights, SIZES[size])
    return replace(narrow, dims=dims, weights=weights, source=source)


def widened(
    dims: Dims, weights: "Mapping[str, torch.Tensor]", size: tuple[int, int, int]
) -> tuple[Dims, "dict[str, torch.Tensor]"]:
    """Return the weights of a wider and deeper model that computes the same logits.

    Every channel, head and hidden unit is there several times; what reads them takes their mean. The layers
    after the model's own add nothing; they are not alike, so that no compiler computes them once.

    Args:
        size: width, heads and layers; heads are as wide as the model's.
    """
    import torch

    width, heads, layers = size
    wide = {n: _widened(n, w.float(), width // dims.n_audio_state) for n, w in weights.items()}
    sizes: dict[str, int] = {}
    own_layers = {"audio": dims.n_audio_layer, "text": dims.n_text_layer}
    for side, part in (("audio", "encoder"), ("text", "decoder")):
        sizes |= {f"n_{side}_state": width, f"n_{side}_head": heads}
        sizes |= {f"n_{side}_layer": layers, f"n_{side}_ffn": 4 * width}
        last = f"{part}.blocks.{own_layers[side] - 1}."
        block = {name.removeprefix(last): w for name, w in wide.items() if name.startswith(last)}
        for layer in range(own_layers[side], layers):
            for name, weight in block.items():
                adds = name.startswith(("attn.out", "cross_attn.out", "mlp.2"))
                copy = torch.zeros_like(weight) if adds else weight * (1 + layer / 100)
                wide[f"{part}.blocks.{layer}.{name}"] = copy
    return replace(dims, **sizes), wide


def _widened(name: str, weight: "torch.Tensor", times: int) -> "torch.Tensor":
    """Return a weight in which every channel is there several times."""
    if name.endswith(("positional_embedding", "token_embedding.weight")):
        return weight.repeat(1, times)
    if name.startswith("decoder.ln."):  # the logits add all channels
        return weight.repeat(times) / times
    rows = weight.repeat(times, *[1] * (weight.dim() - 1))
    if weight.dim() == 1 or name == "encoder.conv1.weight":  # a vector, or it reads mel
        return rows
    return rows.repeat(1, times, *[1] * (weight.dim() - 2)) / times
