"""Find the alignment heads of a checkpoint that lists none, or wrong ones.

The shipped audio files have known word timestamps. The model decodes their transcripts. A cross-attention
head is an alignment head if it attends to each word at the time when the word is spoken. The heads that do
so most are used, if the word timestamps computed from them are close to the true ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.program.dims import SECONDS_PER_POSITION, Dims
from whisperport.program.generation import Generation
from whisperport.runtime import Floats, start_tokens
from whisperport.runtime.segments.alignment import boundaries
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
# Largest mean error of word starts, in seconds. The embedded model's two heads have 0.06; its others, alone
# or in pairs, 0.34 or more.
MAX_ERROR_S = 0.2
# The heads that were found replace listed ones if their error is at most this part: they were chosen on the
# audio by which both are measured.
PART_OF_ERROR = 0.5

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
) -> tuple[Generation, str]:
    """Return the decoding settings with alignment heads that follow the audio, and a warning or "".

    Listed heads are replaced if their word timestamps are wrong, and those of other heads are not:
    fine-tuned and distilled models are published with the heads of the model that they were made of.
    Without any, all heads of the upper half of the layers are used.

    The audio files are English; words of other languages are aligned by the same heads. For a model without
    English or with random weights no head is found, and those that it lists are kept.

    Args:
        generation: decoding settings.
        tokenizer_json: contents of the tokenizer.
        model: the model in eager torch.
    """
    dims = model.dims
    heads = [(layer, h) for layer in range(dims.n_text_layer) for h in range(dims.n_text_head)]
    listed = [i for i, head in enumerate(heads) if head in generation.alignment_heads]
    tokenizer = Tokenizer.from_json(tokenizer_json, generation)
    english = generation.any_language == "en"
    shipped = shipped_audio() if english else ()
    audio_files = [file for file in shipped if file.words and file.seconds <= dims.window_s]
    begin_stage("searching for alignment heads")
    decoded: list[_Decoded] = []
    for file in audio_files[:N_FILES]:
        decoded.append(_decode(model, generation, tokenizer, file, heads))
        if listed and _error_s(decoded, listed) <= MAX_ERROR_S:
            return generation, ""
        if _attention_on_words(decoded).max() < MIN_ATTENTION:
            break
    best = _best_heads(decoded) if decoded else []
    if not best:
        warning = (
            "the checkpoint lists no alignment heads, and none were found: word timestamps may have "
            "large errors"
        )
        return with_alignment_heads(generation, dims), "" if listed else warning
    names = _names(heads, best)
    begin_stage(f"alignment heads (layer.head): {names}")
    changed = replace(generation, alignment_heads=tuple(heads[i] for i in best))
    if not listed:
        return changed, ""
    listed_error, best_error = _error_s(decoded, listed), _error_s(decoded, best)
    if best_error > PART_OF_ERROR * listed_error:
        return generation, ""
    return changed, (
        f"the checkpoint's alignment heads {_names(heads, listed)} (layer.head) are replaced by {names}: "
        f"the starts of words had a mean error of {listed_error:.2f} s, and now of {best_error:.2f} s"
    )


def with_alignment_heads(generation: Generation, dims: Dims) -> Generation:
    """Return `generation` with alignment heads; if it has none, all heads of the upper half of the layers.

    Source: the default of openai-whisper, whisper/model.py:262-269.
    """
    if generation.alignment_heads:
        return generation
    layers = range(dims.n_text_layer // 2, dims.n_text_layer)
    heads = [(layer, head) for layer in layers for head in range(dims.n_text_head)]
    return replace(generation, alignment_heads=tuple(heads))


def _names(heads: Sequence[Head], indices: Sequence[int]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in (heads[i] for i in indices))


def _best_heads(decoded: Sequence[_Decoded]) -> list[int]:
    """Return the heads that attend most to the spoken words; none if their timestamps are wrong."""
    attention = _attention_on_words(decoded)
    best = attention.max()
    chosen = [i for i, share in enumerate(attention) if share >= PART_OF_BEST * best]
    if best < MIN_ATTENTION or _error_s(decoded, chosen) > MAX_ERROR_S:
        return []
    return chosen


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

    cross_kv = model.cross_kv(model.encode(torch.from_numpy(mel)[None]))
    scores: Floats = model.cross_scores(torch.tensor(tokens), cross_kv, heads).numpy()
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
