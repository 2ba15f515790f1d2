"""Decoders over the micro model, and audio features for them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.generation import Generation
from whisperport.program.program_kind import VOCAB_PROJECTION
from whisperport.runtime import Decoder, Engine

from ..micro import DIMS, GENERATION


@pytest.fixture(scope="session")
def micro_decoder(micro: Whisper, eager_runners: Callable[..., Any]) -> Callable[..., Decoder]:
    """`micro_decoder(generation=..., prefill_rows=(4, 7))`: a new decoder over the micro model."""

    def make(
        generation: Generation = GENERATION, prefill_rows: tuple[int, ...] = (4, 7)
    ) -> Decoder:
        embedding = micro.decoder.token_embedding.weight.numpy()
        positions = micro.decoder.positional_embedding.numpy()
        runners = eager_runners(micro, prefill_rows, ((0, 1), (1, 0), (1, 1)), align_rows=5)
        return Decoder(Engine(DIMS, generation, runners, embedding, positions))

    return make


@pytest.fixture(scope="session")
def traced(micro: Whisper) -> Callable[..., dict[str, Program]]:
    """`traced(variants, projected=True)`: the programs of the micro model, each traced once per run."""
    made: dict[tuple[str, str, bool], Program] = {}

    def trace(name: str, variant: str, projected: bool) -> Program:
        key = name, variant, projected or not name.startswith(("prefill", "step"))
        if key not in made:
            parts = Parts(micro, [(0, 1), (1, 0)], projected=projected)
            (made[key],) = whisper_programs(parts, [name], {name: variant} if variant else {})
        return made[key]

    def make(variants: Mapping[str, str], *, projected: bool = True) -> dict[str, Program]:
        names = ["encoder", "cross_kv", "prefill_4", "step", "align"]
        names += [] if projected else [VOCAB_PROJECTION]
        return {name: trace(name, variants.get(name, ""), projected) for name in names}

    return make


@pytest.fixture(scope="session")
def audio() -> Callable[[int], np.ndarray]:
    """`sound(seed)`: random features (T, d)."""
    return lambda seed: (
        np.random.default_rng(seed)
        .standard_normal((DIMS.n_audio_ctx, DIMS.n_audio_state))
        .astype(np.float32)
    )
