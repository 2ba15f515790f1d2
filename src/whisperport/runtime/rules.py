"""Apply openai-whisper's logit filters, and guards against loops, to one row of logits in place.

Source: openai/whisper@v20250625, whisper/decoding.py:420-516.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from whisperport.generation import Generation
from whisperport.runtime.cache import Floats
from whisperport.runtime.guards import forbid_repeated_ngrams, penalize_repetition


class Rules:
    """Rules for the next token: suppressed tokens, no blank at the start, rising timestamps in pairs."""

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
            generation: special token ids of the checkpoint.
            timestamps: whether the model emits timestamps; False: the timestamp rules do not apply.
            suppressed: ids that are never decoded.
            suppress_blank: whether the checkpoint's `suppressed_at_start` are suppressed as first token.
            max_initial_timestamp: latest first timestamp, in units of 20 ms; None: no limit.
            latest_timestamp: latest timestamp of all, in units of 20 ms; None: 30 s.
            repetition_penalty: see `DecodeOptions`; 1 changes nothing.
            no_repeat_ngram_size: see `DecodeOptions`; 0 changes nothing.
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

    def apply(self, logits: Floats, tokens: Sequence[int]) -> float:
        """Set the logits of tokens that must not follow to -inf.

        Args:
            logits: (V,), changed in place.
            tokens: the ids decoded so far, without the prompt.

        Returns:
            By how much the rules' comparison of probabilities was decided, in nats; infinity if they
            compared none.
        """
        self._guard(logits, tokens)
        if not tokens:
            logits[self._at_start] = -np.inf
        logits[self._never] = -np.inf
        if self._timestamps:
            if self._beyond is not None:
                logits[self._beyond :] = -np.inf
            self._pair_timestamps(logits, tokens)
            return self._prefer_timestamp(logits)
        return math.inf

    def _guard(self, logits: Floats, tokens: Sequence[int]) -> None:
        """Apply the guards against loops. They come before the other rules, as in transformers."""
        if self._penalty == 1 and not self._ngram_size:
            return
        text = [token for token in tokens if token < self._end_of_text]
        if self._penalty != 1:
            penalize_repetition(logits, text, self._penalty)
        if self._ngram_size:
            forbid_repeated_ngrams(logits, text, self._ngram_size)

    def _pair_timestamps(self, logits: Floats, tokens: Sequence[int]) -> None:
        """Make timestamps come in pairs and never decrease."""
        begin = self._begin
        if not tokens:
            logits[:begin] = -np.inf
            if self._max_initial is not None:
                logits[begin + self._max_initial + 1 :] = -np.inf
            return
        after_timestamp = tokens[-1] >= begin
        in_pair = after_timestamp and (len(tokens) < 2 or tokens[-2] >= begin)
        if in_pair:  # text follows the start of a segment
            logits[begin:] = -np.inf
        elif after_timestamp:  # a start timestamp or the end of text follows the end of a segment
            logits[: self._end_of_text] = -np.inf
        last = next((token for token in reversed(tokens) if token >= begin), None)
        if last is not None:
            closed = after_timestamp and not in_pair  # the next segment may start at the same time
            logits[begin : last if closed else last + 1] = -np.inf

    def _prefer_timestamp(self, logits: Floats) -> float:
        """Allow only timestamps if all of them together are more probable than any other token.

        Returns:
            By how much they are more or less probable, in nats.
        """
        times, others = logits[self._begin :], logits[: self._begin]
        peak = times.max()
        if peak == -np.inf:
            return math.inf
        # `argmax` is twice as fast as `max`.
        margin = peak + np.log(np.exp(times - peak).sum()) - others[others.argmax()]
        if margin > 0:
            others[:] = -np.inf
        return float(abs(margin))
