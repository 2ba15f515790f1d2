"""What may be said next: openai-whisper's logit filters, and guards, in place on one row of logits.

Source: openai/whisper@v20250625, whisper/decoding.py:420-516.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from whisperport.generation import Generation
from whisperport.runtime.cache import Floats
from whisperport.runtime.guards import forbid_repeated_ngrams, penalize_repetition


class Rules:
    """Suppressed tokens, no blank at the start, and timestamps in pairs that never go back."""

    def __init__(
        self,
        generation: Generation,
        *,
        timestamps: bool,
        suppressed: Iterable[int],
        suppress_blank: bool = True,
        max_initial_timestamp: int | None = None,
        latest_timestamp: int | None = None,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
    ) -> None:
        """
        Args:
            timestamps: whether the prompt asks for them; without, their rules do not apply.
            suppressed: ids never said.
            suppress_blank: keep the checkpoint's `suppressed_at_start` from being said first.
            max_initial_timestamp: the first timestamp is at most this many positions of 20 ms.
            latest_timestamp: so is every other one; None: 30 s, the last there is.
            repetition_penalty: 1 for none.
            no_repeat_ngram_size: 0 for none.
        """
        never = {*suppressed, generation.no_timestamps} if timestamps else {*suppressed}
        self._never = np.array(sorted(never), np.int64)
        self._at_start = np.array(
            generation.suppressed_at_start if suppress_blank else (), np.int64
        )
        self._timestamps = timestamps
        self._begin = generation.timestamp_begin
        self._end_of_text = generation.end_of_text
        self._max_initial = max_initial_timestamp
        self._beyond = None if latest_timestamp is None else self._begin + latest_timestamp + 1
        self._penalty = repetition_penalty
        self._ngram_size = no_repeat_ngram_size

    def apply(self, logits: Floats, said: Sequence[int]) -> None:
        """Set what must not follow `said` to -inf.

        logits  (V,), changed in place
        said    the ids sampled so far, without the prompt
        """
        self._guard(logits, said)
        if not said:
            logits[self._at_start] = -np.inf
        logits[self._never] = -np.inf
        if self._timestamps:
            if self._beyond is not None:
                logits[self._beyond :] = -np.inf
            self._pair_timestamps(logits, said)
            self._prefer_timestamp(logits)

    def _guard(self, logits: Floats, said: Sequence[int]) -> None:
        """Before all rules, as in transformers: they compare logits that the guards have lowered."""
        if self._penalty == 1 and not self._ngram_size:
            return
        text = [token for token in said if token < self._end_of_text]
        if self._penalty != 1:
            penalize_repetition(logits, text, self._penalty)
        if self._ngram_size:
            forbid_repeated_ngrams(logits, text, self._ngram_size)

    def _pair_timestamps(self, logits: Floats, said: Sequence[int]) -> None:
        begin = self._begin
        if not said:
            logits[:begin] = -np.inf
            if self._max_initial is not None:
                logits[begin + self._max_initial + 1 :] = -np.inf
            return
        after_timestamp = said[-1] >= begin
        in_pair = after_timestamp and (len(said) < 2 or said[-2] >= begin)
        if in_pair:  # an opened segment has text
            logits[begin:] = -np.inf
        elif after_timestamp:  # a closed segment is followed by an opening, or the end
            logits[: self._end_of_text] = -np.inf
        last = next((token for token in reversed(said) if token >= begin), None)
        if last is not None:
            closed = after_timestamp and not in_pair  # the next one may open at the same time
            logits[begin : last if closed else last + 1] = -np.inf

    def _prefer_timestamp(self, logits: Floats) -> None:
        """If all timestamps together are more probable than any other token, say one of them."""
        times, others = logits[self._begin :], logits[: self._begin]
        peak = times.max()
        if peak == -np.inf:
            return
        if peak + np.log(np.exp(times - peak).sum()) > others.max():
            others[:] = -np.inf
