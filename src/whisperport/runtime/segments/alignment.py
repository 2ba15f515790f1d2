"""Compute word timestamps from the alignment heads' attention, by dynamic time warping.

Source: openai/whisper@v20250625, whisper/timing.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.runtime.decoding.decode import start_tokens
from whisperport.runtime.engine.engine import Engine
from whisperport.runtime.engine.scores import Floats
from whisperport.runtime.kv_cache.decoder import Decoder
from whisperport.speech.text import Tokenizer

MEDIAN_WIDTH = 7  # positions of 20 ms


@dataclass(slots=True)
class Timing:
    """A word and its time in a window.

    Attributes:
        word: text with its leading space and, after joining, its punctuation.
        tokens: ids of the word.
        start: seconds from the beginning of the window.
        end: seconds from the beginning of the window.
        probability: mean probability of its tokens, 0 to 1.
    """

    word: str
    tokens: list[int]
    start: float
    end: float
    probability: float


def align_words(
    decoder: Decoder,
    tokenizer: Tokenizer,
    text: Sequence[int],
    *,
    language: str,
    task: str,
    n_frames: int,
) -> list[Timing]:
    """Compute the timestamps of the words of a window.

    Tokens beyond the decoder's number of positions get no timestamps.

    Args:
        decoder: has the window's audio, see `Decoder.start_window`. Its token cache is replaced.
        text: text tokens of the window, without timestamps.
        language: language code.
        task: `transcribe` or `translate`.
        n_frames: mel frames of audio in the window, 10 ms each.

    Returns:
        One `Timing` per word, in order. Empty if `text` is empty.
    """
    if not text:
        return []
    engine = decoder.engine
    generation = engine.generation
    start = start_tokens(generation, language, task)  # ends in <|notimestamps|>
    text = text[: engine.dims.n_text_ctx - len(start) - 1]
    scores, rows = decoder.align([*start, *text, generation.end_of_text])
    first = len(start) - 1  # the logits of this row predict the first text token
    probabilities = _token_probabilities(engine, rows[first : first + len(text)], text)
    times = boundaries(scores[:, :, : n_frames // 2], first)

    words, word_tokens = tokenizer.split_to_word_tokens([*text, generation.end_of_text], language)
    if len(word_tokens) <= 1:
        return []
    bounds = np.cumsum([0, *(len(ids) for ids in word_tokens[:-1])])
    return [
        Timing(word, list(ids), float(times[i]), float(times[j]), float(probabilities[i:j].mean()))
        for word, ids, i, j in zip(words, word_tokens, bounds[:-1], bounds[1:], strict=False)
    ]


def boundaries(scores: Floats, first: int) -> NDArray[np.float64]:
    """Compute the start of each text token, and the end of the last one, in seconds.

    Args:
        scores: (A, S, T) attention scores of the A alignment heads, for S tokens, over the T positions
            with audio. The last token is the end of text.
        first: index of the token whose logits predict the first text token.
    """
    tokens, positions = warp(-_attention(scores)[first:-1])
    jumps = np.diff(tokens, prepend=tokens[0] - 1).astype(bool)
    times: NDArray[np.float64] = positions[jumps] * SECONDS_PER_POSITION
    return times


def _token_probabilities(engine: Engine, rows: Floats, text: Sequence[int]) -> Floats:
    """Return the probability of each text token among all text tokens, (S,)."""
    logits = engine.logits_of(rows)[:, : engine.generation.end_of_text]
    logits -= logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits, out=logits)
    chosen = exponentials[np.arange(len(text)), list(text)]
    probabilities: Floats = chosen / exponentials.sum(axis=1)
    return probabilities


def _attention(scores: Floats) -> Floats:
    """Reduce scores (A, S, T) to (S, T): softmax, normalize over tokens, smooth, average over heads."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    weights -= weights.mean(axis=-2, keepdims=True)
    weights /= weights.std(axis=-2, keepdims=True)
    mean: Floats = _median(weights).mean(axis=0)
    return mean


def _median(x: Floats) -> Floats:
    """Apply a median filter of MEDIAN_WIDTH on the last axis; edges are reflected."""
    half = MEDIAN_WIDTH // 2
    if x.shape[-1] <= half:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], mode="reflect")
    median: Floats = np.partition(sliding_window_view(padded, MEDIAN_WIDTH, axis=-1), half)[
        ..., half
    ]
    return median


def warp(x: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the cheapest monotonic path through a cost matrix.

    Costs are summed in float32 and ties are broken as in openai-whisper, so that paths are equal. The cells
    of an anti-diagonal depend on earlier anti-diagonals only, so they are computed together.

    Args:
        x: costs (N, M).

    Returns:
        Row indices and column indices of the path.
    """
    n, m = x.shape
    cost = np.full((n + 1, m + 1), np.inf, np.float32)
    cost[0, 0] = 0
    moves = np.zeros((n + 1, m + 1), np.int8)  # 0: both, 1: row, 2: column
    moves[0, :], moves[:, 0] = 2, 1
    for diagonal in range(2, n + m + 1):
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        j = diagonal - i
        diagonal_cost, row, column = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        move = np.where(
            (diagonal_cost < row) & (diagonal_cost < column),
            0,
            np.where((row < diagonal_cost) & (row < column), 1, 2),
        )
        moves[i, j] = move
        cost[i, j] = x[i - 1, j - 1].astype(np.float64) + np.choose(
            move, (diagonal_cost, row, column)
        )
    return _trace(moves)


def _trace(moves: NDArray[np.int8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Follow the moves back from the last cell: row indices and column indices of the path."""
    i, j = moves.shape[0] - 1, moves.shape[1] - 1
    path = []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        move = moves[i, j]
        i -= move in (0, 1)
        j -= move in (0, 2)
    rows, columns = np.array(path[::-1], np.int64).T
    return rows, columns
