"""Find the certain words while audio arrives: those on which two consecutive hypotheses agree.

    before   set a timer | for ten
    now      set a timer | for twenty minutes
             committed     └─┬─┘ committed now; `twenty minutes` stays tentative

Source: LocalAgreement-2 of Liu et al. 2020, as used for Whisper by Machacek et al. 2023, "Turning
Whisper into Real-Time Transcription System". Difference: this code finds the committed words in a new
hypothesis by edit distance. Machacek et al. compare timestamps and the last five words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whisperport.speech.text import Match, Word
from whisperport.speech.text.normalize import normalize


@dataclass(frozen=True, slots=True)
class HypothesisWord:
    """A word of a hypothesis, whether it is the first of a segment, and the verdict about that."""

    word: Word
    starts_segment: bool = False
    match: Match | None = None  # None: there is no grammar

    @property
    def key(self) -> str:
        """The normalized word. Case and punctuation are not compared: they depend on the next words."""
        return normalize(self.word.word) or self.word.word.strip()


class Agreement:
    """The committed and tentative words of the audio in a buffer.

    Attributes:
        committed: certain words whose audio is still in the buffer.
        tentative: the words of the last hypothesis after the committed ones.
    """

    def __init__(self) -> None:
        self.committed: tuple[HypothesisWord, ...] = ()
        self.tentative: tuple[HypothesisWord, ...] = ()
        self._until = 0.0  # end of the audio of the last hypothesis, in seconds

    def update(
        self, hypothesis: Sequence[HypothesisWord], until: float, *, final: bool = False
    ) -> tuple[HypothesisWord, ...]:
        """Add a hypothesis about all audio in the buffer, and commit the words that it confirms.

        A word is confirmed if two consecutive hypotheses contain it and the audio of both included all of
        it. Words that a model adds after the end of the audio are guesses, and it often repeats a guess.

        Args:
            hypothesis: words in order, committed ones included.
            until: end of the audio of this hypothesis, in seconds.
            final: whether this is the last hypothesis, so that all of its words are committed.

        Returns:
            The words committed by this call, as this hypothesis spells them.
        """
        already = count_committed(self.committed, hypothesis)
        self._renew_punctuation(hypothesis[:already])
        rest = tuple(hypothesis[already:])
        agreed = len(rest) if final else _confirmed(self.tentative, rest, self._until)
        self.committed += rest[:agreed]
        self.tentative, self._until = rest[agreed:], until
        return rest[:agreed]

    def drop_before(self, before_s: float) -> tuple[HypothesisWord, ...]:
        """Remove the committed words that end at or before `before_s` seconds, and return them."""
        removed = tuple(entry for entry in self.committed if entry.word.end <= before_s)
        self.committed = tuple(entry for entry in self.committed if entry.word.end > before_s)
        return removed

    def _renew_punctuation(self, spoken: Sequence[HypothesisWord]) -> None:
        """Take the last committed word's punctuation from this hypothesis: the sentence may continue."""
        if self.committed and spoken and spoken[-1].key == self.committed[-1].key:
            last = self.committed[-1]
            word = replace(last.word, word=spoken[-1].word.word)
            self.committed = (*self.committed[:-1], replace(last, word=word))


def count_committed(
    committed: Sequence[HypothesisWord], hypothesis: Sequence[HypothesisWord]
) -> int:
    """Return how many words at the beginning of `hypothesis` are the committed ones.

    This is the length of the beginning with the smallest edit distance to `committed`. Of several, it is
    the one whose end is nearest in time.
    """
    if not committed:
        return 0
    keys = [entry.key for entry in hypothesis]
    distances = list(range(len(keys) + 1))
    for row, entry in enumerate(committed, start=1):
        diagonal, distances[0] = distances[0], row
        for i, key in enumerate(keys, start=1):
            replaced = diagonal + (key != entry.key)
            diagonal = distances[i]
            distances[i] = min(replaced, distances[i] + 1, distances[i - 1] + 1)
    end = committed[-1].word.end
    ends = [0.0, *(entry.word.end for entry in hypothesis)]
    return min(range(len(ends)), key=lambda i: (distances[i], abs(ends[i] - end)))


def _confirmed(
    before: Sequence[HypothesisWord], now: Sequence[HypothesisWord], until: float
) -> int:
    """Count the first words that both share and that end by `until`, the end of the audio of `before`."""
    count = 0
    for old, new in zip(before, now, strict=False):
        if old.key != new.key or new.word.end > until:
            break
        count += 1
    return count
