"""One utterance of a session: its audio while it waits, and its transcription, whose text only grows."""

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import numpy as np

from whisperport.apps.serving.admission import CLOSED_RETRY_S
from whisperport.apps.serving.lanes import Lanes, Urgency
from whisperport.apps.serving.realtime.ear import Samples
from whisperport.apps.serving.realtime.settings import Settings
from whisperport.errors import QueueFullError
from whisperport.runtime import Decoder, Steps
from whisperport.speech.audio import SAMPLE_RATE
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.transcription.live.transcriber import LiveTranscriber, LiveUpdate

T = TypeVar("T")


class Item:
    """An utterance. `transcribe` runs on another thread, all else on the event loop's.

    Args:
        lanes: runs the decodings.
        transcriber: the one with the adapter that the client asks for.
        settings: of the session when the utterance began.

    Attributes:
        id: name for the client.
        is_committed: whether there is no more audio.
        is_dropped: whether nobody wants the transcript.
        received_s: audio of the session that belongs to it, in seconds, with the silence around it.
        text: what is certain.
        tentative: text after that, which may change.
        shown: all text, with that which may change, when the client was told it last.
        unsent: certain text that the client is sent when the audio is committed.
    """

    def __init__(self, lanes: Lanes, transcriber: Transcriber, settings: Settings) -> None:
        self.id = f"item_{secrets.token_hex(12)}"
        self.settings = settings
        self.is_committed = self.is_dropped = False
        self.received_s = 0.0
        self.text, self.tentative, self.unsent, self.shown = AppendOnlyText(), "", "", ""
        self._lanes, self._transcriber = lanes, transcriber
        self._decoding: Future[Any] | None = None
        self._waiting: list[Samples] = []
        self._live: LiveTranscriber | None = None

    @property
    def waiting_s(self) -> float:
        """Audio that was not transcribed yet, in seconds."""
        return sum(part.size for part in self._waiting) / SAMPLE_RATE

    @property
    def has_work(self) -> bool:
        """Whether there is something to transcribe, or the transcript to complete."""
        return not self.is_dropped and (bool(self._waiting) or self.is_committed)

    def add(self, samples: Samples) -> None:
        """Add audio, (n,) int16 at 16 kHz."""
        if samples.size:
            self._waiting.append(samples)

    def drop(self) -> None:
        """End the decoding; the transcript is not wanted any more."""
        self.is_dropped = True
        if self._decoding is not None:
            self._decoding.cancel()

    def work(self) -> Callable[[], str]:
        """Return the next work, for another thread: it returns the text that is certain now.

        The work raises the errors of `LiveTranscriber`, and QueueFullError when the server shuts down.
        """
        parts, self._waiting = self._waiting, []
        is_last = self.is_committed

        def transcribe() -> str:
            if self._live is None:
                if not parts:  # nobody spoke
                    return ""
                options = self.settings.live_options()
                self._live = LiveTranscriber(self._transcriber, options, run=self._run)
            update = self._live.feed(_floats(parts))
            new = self._new_text(update)
            return new + self._new_text(self._live.finish(), final=True) if is_last else new

        return transcribe

    def _new_text(self, update: LiveUpdate, *, final: bool = False) -> str:
        new = self.text.update(update, final=final)
        self.tentative = self.text.held + update.tentative
        return new

    def _run(self, start: Callable[[Decoder], Steps[T]]) -> T:
        """Run a decoding on the server's lanes, before those of files."""
        decoding = self._lanes.submit(start, Urgency.LIVE, self._transcriber.engine)
        self._decoding = decoding
        if self.is_dropped:
            decoding.cancel()
        try:
            return decoding.result()
        except CancelledError as error:
            raise QueueFullError(CLOSED_RETRY_S, closing=True) from error


def _floats(parts: list[Samples]) -> Any:
    samples = np.concatenate(parts) if parts else np.empty(0, np.int16)
    return samples.astype(np.float32) / np.float32(32768)


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
