"""Which audio of a session belongs to an utterance."""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.realtime.settings import ServerVad, Settings
from whisperport.speech.audio import SAMPLE_RATE, SpeechTurns, VadOptions
from whisperport.speech.audio.pcm_stream import PcmStream

Samples = NDArray[np.int16]

MAX_APPEND = 15 * 2**20  # bytes of audio in one message: OpenAI's limit
SLACK_S = 0.5  # of the audio before speech: so much later than it begins is it known, at most


@dataclass(frozen=True, slots=True)
class Began:
    """An utterance begins at this millisecond of the session's audio, before its speech."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The utterance ends at this millisecond of the session's audio, after the pause."""

    at_ms: int


Received = Began | Ended | Samples


class Ear:
    """Converts the audio of a session to 16 kHz, and finds speech in it.

    The audio of an utterance begins `prefix_padding_ms` before its speech. With voice activity detection it
    ends when the pause is long enough; without, when the client commits.

    Args:
        settings: of the session.
        received_s: audio of the session before, in seconds.
    """

    def __init__(self, settings: Settings, received_s: float = 0.0) -> None:
        self.settings = settings
        self._stream = PcmStream(settings.codec, settings.rate)
        self._n_samples = round(received_s * SAMPLE_RATE)
        self.forget()

    @property
    def received_s(self) -> float:
        """Audio of the session so far, in seconds."""
        return self._n_samples / SAMPLE_RATE

    def seconds(self, data: bytes) -> float:
        """Return the duration of audio in the session's format."""
        return len(data) / self._stream.bytes_per_s

    def forget(self) -> None:
        """Begin anew after a commit or a clear: what was received belongs to no utterance."""
        vad = self.settings.vad or ServerVad()
        pause_s = vad.silence_duration_ms / 1000
        self._turns = SpeechTurns(VadOptions(threshold=vad.threshold, min_silence_s=pause_s))
        self._began_at = self._n_samples  # of the detection
        self._padding = vad.prefix_padding_ms * SAMPLE_RATE // 1000
        self._kept = round((pause_s + SLACK_S) * SAMPLE_RATE) + self._padding
        self._waiting = np.empty(0, np.int16)  # the last samples, which are in no utterance
        self._speaks = False

    def push(self, data: bytes) -> list[Received]:
        """Add bytes of audio, and return what is known now, in order."""
        return list(self._pushed(self._stream.push(data)))

    def _pushed(self, samples: Samples) -> Iterator[Received]:
        turns = self._turns.push(samples)
        self._n_samples += samples.size
        self._waiting = np.concatenate([self._waiting, samples])
        for turn in turns:
            if turn.begins and not self._speaks:
                self._taken_until(self._began_at + turn.at - self._padding)
                self._speaks = True
                yield Began(self._waiting_from * 1000 // SAMPLE_RATE)
            elif not turn.begins and self.settings.vad is not None:
                yield self._taken_until(self._began_at + turn.known_at)
                self._speaks = False
                yield Ended(self._waiting_from * 1000 // SAMPLE_RATE)
        if self._speaks:
            yield self._taken_until(self._n_samples)
        else:
            self._taken_until(self._n_samples - self._kept)

    @property
    def _waiting_from(self) -> int:
        return self._n_samples - self._waiting.size

    def _taken_until(self, position: int) -> Samples:
        """Return the waiting samples before a position of the session, and remove them."""
        samples, waiting = np.split(self._waiting, [max(position - self._waiting_from, 0)])
        self._waiting = waiting.copy()
        return samples


def audio_of(text: object) -> bytes:
    """Return the bytes of audio in a message.

    Raises:
        ApiError: it is not base64, or too long.
    """
    if not isinstance(text, str):
        raise ApiError(400, "`audio` is not a text", code="invalid_value", param="audio")
    if len(text) > MAX_APPEND // 3 * 4 + 4:
        message = f"`audio` has more than {MAX_APPEND} bytes: append smaller pieces"
        raise ApiError(400, message, code="invalid_value", param="audio")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        message = f"`audio` is not base64: {error}"
        raise ApiError(400, message, code="invalid_value", param="audio") from error
