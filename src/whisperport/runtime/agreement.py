"""Which words of a growing sound are certain: those on which two hypotheses in a row agree.

    before   set a timer | for ten
    now      set a timer | for twenty minutes
             committed     └─┬─┘ committed now; `twenty minutes` waits for the next hypothesis

Source: LocalAgreement-2 of Liu et al. 2020, as used for Whisper by Machacek et al. 2023, "Turning
Whisper into Real-Time Transcription System". Words already committed are found again in a new
hypothesis by edit distance, where theirs compares times and the last five words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whisperport.text import Word
from whisperport.text.normalize import normalize


@dataclass(frozen=True, slots=True)
class HypothesisWord:
    """A word of a hypothesis, and whether a segment begins with it."""

    word: Word
    starts_segment: bool = False

    @property
    def key(self) -> str:
        """What is compared: punctuation and case change with what follows, the word does not."""
        return normalize(self.word.word) or self.word.word.strip()


class Agreement:
    """The words of one stretch of sound, as hypotheses about it follow one another."""

    def __init__(self) -> None:
        self.committed: tuple[HypothesisWord, ...] = ()  # of the stretch that is still heard
        self.tentative: tuple[HypothesisWord, ...] = ()  # the rest of the last hypothesis
        self._until = 0.0  # seconds at which the sound of the last hypothesis ended

    def update(
        self, hypothesis: Sequence[HypothesisWord], until: float, *, final: bool = False
    ) -> tuple[HypothesisWord, ...]:
        """Take a hypothesis about the whole stretch, and commit what it confirms.

        A word is confirmed by two that heard it to its end: what a model adds where the sound stops
        is a guess, and often the same guess twice.

        Args:
            until: seconds at which its sound ends.
            final: no hypothesis follows; all of this one is committed.

        Returns:
            The words committed now, as this hypothesis has them.
        """
        already = count_committed(self.committed, hypothesis)
        self._renew_punctuation(hypothesis[:already])
        rest = tuple(hypothesis[already:])
        agreed = len(rest) if final else _confirmed(self.tentative, rest, self._until)
        self.committed += rest[:agreed]
        self.tentative, self._until = rest[agreed:], until
        return rest[:agreed]

    def drop_before(self, before_s: float) -> tuple[HypothesisWord, ...]:
        """The stretch now begins at `before_s`: returns the committed words that ended by then."""
        gone = tuple(heard for heard in self.committed if heard.word.end <= before_s)
        self.committed = tuple(heard for heard in self.committed if heard.word.end > before_s)
        return gone

    def _renew_punctuation(self, spoken: Sequence[HypothesisWord]) -> None:
        """A sentence that seemed to end may go on: the last word is as this hypothesis writes it."""
        if self.committed and spoken and spoken[-1].key == self.committed[-1].key:
            last = self.committed[-1]
            word = replace(last.word, word=spoken[-1].word.word)
            self.committed = (*self.committed[:-1], replace(last, word=word))


def count_committed(
    committed: Sequence[HypothesisWord], hypothesis: Sequence[HypothesisWord]
) -> int:
    """How many words at the beginning of `hypothesis` are those committed.

    The beginning of least edit distance; of several, the one whose end is nearest in time.
    """
    if not committed:
        return 0
    keys = [heard.key for heard in hypothesis]
    distances = list(range(len(keys) + 1))
    for row, heard in enumerate(committed, start=1):
        diagonal, distances[0] = distances[0], row
        for i, key in enumerate(keys, start=1):
            replaced = diagonal + (key != heard.key)
            diagonal = distances[i]
            distances[i] = min(replaced, distances[i] + 1, distances[i - 1] + 1)
    end = committed[-1].word.end
    ends = [0.0, *(heard.word.end for heard in hypothesis)]
    return min(range(len(ends)), key=lambda i: (distances[i], abs(ends[i] - end)))


def _confirmed(
    before: Sequence[HypothesisWord], now: Sequence[HypothesisWord], until: float
) -> int:
    """How many words both begin with that end by `until`, where the sound of `before` ends."""
    count = 0
    for old, new in zip(before, now, strict=False):
        if old.key != new.key or new.word.end > until:
            break
        count += 1
    return count
