"""Find the heads that follow the sound, where a checkpoint does not name them.

The recordings of the package come with the times of their words. The model reads what is said in them,
and a head follows the sound if it looks at a word where that word is spoken. Those that do so most are
taken, if the times that they give to words are near the true ones.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import load_audio, log_mel
from whisperport.dims import SECONDS_PER_POSITION
from whisperport.generation import Generation
from whisperport.runtime import Cache, Floats, start_tokens
from whisperport.runtime.alignment import boundaries
from whisperport.text import Tokenizer
from whisperport.verification.clips import ShippedAudio, shipped_audio

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.whisper import Whisper

N_RECORDINGS = 4  # one look at each: about a tenth of what the reference costs
NEAR_S = 0.1  # a head may look at a word this much before and after it is spoken
# Of a head's attention, on the word spoken. Spread evenly it would be 0.02. In the embedded model the two
# heads that were taught to align have 0.98 and 0.99, the others 0.10 to 0.48.
FOLLOWS = 0.2
AS_GOOD = 0.7  # of the best head's attention: taken too, since several heads err less than one
CONVINCING_S = (
    0.2  # mean error of words' beginnings; the embedded model's other heads have 0.38 and more
)

log = logging.getLogger(__name__)

Head = tuple[int, int]  # decoder layer, head in it


@dataclass(frozen=True, slots=True)
class _Read:
    """A recording that the model has read."""

    scores: Floats  # (A, S, T) of all heads, before the softmax
    first: int  # the row that predicts the first token of the text
    n_positions: int  # that hold sound
    spans: tuple[tuple[float, float], ...]  # seconds, of every token of the text
    starts: tuple[int, ...]  # the first token of every word, and the end of the last


def find_alignment_heads(
    generation: Generation,
    tokenizer_json: bytes,
    model: "Whisper",
    progress: Callable[[str], None] = lambda _: None,
) -> Generation:
    """`generation` with alignment heads, if it has none and some head clearly follows the sound.

    The recordings are English; other words are aligned by the same heads. A model that knows no English,
    or whose weights are random, has no convincing head: then nothing is changed.
    """
    if generation.alignment_heads:
        return generation
    dims = model.dims
    heads = [(layer, h) for layer in range(dims.n_text_layer) for h in range(dims.n_text_head)]
    tokenizer = Tokenizer.from_json(tokenizer_json, generation)
    english = generation.any_language == "en"
    recordings = shipped_audio() if english else ()
    fitting = [r for r in recordings if r.words and r.seconds <= dims.window_s]
    progress("looking for heads that follow the sound")
    read: list[_Read] = []
    for recording in fitting[:N_RECORDINGS]:
        read.append(_read(model, generation, tokenizer, recording, heads))
        if _attention_on_words(read).max() < FOLLOWS:
            break
    found = _chosen(read, heads) if read else ()
    if not found:
        log.warning(
            "the checkpoint names no alignment heads, and none of its heads clearly follows the "
            "sound: times of words may be far off"
        )
        return generation
    named = ", ".join(f"{layer}.{head}" for layer, head in found)
    progress(f"words are aligned by {named} (layer.head)")
    return replace(generation, alignment_heads=found)


def _chosen(read: Sequence[_Read], heads: Sequence[Head]) -> tuple[Head, ...]:
    """The heads that look at the words, if these come out near their times; else none."""
    attention = _attention_on_words(read)
    best = attention.max()
    chosen = [i for i in range(len(heads)) if attention[i] >= AS_GOOD * best]
    if best < FOLLOWS or _error_s(read, chosen) > CONVINCING_S:
        return ()
    return tuple(heads[i] for i in chosen)


def _read(
    model: "Whisper",
    generation: Generation,
    tokenizer: Tokenizer,
    recording: ShippedAudio,
    heads: Sequence[Head],
) -> _Read:
    words = [tokenizer.encode(word.word) for word in recording.words]
    text = [token for word in words for token in word]
    start = start_tokens(generation, "en", "transcribe")
    mel = log_mel(load_audio(recording.path), model.dims.n_mels, n_frames=model.dims.n_frames)
    return _Read(
        scores=_scores(model, mel, [*start, *text, generation.end_of_text], heads),
        first=len(start) - 1,
        n_positions=round(recording.seconds / SECONDS_PER_POSITION),
        spans=tuple(
            (word.start, word.end)
            for word, tokens in zip(recording.words, words, strict=True)
            for _ in tokens
        ),
        starts=tuple(np.cumsum([0, *map(len, words)]).tolist()),
    )


def _scores(model: "Whisper", mel: Floats, tokens: list[int], heads: Sequence[Head]) -> Floats:
    """(A, S, T) of heads, for all tokens at once."""
    import torch

    from whisperport.model.decoder import Align

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


def _attention_on_words(read: Sequence[_Read]) -> NDArray[np.float64]:
    """(A,): the share of each head's attention that is on the word being spoken, mean over tokens."""
    shares: list[NDArray[np.float64]] = []
    for one in read:
        rows = one.scores[:, one.first : one.first + len(one.spans)]
        weights = np.exp(rows - rows.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        seconds = np.arange(weights.shape[-1]) * SECONDS_PER_POSITION
        spans = np.array(one.spans)
        near = (seconds >= spans[:, :1] - NEAR_S) & (seconds <= spans[:, 1:] + NEAR_S)
        shares.append((weights * near).sum(axis=-1).mean(axis=-1))
    mean: NDArray[np.float64] = np.mean(shares, axis=0)
    return mean


def _error_s(read: Sequence[_Read], heads: list[int]) -> float:
    """Seconds by which words begin too early or too late, mean over words."""
    errors = []
    for one in read:
        times = boundaries(one.scores[heads, :, : one.n_positions], one.first)
        said = np.array([one.spans[i][0] for i in one.starts[:-1]])
        errors.append(np.abs(times[list(one.starts[:-1])] - said))
    return float(np.concatenate(errors).mean())
