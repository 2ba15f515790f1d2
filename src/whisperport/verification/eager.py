"""Make a bundle's reference: run the model in eager torch, without a cache, on recordings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import SAMPLE_RATE, log_mel
from whisperport.generation import Generation
from whisperport.runtime import start_tokens
from whisperport.verification.clips import Clip
from whisperport.verification.reference import Reference, ReferenceClip

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.whisper import Whisper

KEPT = 2  # clips whose features and logits are kept: they are the bulk of a reference
KEPT_LOGITS = 6  # rows of logits kept of each; V float32 a row, 0.2 MB


def run_eager(
    model: "Whisper",
    generation: Generation,
    clips: Sequence[Clip],
    *,
    language: str = "en",
    max_tokens: int = 32,
) -> Reference:
    """Greedy decoding of every clip, recomputing all rows for every token.

    Samples are rounded to 16 bits first, so that a board which reads them back hears the same.
    """
    prompt = start_tokens(
        generation, language if generation.is_multilingual else "en", "transcribe"
    )
    max_tokens = min(max_tokens, model.dims.n_text_ctx - len(prompt))
    made = [
        _run_clip(model, generation, clip, prompt, max_tokens, keep=index < KEPT)
        for index, clip in enumerate(clips)
    ]
    return Reference(tuple(made), max_tokens)


def _run_clip(
    model: "Whisper",
    generation: Generation,
    clip: Clip,
    prompt: list[int],
    max_tokens: int,
    *,
    keep: bool,
) -> ReferenceClip:
    import torch

    dims = model.dims
    whole = np.clip(np.round(clip.samples * 32768), -32768, 32767).astype(np.int16)
    samples = whole[: round(dims.window_s * SAMPLE_RATE)]
    mel = log_mel(samples.astype(np.float32) / 32768, dims.n_mels, n_frames=dims.n_frames)
    features = model.encode(torch.from_numpy(mel)[None])
    sound = model.sound(features)

    tokens: list[int] = []
    rows: list[NDArray[np.float32]] = []
    while len(tokens) < max_tokens:
        logits = model.last_logits(torch.tensor(prompt + tokens), sound).numpy()
        rows.append(logits.copy())
        logits[list(generation.suppressed)] = -np.inf
        if not tokens:
            logits[list(generation.suppressed_at_start)] = -np.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == generation.end_of_text:
            break
    return ReferenceClip(
        name=clip.name,
        text=clip.text,
        samples=samples,
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        features=features[0].numpy() if keep else np.empty((0, dims.n_audio_state), np.float32),
        logits=np.stack(rows[: KEPT_LOGITS if keep else 0])
        if keep
        else np.empty((0, dims.n_vocab), np.float32),
    )
