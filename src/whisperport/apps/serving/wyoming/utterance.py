"""The audio of one utterance while it arrives, and where someone speaks in it."""

import numpy as np
from numpy.typing import NDArray

from whisperport.apps.serving.wyoming.reader import FaultError
from whisperport.errors import AudioError
from whisperport.speech.audio import SAMPLE_RATE, SpeechTurn, SpeechTurns, VadOptions
from whisperport.speech.audio.pcm_stream import PCM_OF_BYTES, PcmStream

MAX_S = 60.0  # Home Assistant ends a command after 15 s
PAUSES_S = {
    "aggressive": 0.25,
    "default": 0.7,
    "relaxed": 1.25,
}  # as Home Assistant's own detection

AudioForm = tuple[int, int, int]  # sample rate in Hz, bytes per sample, channels


class Utterance:
    """Converts chunks of audio of any form to one array at 16 kHz.

    Args:
        sensitivity: how long a pause ends the speech: aggressive, default or relaxed.

    Attributes:
        has_speech: whether someone spoke.
        has_ended: whether someone spoke, and then a pause followed.
    """

    def __init__(self, sensitivity: str) -> None:
        pause_s = PAUSES_S.get(sensitivity, PAUSES_S["default"])
        self._turns = SpeechTurns(VadOptions(min_silence_s=pause_s))
        self._form: AudioForm | None = None
        self._stream: PcmStream | None = None
        self._parts: list[NDArray[np.int16]] = []
        self._n_samples = 0
        self.has_speech = self.has_ended = False

    @property
    def duration_s(self) -> float:
        """Duration so far, in seconds."""
        return self._n_samples / SAMPLE_RATE

    def add(self, form: AudioForm, data: bytes) -> None:
        """Add a chunk. Its form may differ from the last one's.

        Raises:
            FaultError: there is no such form, or the utterance is longer than 60 s.
        """
        stream = self._stream_of(form)
        if self.duration_s + len(data) / stream.bytes_per_s > MAX_S:
            raise FaultError("too-long", f"an utterance has at most {MAX_S:.0f} s of audio")
        self._append(stream.push(data))

    def end(self) -> NDArray[np.int16]:
        """Return the samples (n,) at 16 kHz."""
        if self._stream is not None:
            self._append(self._stream.end())
            self._note(self._turns.end())
        return np.concatenate(self._parts) if self._parts else np.empty(0, np.int16)

    def _stream_of(self, form: AudioForm) -> PcmStream:
        if self._stream is None or form != self._form:
            if self._stream is not None:
                self._append(self._stream.end())
            self._form, self._stream = form, new_stream(form)
        return self._stream

    def _append(self, samples: NDArray[np.int16]) -> None:
        if samples.size:
            self._parts.append(samples)
            self._n_samples += samples.size
            self._note(self._turns.push(samples))

    def _note(self, turns: list[SpeechTurn]) -> None:
        for turn in turns:
            self.has_speech = True
            self.has_ended = not turn.begins


def new_stream(form: AudioForm) -> PcmStream:
    """Return a converter of samples of a form.

    Raises:
        FaultError: there is no such form.
    """
    rate, width, channels = form
    if width not in PCM_OF_BYTES:
        raise FaultError("bad-audio", f"a sample has {width} bytes; expected 1 to 4")
    try:
        return PcmStream(PCM_OF_BYTES[width], rate, channels)
    except AudioError as error:
        raise FaultError("bad-audio", f"{error.what}; {error.why}") from error
