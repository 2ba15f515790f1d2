"""The text of committed words, to which is only appended."""

from collections.abc import Sequence

from whisperport.transcription import TranscribeOptions
from whisperport.transcription.live.transcriber import LiveUpdate

PUNCTUATION = TranscribeOptions().append_punctuations


class AppendOnlyText:
    """Holds back the punctuation of the last word, which may change until the next word.

    Attributes:
        text: what was returned so far.
        held: text after it that is held back.
    """

    def __init__(self) -> None:
        self.text, self.held = "", ""
        self._closed: list[str] = []  # words of segments that have ended
        self._count, self._last = (
            0,
            "",
        )  # words that were returned, and the last one without punctuation

    def update(self, update: LiveUpdate, *, final: bool = False) -> str:
        """Return the text that is certain since the last call."""
        self._closed += [word.word for segment in update.closed for word in segment.words or ()]
        words = [*self._closed, *(word.word for word in update.open)]
        new, self.held = self._tail(words), ""
        if self._count < len(words):
            new += "".join(words[self._count : -1])
            self._count = len(words)
            self._last = words[-1].rstrip().rstrip(PUNCTUATION)
            new, self.held = new + self._last, words[-1][len(self._last) :]
        else:
            new, self.held = "", new
        if final:
            new, self.held = new + self.held, ""
        if not self.text:
            new = new.lstrip()
        self.text += new
        return new

    def _tail(self, words: Sequence[str]) -> str:
        """Return what follows the last returned word now: the rest of it changed, or its beginning too."""
        if not self._count:
            return ""
        now = words[self._count - 1]
        is_same = now.casefold().startswith(self._last.casefold())
        return now[len(self._last) :] if is_same else ""
