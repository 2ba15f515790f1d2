"""Make a bundle's reference: run the model in eager torch, without a cache, on recordings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import SAMPLE_RATE, log_mel
from whisperport.generation import Generation
from whisperport.runtime import start_tokens
from whisperport.spec import UncachedForm
from whisperport.text import language_code
from whisperport.verification.clips import Clip
from whisperport.verification.reference import Reference, ReferenceClip

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.model.whisper import Whisper

KEPT = 2  # clips whose features and logits are kept: they are the bulk of a reference
KEPT_LOGITS = 6  # rows of logits kept of each; V float32 a row, 0.2 MB


def run_eager(
    model: "Whisper",
    generation: Generation,
    clips: Sequence[Clip],
    *,
    max_tokens: int = 32,
    uncached: UncachedForm | None = None,
) -> Reference:
    """Greedy decoding of every clip, recomputing all rows for every token.

    Samples are rounded to 16 bits first, so that a board which reads them back hears the same.

    Args:
        uncached: the form of the decoder without KV cache, if it is exported.

    Raises:
        UsageError: the checkpoint does not know a clip's language.
    """
    prompts = [_prompt(generation, clip) for clip in clips]
    max_tokens = min(max_tokens, model.dims.n_text_ctx - max(map(len, prompts), default=0))
    made = [
        _run_clip(model, generation, clip, prompt, max_tokens, keep=index < KEPT, uncached=uncached)
        for index, (clip, prompt) in enumerate(zip(clips, prompts, strict=True))
    ]
    return Reference(tuple(made), max_tokens)


def _prompt(generation: Generation, clip: Clip) -> list[int]:
    language = language_code(clip.language, generation.languages)
    return start_tokens(generation, language, "transcribe")


def _run_clip(
    model: "Whisper",
    generation: Generation,
    clip: Clip,
    prompt: list[int],
    max_tokens: int,
    *,
    keep: bool,
    uncached: UncachedForm | None,
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
    none = np.empty((0, dims.n_vocab), np.float32)
    return ReferenceClip(
        name=clip.name,
        text=clip.text,
        samples=samples,
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        features=features[0].numpy() if keep else np.empty((0, dims.n_audio_state), np.float32),
        logits=np.stack(rows[:KEPT_LOGITS]) if keep else none,
        full_logits=_unpadded(model, features, prompt, tokens, uncached)
        if keep and uncached
        else none,
    )


def _unpadded(
    model: "Whisper",
    features: "Tensor",
    prompt: list[int],
    tokens: list[int],
    uncached: UncachedForm,
) -> NDArray[np.float32]:
    """Logits (K, V) as `ReferenceClip.logits`, of features (1, T, d) that nothing is put after."""
    import torch

    fed = (prompt + tokens)[: min(uncached.rows, len(prompt) + KEPT_LOGITS - 1)]
    logits = model.logits(torch.tensor(fed), model.sound(features, padded=False))
    return logits[len(prompt) - 1 :].numpy()
