"""A Whisper of a few kilobytes, run in torch: every step takes less than a millisecond."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whisperport.dims import Dims
from whisperport.generation import Generation
from whisperport.model.whisper import Whisper
from whisperport.runtime import Engine

DIMS = Dims(
    n_mels=8,
    n_audio_ctx=10,
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


@pytest.fixture(scope="session")
def micro() -> Whisper:
    """Two decoder layers, width 16, 24 positions, 70 tokens; random weights with gain about 1."""
    generator = torch.Generator().manual_seed(0)
    model = Whisper(DIMS).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.1 * noise + float("ln" in name and name.endswith("weight")))
    model.decoder.token_embedding.weight.mul_(4)  # logits that spread by 4
    return model


@pytest.fixture(scope="session")
def micro_engine(micro: Whisper, eager_runners: Callable[..., Any]) -> Callable[..., Engine]:
    """`micro_engine(generation=..., prefill_rows=(4, 7))`: a new engine over the micro model."""

    def make(generation: Generation = GENERATION, prefill_rows: tuple[int, ...] = (4, 7)) -> Engine:
        embedding = micro.decoder.token_embedding.weight.numpy()
        positions = micro.decoder.positional_embedding.numpy()
        runners = eager_runners(micro, prefill_rows, ((0, 1), (1, 0), (1, 1)), align_rows=5)
        return Engine(DIMS, generation, runners, embedding, positions)

    return make


@pytest.fixture(scope="session")
def sound() -> Callable[[int], np.ndarray]:
    """`sound(seed)`: features (T, d) of nothing in particular."""
    return lambda seed: (
        np.random.default_rng(seed)
        .standard_normal((DIMS.n_audio_ctx, DIMS.n_audio_state))
        .astype(np.float32)
    )
