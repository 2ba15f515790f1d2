"""Apply openai-whisper's logit filters, and guards against loops, to the logits after a token in place.

Source: openai/whisper@v20250625, whisper/decoding.py:420-516.

The guards make a token or phrase that was already decoded less probable, or impossible. openai-whisper has
none. They are off by default for the checkpoint's own window, so that the transcript equals
openai-whisper's. They consider the text tokens of the window only, not the prompt and not the timestamps:
a timestamp repeats where one segment ends and the next begins.
Source: transformers' RepetitionPenaltyLogitsProcessor (arXiv 1909.05858) and
NoRepeatNGramLogitsProcessor.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from whisperport.program.generation import Generation
from whisperport.runtime.decoding.grammar import Following, Grammar
from whisperport.runtime.decoding.search import IMPOSSIBLE
from whisperport.runtime.engine.scores import Floats, FreeChoice, Scores, log_sum_exp


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
        at_start = {*generation.suppressed_at_start} if suppress_blank else set()
        self._at_start = np.array(sorted(at_start), np.int64)
        self._timestamps = timestamps
        self._begin = generation.timestamp_begin
        self._end_of_text = generation.end_of_text
        self._max_initial = max_initial_timestamp
        self._beyond = None if latest_timestamp is None else self._begin + latest_timestamp + 1
        self._penalty = repetition_penalty
        self._ngram_size = no_repeat_ngram_size

    def apply(self, scores: Scores, tokens: Sequence[int], grammar: Grammar | None = None) -> float:
        """Set the logits of tokens that must not follow to -inf.

        Args:
            scores: after the last of the tokens; changed in place.
            tokens: the ids decoded so far, without the prompt.
            grammar: of the sentences; None: any text is possible.

        Returns:
            By how much the rules' comparison of probabilities was decided, in nats; infinity if they
            compared none.
        """
        self._guard(scores, tokens)
        if not tokens:
            scores.forbid(self._at_start)
        scores.forbid(self._never)
        if self._timestamps:
            if self._beyond is not None:
                scores.forbid(slice(self._beyond, None))
            self._pair_timestamps(scores, tokens)
        if grammar is not None:  # no other special tokens
            scores.forbid(slice(self._end_of_text + 1, self._begin))
        if grammar is not None and (sentence := self._sentence(tokens)) is not None:
            self._follow(scores, grammar.after(sentence), is_empty=not sentence)
        elif self._timestamps:
            return self._prefer_timestamp(scores)
        return math.inf

    def _follow(self, scores: Scores, following: Following, *, is_empty: bool) -> None:
        """Allow only what may follow in a sentence. Probabilities are those without the grammar.

        As without one, only timestamps are allowed if all of them together are more probable than any
        other token. Where no token spells what follows, the text ends with an impossible probability.

        Args:
            scores: after the other rules; changed in place.
            following: what may follow.
            is_empty: whether no sentence has begun, so that there may be none.
        """
        logits, begin, end = scores.logits, self._begin, self._end_of_text
        first = int(logits[:begin].argmax())
        peak, times = float(logits[first]), -math.inf
        if self._timestamps and logits[begin:].max() > -np.inf:
            times = log_sum_exp(logits[begin:])
        total = scores.log_sum().value  # raises if there is a NaN
        if times > peak:
            first = begin + int(logits[begin:].argmax())
        logprob = logits.item(first) - (times if times > peak else total)
        scores.free = FreeChoice(first, logprob, max(peak, times), times, begin)
        may_end = following.may_end or is_empty
        allowed, stop = logits[following.tokens], logits.item(end) if may_end else -math.inf
        best = max(float(allowed.max()) if allowed.size else -math.inf, stop)
        logits[:begin] = -np.inf
        if may_end and times > best:
            total = times if times > peak else total
        elif best == -math.inf:
            logits[begin:] = -np.inf
            logits[end] = total - IMPOSSIBLE
        else:
            if not (may_end and self._timestamps):
                logits[begin:] = -np.inf
            logits[following.tokens], logits[end] = allowed, stop
        scores.forget_sum()
        scores.total = total

    def _sentence(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """Return the text of the sentence that is being decoded; None: none has begun, or it has ended."""
        end, start = self._end_of_text, len(tokens)
        while start and tokens[start - 1] < end:
            start -= 1
        if start < len(tokens):
            return tokens[start:]
        if tokens and tokens[-1] == end:
            return None
        if not self._timestamps:
            return ()
        is_open = bool(tokens) and (len(tokens) < 2 or tokens[-2] >= self._begin)
        return () if is_open else None

    def _guard(self, scores: Scores, tokens: Sequence[int]) -> None:
        """Apply the guards against loops. They come before the other rules, as in transformers."""
        if self._penalty == 1 and not self._ngram_size:
            return
        text = [token for token in tokens if token < self._end_of_text]
        scores.forget_sum()
        if self._penalty != 1:
            penalize_repetition(scores.logits, text, self._penalty)
        if self._ngram_size:
            forbid_repeated_ngrams(scores.logits, text, self._ngram_size)

    def _pair_timestamps(self, scores: Scores, tokens: Sequence[int]) -> None:
        """Make timestamps come in pairs and never decrease."""
        begin = self._begin
        if not tokens:
            scores.forbid(slice(begin))
            if self._max_initial is not None:
                scores.forbid(slice(begin + self._max_initial + 1, None))
            return
        after_timestamp = tokens[-1] >= begin
        in_pair = after_timestamp and (len(tokens) < 2 or tokens[-2] >= begin)
        if in_pair:  # text follows the start of a segment
            scores.forbid(slice(begin, None))
        elif after_timestamp:  # a start timestamp or the end of text follows the end of a segment
            scores.forbid(slice(self._end_of_text))
        last = next((token for token in reversed(tokens) if token >= begin), None)
        if last is not None:
            closed = after_timestamp and not in_pair  # the next segment may start at the same time
            scores.forbid(slice(begin, last if closed else last + 1))

    def _prefer_timestamp(self, scores: Scores) -> float:
        """Allow only timestamps if all of them together are more probable than any other token.

        Returns:
            By how much they are more or less probable, in nats.
        """
        times, texts = scores.logits[self._begin :], scores.logits[: self._begin]
        peak = times.max()
        if peak == -np.inf:
            return math.inf
        # `argmax` is twice as fast as `max`.
        total = peak + np.log(np.exp(times - peak).sum())
        margin = total - texts[texts.argmax()]
        if margin > 0:
            scores.forbid_all_but(slice(self._begin, len(scores.logits)), float(total))
        return float(abs(margin))


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
