"""Prevent loops: make a token or phrase that was already decoded less probable, or impossible.

openai-whisper has no such guards. They are off by default for the checkpoint's own window, so that the
transcript equals openai-whisper's. They consider the text tokens of the window only, not the prompt and not
the timestamps: a timestamp repeats where one segment ends and the next begins.
Source: transformers' RepetitionPenaltyLogitsProcessor (arXiv 1909.05858) and
NoRepeatNGramLogitsProcessor.
"""

from collections.abc import Sequence

import numpy as np

from whisperport.runtime.engine.cache import Floats

SHORT_WINDOW_PENALTY = 1.1  # measured: no window of 5 s loops; benchmarks/words/short_windows.py


def penalize_repetition(logits: Floats, text: Sequence[int], penalty: float) -> None:
    """Lower the logit of every token of `text`, in place.

    A positive logit is divided by the penalty and a negative one multiplied, because dividing a negative
    logit would raise it.

    Args:
        logits: (V,), before any rule; changed in place.
        text: text tokens decoded so far in this window.
        penalty: 1 or more; 1 changes nothing.
    """
    repeated = np.unique(np.array(text, np.int64))
    values = logits[repeated]
    logits[repeated] = np.where(values < 0, values * penalty, values / penalty)


def forbid_repeated_ngrams(logits: Floats, text: Sequence[int], size: int) -> None:
    """Set the logit of every token that would repeat an n-gram of `text` to -inf.

    Args:
        logits: (V,), changed in place.
        text: text tokens decoded so far in this window.
        size: tokens in an n-gram, 1 or more; 1 forbids every token of `text`.
    """
    lead = tuple(text[len(text) - size + 1 :])
    starts = range(len(text) - size + 1)
    repeated = [text[i + size - 1] for i in starts if tuple(text[i : i + size - 1]) == lead]
    logits[np.array(repeated, np.int64)] = -np.inf
