"""One Wyoming connection: any number of utterances, one after the other.

idle ──audio-start or audio-chunk──► audio ──audio-stop──► decoding ──transcript──► idle
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioFormat, AudioStart, AudioStop
from wyoming.error import Error
from wyoming.event import Event, async_write_event
from wyoming.info import AsrModel, AsrProgram, Attribution, Describe, Info
from wyoming.ping import Ping, Pong

from whisperport.apps.serving.lanes import Urgency
from whisperport.apps.serving.service import Service
from whisperport.apps.serving.wyoming.reader import FaultError, read_event
from whisperport.apps.serving.wyoming.utterance import AudioForm, Utterance, new_stream, options_of
from whisperport.errors import QueueFullError
from whisperport.transcription import TranscribeOptions

log = logging.getLogger("whisperport.apps.serving")

T = TypeVar("T")

IDLE_FACTOR = 10  # a connection without an utterance may be silent for so many times `idle_seconds`
WRITE_S = 10.0  # a client that does not read for so long is closed


class Connection:
    """Serves one client.

    Args:
        service: what is served.
        reader: of the socket, with the limit `reader.MAX_LINE`.
        writer: of the socket.
    """

    def __init__(
        self, service: Service, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._service, self._reader, self._writer = service, reader, writer
        self._asked = Transcribe()
        self._utterance: Utterance | None = None  # while there is audio
        self._is_over = (
            False  # whether the rest of the audio is dropped: its transcript was sent early
        )
        self._decoding: asyncio.Task[None] | None = None
        self._is_closing = False

    async def run(self) -> None:
        """Serve until the client closes the connection, or until a fault, which it is told."""
        try:
            while (event := await self._next()) is not None:
                await self._handle(event)
        except FaultError as fault:
            await self._fail(fault)
        except OSError:  # the client is gone
            pass
        finally:
            if self._decoding is not None:
                self._decoding.cancel()
            await self._hang_up()

    def close(self) -> None:
        """Close the connection as soon as the current utterance is done."""
        self._is_closing = True
        self._close_if_idle()

    def abort(self) -> None:
        """Close the connection now."""
        self._writer.transport.abort()

    async def reject(self, fault: FaultError) -> None:
        """Tell why there is no connection, and close it."""
        await self._fail(fault)
        await self._hang_up()

    async def _next(self) -> Event | None:
        """Return the next event; None at the end of the connection, or of the time it may be silent."""
        idle_s = self._service.options.idle_seconds
        while True:
            try:
                async with asyncio.timeout(idle_s if self._utterance else idle_s * IDLE_FACTOR):
                    return await read_event(self._reader, self._service.turns)
            except TimeoutError as error:
                if self._utterance is not None:
                    raise FaultError("too-long", f"no audio arrived for {idle_s:g} s") from error
                if self._decoding is None:
                    return None

    async def _handle(self, event: Event) -> None:
        if Describe.is_type(event.type):
            await self._send(info_of(self._service).event())
        elif Ping.is_type(event.type):
            await self._send(Pong(_parsed(Ping.from_event, event).text).event())
        elif Transcribe.is_type(event.type):
            self._asked = _parsed(Transcribe.from_event, event)
        elif AudioStart.is_type(event.type):
            new_stream(_form(_parsed(AudioStart.from_event, event)))
            self._utterance, self._is_over = self._new_utterance(), False
        elif AudioChunk.is_type(event.type):
            await self._add(_parsed(AudioChunk.from_event, event))
        elif AudioStop.is_type(event.type):
            await self._stop()

    def _new_utterance(self) -> Utterance:
        sensitivity = self._asked.vad_sensitivity
        return Utterance(sensitivity if isinstance(sensitivity, str) else "default")

    async def _add(self, chunk: AudioChunk) -> None:
        """Add audio. If this server detects the end of speech, that may be it."""
        if self._is_over:
            return
        self._utterance = self._utterance or self._new_utterance()
        await asyncio.to_thread(self._utterance.add, _form(chunk), chunk.audio)
        if self._service.options.wyoming_vad and self._utterance.has_ended:
            self._is_over = True
            self._decode(self._utterance)

    async def _stop(self) -> None:
        utterance, self._utterance = self._utterance, None
        if not self._is_over:
            self._decode(utterance or self._new_utterance())
        self._is_over, self._asked = False, Transcribe()

    def _decode(self, utterance: Utterance) -> None:
        """Begin to decode an utterance. Events are still read, such as the end of the connection."""
        if self._decoding is not None and not self._decoding.done():
            raise FaultError("busy", "the transcript of the last utterance was not sent yet")
        options = options_of(
            self._asked, self._service.transcriber, self._service.options.wyoming_language
        )
        self._decoding = asyncio.create_task(self._answer(utterance, options))

    async def _answer(self, utterance: Utterance, options: TranscribeOptions) -> None:
        """Send the transcript of an utterance, or the fault."""
        began, status = time.monotonic(), "disconnect"
        try:
            samples = await asyncio.to_thread(utterance.end)
            transcript = Transcript("", language=options.decode.language)
            if utterance.has_speech:  # otherwise the model would invent something
                transcript = await self._transcribed(samples, options)
            await self._send(transcript.event())
            status = "transcript"
        except FaultError as fault:
            status = fault.code
            await self._fail(fault)
            self._writer.close()
        except OSError:  # the client is gone
            pass
        finally:
            self._record(status, utterance.duration_s, time.monotonic() - began)
        self._decoding = None
        self._close_if_idle()

    async def _transcribed(
        self, samples: NDArray[np.int16], options: TranscribeOptions
    ) -> Transcript:
        try:
            future = self._service.scheduler.transcribe(samples, options, urgency=Urgency.LIVE)
            transcript = await asyncio.wrap_future(future)
        except QueueFullError as error:
            raise FaultError("busy", error.what) from error
        except Exception as error:
            log.error("a Wyoming utterance failed", exc_info=error)
            raise FaultError("internal", "the utterance could not be transcribed") from error
        return Transcript(transcript.text.strip(), language=transcript.language)

    async def _send(self, event: Event) -> None:
        async with asyncio.timeout(WRITE_S):
            await async_write_event(event, self._writer)

    async def _fail(self, fault: FaultError) -> None:
        with suppress(OSError):
            await self._send(Error(fault.text, fault.code).event())

    async def _hang_up(self) -> None:
        """Close the connection, also if the client does not read what was sent."""
        self._writer.close()
        with suppress(OSError):
            async with asyncio.timeout(WRITE_S):
                await self._writer.wait_closed()
        self.abort()

    def _close_if_idle(self) -> None:
        if self._is_closing and self._utterance is None and self._decoding is None:
            self._writer.close()

    def _record(self, status: str, audio_s: float, seconds: float) -> None:
        """Count an utterance, and write its line in the log, without text."""
        metrics = self._service.metrics
        metrics.count("requests_total", "Requests", endpoint="wyoming", status=status)
        metrics.observe(
            "e2e_seconds", "From the end of the upload to the end of the answer", seconds
        )
        log.info("WYOMING %s %.3f s audio=%.2f", status, seconds, audio_s)


def _parsed(parse: Callable[[Event], T], event: Event) -> T:
    """Parse an event with the package's class, which does not check types."""
    try:
        return parse(event)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FaultError(
            "bad-event", f"the event {event.type[:50]!r} lacks a member or has another type"
        ) from error


def _form(stated: AudioFormat) -> AudioForm:
    form = stated.rate, stated.width, stated.channels
    if any(type(value) is not int for value in form):
        raise FaultError("bad-audio", "`rate`, `width` and `channels` are whole numbers")
    return form


PROGRAM = "whisperport"
URL = "https://github.com/openai/whisper"


def info_of(service: Service) -> Info:
    """Return the program, its model and the languages of the model."""
    name, options = service.model_ids[0], service.options
    model = AsrModel(
        name=name,
        attribution=Attribution("OpenAI and the model's authors", URL),
        installed=True,
        description=f"{service.about['bundle']} on {service.about['backend']}",
        version=service.about["sha256"][:12],
        languages=list(service.transcriber.engine.generation.languages) or ["en"],
    )
    program = AsrProgram(
        name=PROGRAM,
        attribution=Attribution("whisperport", URL),
        installed=True,
        description="Whisper on this machine",
        version=version("whisperport"),
        models=[model],
        requires_external_vad=not options.wyoming_vad,
        # Whisper was trained on speech of all levels with noise.
        prefers_auto_gain_enabled=False,
        prefers_noise_reduction_enabled=False,
    )
    return Info(asr=[program])
