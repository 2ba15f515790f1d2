"""Find the alignment heads of a checkpoint that does not list them.

The shipped audio files have known word timestamps. The model decodes their transcripts. A cross-attention
head is an alignment head if it attends to each word at the time when the word is spoken. The heads that do
so most are used, if the word timestamps computed from them are close to the true ones.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.program.generation import Generation
from whisperport.runtime import Cache, Floats, start_tokens
from whisperport.runtime.decoding.alignment import boundaries
from whisperport.speech.audio import load_audio, log_mel
from whisperport.speech.text import Tokenizer
from whisperport.system.progress import begin_stage
from whisperport.verification.clips import ShippedAudio, shipped_audio

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.network.whisper import Whisper

N_FILES = 4  # number of audio files; together they cost about a tenth of computing the reference
MARGIN_S = 0.1  # seconds before and after a word in which attention counts as attention to the word
# Smallest share of the best head's attention that is on the spoken word. Uniform attention has 0.02. In the
# embedded model, the two heads trained to align have 0.98 and 0.99, the other heads 0.10 to 0.48.
MIN_ATTENTION = 0.2
# Heads with at least this part of the best head's share are used too: several heads err less than one.
PART_OF_BEST = 0.7
# Largest mean error of word starts, in seconds. The embedded model's other heads have 0.38 or more.
MAX_ERROR_S = 0.2

log = logging.getLogger(__name__)

Head = tuple[int, int]  # decoder layer, head in the layer


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The cross-attention scores of an audio file whose transcript was decoded."""

    scores: Floats  # (A, S, T) of all heads, before the softmax
    first: int  # index of the token that predicts the first token of the text
    n_positions: int  # number of encoder positions that hold audio
    spans: tuple[tuple[float, float], ...]  # start and end in seconds of every token of the text
    starts: tuple[int, ...]  # index of the first token of every word, and the end of the last


def find_alignment_heads(
    generation: Generation,
    tokenizer_json: bytes,
    model: "Whisper",
) -> Generation:
    """Add alignment heads to the decoding settings if they have none and heads can be found.

    The audio files are English; words of other languages are aligned by the same heads. For a model without
    English or with random weights no head is found. Then the settings do not change.

    Args:
        generation: decoding settings.
        tokenizer_json: contents of the tokenizer.
        model: the model in eager torch.
    """
    if generation.alignment_heads:
        return generation
    dims = model.dims
    heads = [(layer, h) for layer in range(dims.n_text_layer) for h in range(dims.n_text_head)]
    tokenizer = Tokenizer.from_json(tokenizer_json, generation)
    english = generation.any_language == "en"
    shipped = shipped_audio() if english else ()
    audio_files = [file for file in shipped if file.words and file.seconds <= dims.window_s]
    begin_stage("searching for alignment heads")
    decoded: list[_Decoded] = []
    for file in audio_files[:N_FILES]:
        decoded.append(_decode(model, generation, tokenizer, file, heads))
        if _attention_on_words(decoded).max() < MIN_ATTENTION:
            break
    best_heads = _best_heads(decoded, heads) if decoded else ()
    if not best_heads:
        log.warning(
            "the checkpoint lists no alignment heads, and none were found: word timestamps may have "
            "large errors"
        )
        return generation
    names = ", ".join(f"{layer}.{head}" for layer, head in best_heads)
    begin_stage(f"alignment heads (layer.head): {names}")
    return replace(generation, alignment_heads=best_heads)


def _best_heads(decoded: Sequence[_Decoded], heads: Sequence[Head]) -> tuple[Head, ...]:
    """Return the heads that attend most to the spoken words; none if their timestamps are wrong."""
    attention = _attention_on_words(decoded)
    best = attention.max()
    chosen = [i for i in range(len(heads)) if attention[i] >= PART_OF_BEST * best]
    if best < MIN_ATTENTION or _error_s(decoded, chosen) > MAX_ERROR_S:
        return ()
    return tuple(heads[i] for i in chosen)


def _decode(
    model: "Whisper",
    generation: Generation,
    tokenizer: Tokenizer,
    file: ShippedAudio,
    heads: Sequence[Head],
) -> _Decoded:
    words = [tokenizer.encode(word.word) for word in file.words]
    text = [token for word in words for token in word]
    start = start_tokens(generation, "en", "transcribe")
    mel = log_mel(load_audio(file.path), model.dims.n_mels, n_frames=model.dims.n_frames)
    return _Decoded(
        scores=_scores(model, mel, [*start, *text, generation.end_of_text], heads),
        first=len(start) - 1,
        n_positions=round(file.seconds / SECONDS_PER_POSITION),
        spans=tuple(
            (word.start, word.end)
            for word, tokens in zip(file.words, words, strict=True)
            for _ in tokens
        ),
        starts=tuple(np.cumsum([0, *map(len, words)]).tolist()),
    )


def _scores(model: "Whisper", mel: Floats, tokens: list[int], heads: Sequence[Head]) -> Floats:
    """Return the cross-attention scores (A, S, T) of the heads for all tokens."""
    import torch

    from whisperport.model.network.decoder import Align

    decoder, dims, n_tokens = model.decoder, model.dims, len(tokens)
    cache = Cache(dims)
    mask = torch.from_numpy(cache.mask(n_tokens))
    with torch.no_grad():
        cross_kv = model.cross_kv(model.encode(torch.from_numpy(mel)[None]))
        embedded = decoder.token_embedding(torch.tensor(tokens))
        x = (embedded + decoder.positional_embedding[:n_tokens])[None]
        caches = [
            [torch.from_numpy(cache.arrays[f"{name}_{i}"]) for i in range(dims.n_text_layer)]
            for name in ("self_k", "self_v")
        ]
        keys, values = (list(layers) for layers in zip(*cross_kv, strict=True))
        scores: Floats = Align(decoder, heads)(x, mask, *caches, keys, values)[1].numpy()
    return scores


def _attention_on_words(decoded: Sequence[_Decoded]) -> NDArray[np.float64]:
    """Return the share of each head's attention that is on the spoken word, (A,), mean over tokens."""
    shares: list[NDArray[np.float64]] = []
    for decoding in decoded:
        rows = decoding.scores[:, decoding.first : decoding.first + len(decoding.spans)]
        weights = np.exp(rows - rows.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        seconds = np.arange(weights.shape[-1]) * SECONDS_PER_POSITION
        spans = np.array(decoding.spans)
        near = (seconds >= spans[:, :1] - MARGIN_S) & (seconds <= spans[:, 1:] + MARGIN_S)
        shares.append((weights * near).sum(axis=-1).mean(axis=-1))
    mean: NDArray[np.float64] = np.mean(shares, axis=0)
    return mean


def _error_s(decoded: Sequence[_Decoded], heads: list[int]) -> float:
    """Return the error of the starts of words in seconds, mean over words."""
    errors = []
    for decoding in decoded:
        times = boundaries(decoding.scores[heads, :, : decoding.n_positions], decoding.first)
        expected = np.array([decoding.spans[i][0] for i in decoding.starts[:-1]])
        errors.append(np.abs(times[list(decoding.starts[:-1])] - expected))
    return float(np.concatenate(errors).mean())
