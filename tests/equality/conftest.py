"""The embedded model three times: in openai-whisper, in transformers, and in a bundle for each target."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
import whisper.model

from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.program.bundle import Bundle
from whisperport.targets import TARGETS, RunOptions, get_target
from whisperport.targets.target_options import with_target
from whisperport.transcription import Transcriber

from ..embedded import default_bundle, unpacked
from ..extent import core_or_all

FULL_WINDOWS = RunOptions(threads=1, short_windows=False)  # openai-whisper has no others


@pytest.fixture(scope="session")
def embedded() -> Checkpoint:
    return load_checkpoint("default")


def openai_original(checkpoint: Checkpoint) -> whisper.model.Whisper:
    """openai-whisper's own class with the checkpoint's weights and alignment heads, in float32."""
    dims = checkpoint.dims
    model = whisper.model.Whisper(
        whisper.model.ModelDimensions(
            dims.n_mels,
            dims.n_audio_ctx,
            dims.n_audio_state,
            dims.n_audio_head,
            dims.n_audio_layer,
            dims.n_vocab,
            dims.n_text_ctx,
            dims.n_text_state,
            dims.n_text_head,
            dims.n_text_layer,
        )
    )
    weights = {name: weight.float() for name, weight in checkpoint.weights.items()}
    model.load_state_dict(weights, strict=False)
    heads = torch.zeros(dims.n_text_layer, dims.n_text_head, dtype=torch.bool)
    for layer, head in checkpoint.generation.alignment_heads:
        heads[layer, head] = True
    model.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return model.eval()


@pytest.fixture(scope="session")
def openai_model(embedded: Checkpoint) -> whisper.model.Whisper:
    return openai_original(embedded)


@pytest.fixture(scope="session")
def hf_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> transformers.WhisperForConditionalGeneration:
    folder = unpacked(tmp_path_factory.mktemp("default"))
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    )
    return model.eval()


ALL = [target.spec.name for target in TARGETS if not target.spec.runs.fallback]


@pytest.fixture(scope="session", params=core_or_all(["embedded"], ALL))
def transcriber(request: pytest.FixtureRequest, exported: Callable[..., Bundle]) -> Transcriber:
    """The embedded bundle; in test-all, the embedded model exported for each target in turn."""
    if request.param == "embedded":
        return Transcriber(default_bundle(), FULL_WINDOWS)
    emulation = with_target(get_target(request.param).spec.runs.emulation, request.param)
    return Transcriber(exported(request.param, "default"), replace(FULL_WINDOWS, options=emulation))
