"""One realtime session: what a client's events do through any connection, and the events kept for it."""

import asyncio
import json
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext
from itertools import islice
from typing import Any, TypeVar

from whisperport.apps.serving.api_error import ApiError, api_error
from whisperport.apps.serving.json_text import parsed
from whisperport.apps.serving.realtime.ear import Began, Ear, Ended, Received, audio_of
from whisperport.apps.serving.realtime.item import Item
from whisperport.apps.serving.realtime.settings import Settings, updated
from whisperport.apps.serving.service import Service
from whisperport.speech.audio import SAMPLE_RATE

log = logging.getLogger("whisperport.apps.serving")

T = TypeVar("T")

MAX_WAITING_S = 600.0  # audio that may wait for its transcription
SMALL = 2**16  # characters of a message that are parsed on the event loop's thread
TRANSCRIPTION = "conversation.item.input_audio_transcription"
MAX_CHARACTERS = 4 * 2**20  # of kept events: days of speech
TENTATIVE = f"{TRANSCRIPTION}.tentative"


class Session:
    """The state of a session. Use it on the event loop's thread, one event at a time.

    Args:
        service: what is served.
        threads: wait for decodings.
        converters: threads that parse large messages and convert audio.
        large: lets one session at a time handle a large message, so that few copies are in memory.
        settings: at the beginning.

    Attributes:
        id: name for the client, who can resume the session with it.
        outbox: the events for the client.
    """

    def __init__(
        self,
        service: Service,
        threads: Executor,
        converters: Executor,
        large: asyncio.Semaphore,
        settings: Settings,
    ) -> None:
        self.id = f"sess_{secrets.token_urlsafe(24)}"
        self.outbox = Outbox()
        self._service, self._settings = service, settings
        self._threads, self._converters, self._large = threads, converters, large
        self._ear = Ear(settings)
        self._from_s = 0.0  # what was received before is committed or cleared
        self._item: Item | None = None  # of the utterance that is spoken now
        self._committed: list[Item] = []  # which are not transcribed yet
        self._previous: str | None = None  # id of the item that was committed last
        self._handling = asyncio.Lock()
        self._new_work = asyncio.Event()
        self._worker = asyncio.create_task(self._work())
        self.outbox.put("session.created", session=settings.document(self.id))

    @property
    def received_s(self) -> float:
        """Audio that the client sent, in seconds."""
        return self._ear.received_s

    def created(self) -> dict[str, Any]:
        """Return the event that tells the id and the settings."""
        return {"type": "session.created", "session": self._settings.document(self.id)}

    async def handle(self, message: str) -> None:
        """Handle an event of the client. What is wrong with it is answered; the session goes on."""
        async with self._handling, self._large if len(message) > SMALL else nullcontext():
            await self._answered(message)

    async def _answered(self, message: str) -> None:
        event: Any = None
        try:
            event = await self._parsed(message)
            await self._handle(event)
        except Exception as failure:
            self._reject(event, failure)

    def _reject(self, event: Any, failure: Exception) -> None:
        """Answer an event that is wrong.

        In the caller, a name for the answer would refer to the exception, its traceback, and so to the
        caller's message: a cycle that keeps 20 MB until the garbage collector finds it.
        """
        error = api_error(failure)
        if error.status == 500:
            log.error("an event of a realtime session failed", exc_info=failure)
        client_id = event.get("event_id") if isinstance(event, dict) else None
        event_id = client_id if isinstance(client_id, str) else None
        self.outbox.put("error", error={**error.document()["error"], "event_id": event_id})

    async def finish(self) -> None:
        """Commit what was received, and wait for all transcripts."""
        async with self._handling:
            if self._item is not None:
                self._commit()
            while self._committed:
                await asyncio.sleep(0.02)

    def close(self) -> None:
        """End all work."""
        self._worker.cancel()
        self.outbox.close()
        for item in [*self._committed, *([self._item] if self._item else [])]:
            item.drop()

    async def _parsed(self, message: str) -> Any:
        try:
            if len(message) <= SMALL:
                await self._service.turns.wait()
                event = parsed(message)
            else:
                event = await self._converted(lambda: parsed(message))
        except ValueError as error:
            why = f"The message cannot be read as JSON: {error}"
            raise ApiError(400, why, code="invalid_json") from error
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise ApiError(400, "The event has no `type`", code="invalid_event", param="type")
        return event

    async def _handle(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "input_audio_buffer.append":
            await self._append(event.get("audio"))
        elif kind == "input_audio_buffer.commit":
            if self._ear.received_s <= self._from_s:
                message = "The audio buffer is empty: append audio before the commit"
                raise ApiError(400, message, code="input_audio_buffer_commit_empty")
            self._commit()
            self._ear.forget()
        elif kind == "input_audio_buffer.clear":
            self._clear()
        elif kind == "session.update":
            self._update(event.get("session"))
        else:
            message = f"The event {kind[:100]!r} is not part of transcription sessions"
            raise ApiError(400, message, code="unsupported_event", param="type")

    def _update(self, changes: Any) -> None:
        generation = self._service.transcriber.engine.generation
        settings = updated(self._settings, changes, self._service.model_ids, generation)
        before, self._settings = self._settings, settings
        audible = ("kind", "rate", "vad")
        if any(getattr(before, name) != getattr(settings, name) for name in audible):
            if self._item is not None:  # its audio has the settings before
                self._commit()
            self._ear = Ear(settings, self._ear.received_s)
        self.outbox.put("session.updated", session=settings.document(self.id))

    async def _append(self, audio: object) -> None:
        data = await self._converted(lambda: audio_of(audio))
        waiting_s = sum(item.waiting_s for item in [*self._committed, *self._current()])
        if waiting_s + self._ear.seconds(data) > MAX_WAITING_S:
            message = f"More than {MAX_WAITING_S:.0f} s of audio wait for their transcription"
            raise ApiError(429, message, code="input_audio_buffer_full", param="audio")
        for received in await self._converted(lambda: self._ear.push(data)):
            self._take(received)
        self._new_work.set()

    def _take(self, received: Received) -> None:
        has_vad = self._settings.vad is not None
        if isinstance(received, Began):
            self._item = self._new_item()
            if has_vad:
                self.outbox.put(
                    "input_audio_buffer.speech_started",
                    audio_start_ms=received.at_ms,
                    item_id=self._item.id,
                )
        elif isinstance(received, Ended):
            assert self._item is not None, "speech began"
            self.outbox.put(
                "input_audio_buffer.speech_stopped",
                audio_end_ms=received.at_ms,
                item_id=self._item.id,
            )
            self._commit()
        elif self._item is not None:
            self._item.received_s += received.size / SAMPLE_RATE
            self._item.add(received)

    def _new_item(self) -> Item:
        service, settings = self._service, self._settings
        return Item(service.scheduler.lanes, service.transcribers[settings.model], settings)

    def _commit(self) -> None:
        """End the current utterance; without speech, it has no text."""
        item = self._item or self._new_item()
        if item.settings.vad is None or self._item is None:
            item.received_s = self._ear.received_s - self._from_s
        self._item, self._from_s = None, self._ear.received_s
        item.is_committed = True
        self._announce(item)
        if not item.is_dropped:  # it failed before
            self._committed.append(item)
        self._new_work.set()

    def _announce(self, item: Item) -> None:
        previous, self._previous = self._previous, item.id
        self.outbox.put("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous)
        content = [{"type": "input_audio", "transcript": None}]
        about = {"id": item.id, "object": "realtime.item", "type": "message", "role": "user"}
        shown = {**about, "status": "completed", "content": content}
        for name in ("added", "done"):
            self.outbox.put(f"conversation.item.{name}", previous_item_id=previous, item=shown)
        if not item.settings.is_live:
            unsent, item.unsent = item.unsent, ""
            self._send_delta(item, unsent)

    def _clear(self) -> None:
        for item in self._current():
            item.drop()
        self._item, self._from_s = None, self._ear.received_s
        self._ear.forget()
        self.outbox.put("input_audio_buffer.cleared")

    def _current(self) -> list[Item]:
        return [self._item] if self._item is not None else []

    async def _work(self) -> None:
        """Transcribe one item at a time, the first one first, with all the audio that waits for it."""
        while True:
            await self._new_work.wait()
            self._new_work.clear()
            while item := next(
                (i for i in [*self._committed, *self._current()] if i.has_work), None
            ):
                await self._advance(item)

    async def _advance(self, item: Item) -> None:
        is_last, work = item.is_committed, item.work()
        try:
            new = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except Exception as failure:
            self._end(item, failure)
            return
        if item.is_dropped:
            return
        if item.settings.is_live or item.is_committed:
            new, item.unsent = item.unsent + new, ""
            self._send_delta(item, new)
        else:
            item.unsent += new
        if is_last:
            self._end(item, None)
        elif item.settings.tentative and item.shown != (shown := item.text.text + item.tentative):
            item.shown = shown
            self.outbox.put(TENTATIVE, item_id=item.id, content_index=0, text=item.tentative)

    def _send_delta(self, item: Item, text: str) -> None:
        if text:
            self.outbox.put(f"{TRANSCRIPTION}.delta", item_id=item.id, content_index=0, delta=text)

    def _end(self, item: Item, failure: BaseException | None) -> None:
        """Send the transcript of an item, or why there is none."""
        if item in self._committed:
            self._committed.remove(item)
        if item.is_dropped:
            return
        item.is_dropped = True  # what follows of it is not transcribed
        about: dict[str, Any] = {"item_id": item.id, "content_index": 0}
        if failure is not None:
            error = api_error(failure)
            if error.status == 500:
                log.error("an item of a realtime session failed", exc_info=failure)
            self.outbox.put(f"{TRANSCRIPTION}.failed", **about, error=error.document()["error"])
            return
        self._service.metrics.count("audio_seconds_total", "Audio transcribed", item.received_s)
        usage = {"type": "duration", "seconds": math.ceil(item.received_s)}
        transcript = item.text.text
        self.outbox.put(f"{TRANSCRIPTION}.completed", **about, transcript=transcript, usage=usage)

    async def _converted(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._converters, work)


class Outbox:
    """The events of a session in order, kept so that a client whose connection broke can read on.

    Use it on the event loop's thread.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[str, str]] = deque()  # id and JSON text
        self._first = 0  # number of the first kept event
        self._characters = 0
        self._new = asyncio.Event()
        self._tentative: int | None = None  # number of the last event with tentative words
        self._is_closed = False

    def put(self, kind: str, **members: Any) -> None:
        """Add an event; the oldest are dropped if there are too many."""
        if kind == TENTATIVE:
            self._forget_tentative()
            self._tentative = self.end
        event_id = f"event_{secrets.token_hex(12)}"
        text = json.dumps({"type": kind, "event_id": event_id, **members}, ensure_ascii=False)
        self._events.append((event_id, text))
        self._characters += len(text)
        self._drop_old()
        self._new.set()

    def close(self) -> None:
        """There are no more events after those that were added."""
        self._is_closed = True
        self._new.set()

    def _forget_tentative(self) -> None:
        """Remove the last tentative words: newer ones replace them."""
        if self._tentative is not None and self._tentative >= self._first:
            at = self._tentative - self._first
            self._characters -= len(self._events[at][1])
            self._events[at] = "", ""

    def _drop_old(self) -> None:
        while self._characters > MAX_CHARACTERS and len(self._events) > 1:
            self._characters -= len(self._events.popleft()[1])
            self._first += 1

    @property
    def end(self) -> int:
        """Number of events so far."""
        return self._first + len(self._events)

    def position_after(self, event_id: str | None) -> int:
        """Return the number of the event after one that the client has, or of the first one."""
        for number, (known, _) in enumerate(self._events, start=self._first):
            if event_id and known == event_id:
                return number + 1
        return self._first

    async def next(self, position: int) -> tuple[int, str]:
        """Wait for the event with this number; return the number of the one after it, and the event.

        Returns:
            The event as JSON; empty, if it was replaced by a newer one.

        Raises:
            EOFError: there are no more events.
        """
        while position >= self.end:
            if self._is_closed:
                raise EOFError
            self._new.clear()
            await self._new.wait()
        position = max(position, self._first)
        return position + 1, next(islice(self._events, position - self._first, None))[1]
