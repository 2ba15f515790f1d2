"""Models of Whisper's sizes with random weights."""

from dataclasses import replace
from typing import TYPE_CHECKING

from whisperport.program.dims import Dims

if TYPE_CHECKING:  # measured processes do not import torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

SIZES = {  # width, heads, layers
    "tiny": (384, 6, 4),
    "base": (512, 8, 6),
    "small": (768, 12, 12),
    "medium": (1024, 16, 24),
    "large-v2": (1280, 20, 32),
    "turbo-narrowed": (640, 10, 32),  # turbo's depth at half of its width
}
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
