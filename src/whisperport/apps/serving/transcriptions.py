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
from whisperport.apps.serving.form import Form, wrong
from whisperport.apps.serving.formats import (
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    Events,
    failed,
    n_tokens,
    response_of,
)
from whisperport.apps.serving.job import Transcription
from whisperport.apps.serving.metrics import Metrics
from whisperport.apps.serving.models import check_model
from whisperport.apps.serving.request import Task, TranscriptionRequest, read_request
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
        """Answer a request: all its way from the form to the answer.

        A client that leaves ends the work at the next decoder step. What is raised is answered by `Guard`.
        """
        service, transcriber = self._service, self._service.transcriber
        with service.request() as admitted:
            async with await Form.read(Request(scope, receive), service.turns) as form:
                if model := form.fields.one("model"):  # without, it is the one that is served
                    check_model(service, model)
                    transcriber = service.transcribers[model]
                request = read_request(form.fields, transcriber.engine.generation, self._task)
                if form.upload is None:
                    raise wrong("file", "`file` is required, as a file of the form")
                if not form.size:
                    raise wrong("file", "The file is empty: it has 0 bytes")
                began, windows = time.monotonic(), _Windows()
                future = service.scheduler.transcribe(
                    form.upload,
                    request.options,
                    transcriber=transcriber,
                    on_window=windows.put if request.stream else None,
                    admitted=admitted,
                )
                future.add_done_callback(lambda _: windows.put(None))
                first = asyncio.ensure_future(windows.get())
                try:
                    silence_s = KEEP_ALIVE_S if request.stream else None
                    if not await _comes_first(first, receive, silence_s):
                        return
                    if future.done() and (error := future.exception()):
                        raise error
                    response: Response
                    if request.stream:
                        events = _events(service, request, windows, first, future, began)
                        response = StreamingResponse(events, media_type="text/event-stream")
                    else:
                        response = response_of(
                            future.result(0), request, transcriber.tokenizer, service.about
                        )
                    if form.fields.ignored:
                        response.headers[IGNORED] = ", ".join(form.fields.ignored)
                    await response(scope, receive, send)
                finally:
                    future.cancel()
                    first.cancel()
                    seconds = time.monotonic() - began
                    scope["state"]["log"] |= _counted(service.metrics, future, seconds)


class _Windows:
    """The transcripts so far, one after each window, and None at the end; made in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Transcript | None] = asyncio.Queue()

    def put(self, transcript: Transcript | None) -> None:
        """Add a transcript, from any thread."""
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, transcript)

    async def get(self) -> Transcript | None:
        """Wait for the next transcript."""
        return await self._queue.get()


async def _events(
    service: Service,
    request: TranscriptionRequest,
    windows: _Windows,
    window: "asyncio.Future[Transcript | None]",
    future: Transcription,
    began: float,
) -> AsyncIterator[bytes]:
    """Yield events, and comments while there are none, so that nobody closes the connection.

    Args:
        service: what is served.
        request: what it asks for.
        windows: transcripts after each window.
        window: the first of them.
        future: the complete transcript.
        began: when the upload had ended, in seconds of the monotonic clock.
    """
    events = Events(request, service.transcriber.tokenizer, service.about)
    has_text = False
    while True:
        ready, _ = await asyncio.wait({window}, timeout=KEEP_ALIVE_S)
        if not ready:
            yield KEEP_ALIVE
            continue
        if (transcript := window.result()) is None:
            break
        event = events.window(transcript)
        if event and not has_text:
            has_text, seconds = True, time.monotonic() - began
            about = "From the end of the upload to the first text of a stream"
            service.metrics.observe("first_text_seconds", about, seconds)
        yield event
        window = asyncio.ensure_future(windows.get())
    error = future.exception()
    yield failed(api_error(error)) if error else events.done(future.result())


def _counted(metrics: Metrics, future: Transcription, seconds: float) -> dict[str, Any]:
    """Count a request that ended after so many seconds, and return what its log line tells."""
    metrics.observe("e2e_seconds", "From the end of the upload to the end of the answer", seconds)
    metrics.observe("queue_seconds", "How long windows waited for a decoder", future.waited_s)
    metrics.observe("decode_seconds", "How long windows were decoded", future.decoded_s)
    times = {"queue": f"{future.waited_s:.3f}", "decode": f"{future.decoded_s:.3f}"}
    if future.cancelled() or future.exception():
        return times
    transcript = future.result()
    fallbacks = len({s.seek for s in transcript.segments if s.temperature > 0})
    metrics.count("audio_seconds_total", "Audio transcribed", transcript.duration_s)
    metrics.count("fallbacks_total", "Windows decoded above the first temperature", fallbacks)
    return times | {
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
