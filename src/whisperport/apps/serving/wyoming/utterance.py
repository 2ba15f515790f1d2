"""An utterance: what its `transcribe` event asks, its audio while it arrives, and where speech is in it."""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from wyoming.asr import Transcribe

from whisperport.apps.serving.wyoming.reader import FaultError
from whisperport.errors import AudioError, UsageError
from whisperport.program.generation import Generation
from whisperport.runtime import DecodeOptions
from whisperport.runtime.decoding.decode import check_language, prompt_room
from whisperport.speech.audio import SAMPLE_RATE, SpeechTurn, SpeechTurns, VadOptions
from whisperport.speech.audio.pcm_stream import PCM_OF_BYTES, PcmStream
from whisperport.speech.text import Tokenizer, language_code
from whisperport.transcription import TranscribeOptions, Transcriber

MAX_S = 60.0  # Home Assistant ends a command after 15 s
PAUSES_S = {
    "aggressive": 0.25,
    "default": 0.7,
    "relaxed": 1.25,
}  # as Home Assistant's own detection

AudioForm = tuple[int, int, int]  # sample rate in Hz, bytes per sample, channels


def options_of(event: Transcribe, transcriber: Transcriber, default: str) -> TranscribeOptions:
    """Return the options of one utterance.

    Args:
        event: the event.
        transcriber: the loaded bundle.
        default: language if the event names none; empty: it is detected.

    Raises:
        FaultError: the model does not support the language, or the event has values of another type.
    """
    engine = transcriber.engine
    words = chain(_texts(event.transcript_names), _texts(event.transcript_terms))
    prompt = joined(words, transcriber.tokenizer, prompt_room(engine.dims))
    language = _language(event.language or default, engine.generation)
    return TranscribeOptions(decode=DecodeOptions(language=language), initial_prompt=prompt)


def joined(words: Iterable[str], tokenizer: Tokenizer, room: int) -> str:
    """Return as many of the words as fit into `room` tokens, the first ones first, with commas between."""
    kept: list[str] = []
    for word in words:
        # A space after a comma is always where the tokenizer splits, so that tokens can be added up.
        text = f" {word}"
        if len(tokenizer.encode(tokenizer.end_of(text, room + 1))) > room:
            break
        kept.append(word)
        room -= len(tokenizer.encode(f"{text},"))
    return ", ".join(kept)


def _language(language: object, generation: Generation) -> str | None:
    """Return the code of a language such as "en", "en-US" or "zh-hans"; None: it is detected.

    A language that Whisper does not have is detected. One that only this model does not have is an error.
    """
    if not isinstance(language, str) or language in ("", "auto"):
        return None
    try:
        code = language_code(language.replace("_", "-").split("-")[0], generation.languages)
    except UsageError:
        return None
    try:
        check_language(generation, DecodeOptions(language=code))
    except UsageError as error:
        raise FaultError("language", f"{error.what}: {error.why}") from error
    return code


def _texts(values: object) -> Iterator[str]:
    if values is None:
        return
    if not isinstance(values, list):
        raise FaultError("bad-event", "names and terms are lists of texts")
    for value in values:
        if not isinstance(value, str):
            raise FaultError("bad-event", "names and terms are lists of texts")
        if text := value.strip():
            yield text


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
