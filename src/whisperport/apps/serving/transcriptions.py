"""The endpoints `/v1/audio/transcriptions` and `/v1/audio/translations`."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from whisperport.apps.serving.api_error import api_error
from whisperport.apps.serving.asked import Asked, Task, asked_of
from whisperport.apps.serving.events import KEEP_ALIVE, KEEP_ALIVE_S, Events, failed
from whisperport.apps.serving.form import Fields, Form, wrong
from whisperport.apps.serving.formats import n_tokens, response_of
from whisperport.apps.serving.models import check_model
from whisperport.apps.serving.service import Service
from whisperport.transcription import Transcript

IGNORED = "x-whisperport-ignored-fields"


class Endpoint:
    """Transcribes the file of a request.

    Args:
        service: what is served.
        task: "transcribe" or "translate".
    """

    def __init__(self, service: Service, task: Task) -> None:
        self._service, self._task = service, task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.request() as admitted:
            async with await Form.read(Request(scope, receive), self._service.turns) as form:
                asked = self._asked(form.fields)
                if form.upload is None:
                    raise wrong("file", "`file` is required, as a file of the form")
                if not form.size:
                    raise wrong("file", "The file is empty: it has 0 bytes")
                call = _Call(self._service, asked, form, scope["state"]["log"], admitted)
                await call.answer(scope, receive, send)

    def _asked(self, fields: Fields) -> Asked:
        if model := fields.one("model"):  # without, it is the one that is served
            check_model(self._service, model)
        return asked_of(fields, self._service.transcriber.engine.generation, self._task)


class _Call:
    """One request whose fields are correct."""

    def __init__(
        self,
        service: Service,
        asked: Asked,
        form: Form,
        log: dict[str, Any],
        admitted: object,
    ) -> None:
        self._service, self._asked, self._log = service, asked, log
        self._began, self._has_text = time.monotonic(), False
        self._items: asyncio.Queue[Transcript | None] = asyncio.Queue()  # None: it is done
        self._loop = asyncio.get_running_loop()
        ignored = form.fields.ignored
        self._headers = {IGNORED: ", ".join(ignored)} if ignored else {}
        assert form.upload is not None
        on_window = self._put if asked.stream else None
        self._future = service.scheduler.transcribe(
            form.upload, asked.options, on_window=on_window, admitted=admitted
        )
        self._future.add_done_callback(lambda _: self._put(None))

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request. A client that leaves ends the work at the next decoder step."""
        try:
            first = asyncio.ensure_future(self._items.get())
            if await _comes_first(first, receive, KEEP_ALIVE_S if self._asked.stream else None):
                response = self._response(first)
                response.headers.update(self._headers)
                await response(scope, receive, send)
        finally:
            self._future.cancel()
            first.cancel()
            self._record()

    def _response(self, first: "asyncio.Future[Transcript | None]") -> Response:
        """Return the answer: complete, or a stream of events, if it has not failed before the first."""
        service = self._service
        if self._future.done() and (error := self._future.exception()):
            raise error
        if self._asked.stream:
            return StreamingResponse(self._events(first), media_type="text/event-stream")
        tokenizer = service.transcriber.tokenizer
        return response_of(self._future.result(0), self._asked, tokenizer, service.about)

    async def _events(self, item: "asyncio.Future[Transcript | None]") -> AsyncIterator[bytes]:
        """Yield events, and comments while there are none, so that nobody closes the connection."""
        events = Events(self._asked, self._service.transcriber.tokenizer, self._service.about)
        while True:
            done, _ = await asyncio.wait({item}, timeout=KEEP_ALIVE_S)
            if not done:
                yield KEEP_ALIVE
                continue
            if (transcript := item.result()) is None:
                break
            yield self._with_text(events.window(transcript))
            item = asyncio.ensure_future(self._items.get())
        error = self._future.exception()
        yield failed(api_error(error)) if error else events.done(self._future.result())

    def _with_text(self, event: bytes) -> bytes:
        """Return an event, and count the time to the first."""
        if event and not self._has_text:
            self._has_text, seconds = True, time.monotonic() - self._began
            about = "From the end of the upload to the first text of a stream"
            self._service.metrics.observe("first_text_seconds", about, seconds)
        return event

    def _put(self, item: Transcript | None) -> None:
        """Add an item, from any thread."""
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def _record(self) -> None:
        """Count what was done, and add it to the log line."""
        metrics, future = self._service.metrics, self._future
        seconds = time.monotonic() - self._began
        metrics.observe(
            "e2e_seconds", "From the end of the upload to the end of the answer", seconds
        )
        metrics.observe("queue_seconds", "How long windows waited for a decoder", future.waited_s)
        metrics.observe("decode_seconds", "How long windows were decoded", future.decoded_s)
        self._log |= {"queue": f"{future.waited_s:.3f}", "decode": f"{future.decoded_s:.3f}"}
        if future.cancelled() or future.exception():
            return
        transcript = future.result()
        fallbacks = len({s.seek for s in transcript.segments if s.temperature > 0})
        metrics.count("audio_seconds_total", "Audio transcribed", transcript.duration_s)
        metrics.count("fallbacks_total", "Windows decoded above the first temperature", fallbacks)
        self._log |= {
            "audio": f"{transcript.duration_s:.2f}",
            "rtf": f"{seconds / transcript.duration_s:.3f}" if transcript.duration_s else "0",
            "tokens": n_tokens(transcript.segments),
            "fallbacks": fallbacks,
        }


async def _comes_first(
    item: "asyncio.Future[Any]", receive: Receive, timeout_s: float | None
) -> bool:
    """Wait for an item; return whether the client has not left meanwhile."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({item, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return item.done() or not gone.done()
    finally:
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
