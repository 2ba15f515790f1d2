"""Guards against loops: make a token or a phrase that was said less probable, or impossible.

Not part of openai-whisper; off by default where a window is the checkpoint's own, so that a transcript is
the original's. They see the text of
the window alone, no prompt and no timestamps: a timestamp is said twice where two segments meet.
Source: the rules are those of transformers' RepetitionPenaltyLogitsProcessor (arXiv 1909.05858) and
NoRepeatNGramLogitsProcessor.
"""

from collections.abc import Sequence

import numpy as np

from whisperport.runtime.cache import Floats

SHORT_WINDOW_PENALTY = 1.1  # with it no window of 5 s looped: benchmarks/short_windows.py


def penalize_repetition(logits: Floats, text: Sequence[int], penalty: float) -> None:
    """Move the logit of every token of `text` down, in place.

    A positive one is divided, a negative one multiplied: dividing a negative logit would raise it, and so
    reward repetition.

    logits   (V,), before any rule
    penalty  at least 1, which changes nothing
    """
    said = np.unique(np.array(text, np.int64))
    of_said = logits[said]
    logits[said] = np.where(of_said < 0, of_said * penalty, of_said / penalty)


def forbid_repeated_ngrams(logits: Floats, text: Sequence[int], size: int) -> None:
    """Set to -inf, in place, what would complete `size` tokens in a row that `text` has already.

    logits  (V,)
    size    at least 1, which forbids every token said
    """
    lead = tuple(text[len(text) - size + 1 :])
    starts = range(len(text) - size + 1)
    repeated = [text[i + size - 1] for i in starts if tuple(text[i : i + size - 1]) == lead]
    logits[np.array(repeated, np.int64)] = -np.inf
