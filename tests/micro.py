"""Sizes that tests compute with: of published checkpoints, and of the micro model with its token ids.

The micro model has a few kilobytes, and every step takes less than a millisecond.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.program.dims import Dims
from whisperport.program.generation import Generation
from whisperport.speech.text.byte_level import to_byte_characters

TURBO = Dims(
    n_mels=128,
    n_audio_ctx=1500,
    n_audio_state=1280,
    n_audio_head=20,
    n_audio_layer=32,
    n_text_ctx=448,
    n_text_state=1280,
    n_text_head=20,
    n_text_layer=4,
    n_vocab=51866,
    n_audio_ffn=5120,
    n_text_ffn=5120,
)
DIMS = Dims(
    n_mels=8,
    n_audio_ctx=10,  # 0.2 s
    n_audio_state=16,
    n_audio_head=2,
    n_audio_layer=1,
    n_text_ctx=24,
    n_text_state=16,
    n_text_head=2,
    n_text_layer=2,
    n_vocab=70,
    n_audio_ffn=32,
    n_text_ffn=32,
)
GENERATION = Generation(
    end_of_text=49,
    start_of_transcript=50,
    languages={"en": 51, "de": 52},
    tasks={"transcribe": 53, "translate": 54},
    start_of_previous=55,
    no_speech=56,
    no_timestamps=57,  # and times from 58 on
    suppressed=(*range(10, 20), 50, 53, 54, 55, 56),
    suppressed_at_start=(3, 49),
)
ADAPTER_RANK = 3
SPECIAL = {
    "<|endoftext|>": 49,
    "<|startoftranscript|>": 50,
    "<|en|>": 51,
    "<|de|>": 52,
    "<|transcribe|>": 53,
    "<|translate|>": 54,
    "<|startofprev|>": 55,
    "<|nospeech|>": 56,
    "<|notimestamps|>": 57,
}


def whisper_dims(width: int, layers: int, heads: int = 0) -> Dims:
    """The sizes of a multilingual checkpoint: of tiny with (384, 4), of base with (512, 6), and so on."""
    heads = heads or width // 64
    return Dims(
        n_mels=80,
        n_audio_ctx=1500,
        n_audio_state=width,
        n_audio_head=heads,
        n_audio_layer=layers,
        n_text_ctx=448,
        n_text_state=width,
        n_text_head=heads,
        n_text_layer=layers,
        n_vocab=51865,
        n_audio_ffn=4 * width,
        n_text_ffn=4 * width,
    )


def tokenizer_json() -> bytes:
    """Ids 0 to 48 are single letters, in any order."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
    added = [{"id": i, "content": token, "special": True} for token, i in SPECIAL.items()]
    vocabulary = {to_byte_characters(letter.encode()): i for i, letter in enumerate(letters)}
    return json.dumps(
        {
            "added_tokens": added,
            "pre_tokenizer": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    ).encode()


def adapter_tensors(seed: int) -> dict[str, np.ndarray]:
    """A and B of all layers that an adapter may change, under PEFT's names."""
    from whisperport.program.low_rank import LowRank
    from whisperport.runtime.engine.adapters import all_layers

    random = np.random.default_rng(seed)
    shapes = {
        f"base_model.model.{layer.name}.lora_{side}.weight": shape
        for layer in all_layers(DIMS, LowRank(ADAPTER_RANK))
        for side, shape in (
            ("A", (ADAPTER_RANK, layer.n_inputs)),
            ("B", (layer.n_outputs, ADAPTER_RANK)),
        )
    }
    return {
        name: (0.3 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_adapter(folder: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    """Write an adapter of PEFT with these settings; return its folder."""
    from safetensors.numpy import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "my base", "r": ADAPTER_RANK}
    config |= {"lora_alpha": 6, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
