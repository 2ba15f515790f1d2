"""Transcribe audio while it arrives, from its first piece to the complete transcript."""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numpy.typing import NDArray

from whisperport.errors import AudioError, IncompleteError, Interrupted
from whisperport.program.bundle import Bundle
from whisperport.speech.audio.live_pieces import ReadAhead, live_audio
from whisperport.speech.audio.microphone import microphone_audio
from whisperport.transcription.live.live_options import LiveOptions
from whisperport.transcription.live.transcriber import LiveTranscriber, LiveUpdate
from whisperport.transcription.transcriber import Transcriber
from whisperport.transcription.transcript import Transcript

Pieces = Iterable[NDArray[Any]]


def live(
    audio: str | os.PathLike[str] | Pieces | None = None,
    bundle: Transcriber | Bundle | str | os.PathLike[str] | None = None,
    options: LiveOptions | None = None,
    *,
    updated: Callable[[LiveUpdate], None] = lambda _: None,
) -> Transcript:
    """Transcribe audio while it arrives, and return the transcript when it ends.

    No audio is lost while the model runs. To feed audio from your own loop, use `LiveTranscriber`.

    Args:
        audio: the path of a file, which is played in real time; "-" for standard input; pieces (n,) of
            floats, mono, 16 kHz, within [-1, 1]; or None: the system's microphone, until Ctrl-C.
        bundle: a loaded `Transcriber`, or what it loads: a bundle or the name of a model.
        options: live options; None: defaults. `options.transcribe.run` is not used with a `Transcriber`.
        updated: called with each change of the transcript: words that became certain, and tentative text.

    Raises:
        AudioError: the audio is missing or failed before any of it was transcribed.
        IncompleteError: the audio failed later; carries the transcript until then.
        Interrupted: Ctrl-C; carries the transcript until then.
        MissingPackageError: a microphone's library, or the runtime of a target, is not installed.
        UsageError: an option cannot be used live, or there is no such language.
    """
    pieces = _pieces(audio)  # before the model is loaded: there may be no microphone
    options = options or LiveOptions()
    if not isinstance(bundle, Transcriber):
        bundle = Transcriber(bundle, options.transcribe.run)
    transcriber, failure = LiveTranscriber(bundle, options), None
    try:
        try:
            for samples in pieces:
                updated(transcriber.feed(samples))
        except AudioError as error:
            failure = error
        updated(transcriber.finish())
    except KeyboardInterrupt:
        raise Interrupted(transcriber.transcript()) from None
    transcript = transcriber.transcript()
    if failure is None:
        return transcript
    if not transcript.duration_s:
        raise failure
    raise IncompleteError(failure.what, transcript, why=failure.why, hint=failure.hint) from failure


def _pieces(audio: str | os.PathLike[str] | Pieces | None) -> Pieces:
    """Return the pieces of audio; those of a file, pipe or microphone are collected from the first on."""
    if audio is None:
        return _read_ahead(microphone_audio())
    if isinstance(audio, str | os.PathLike):
        return _read_ahead(live_audio(audio))
    return audio


def _read_ahead(pieces: Pieces) -> Iterator[NDArray[Any]]:
    source = ReadAhead(pieces)
    while (samples := source.take()) is not None:
        yield samples
