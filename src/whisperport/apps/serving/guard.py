"""What every request passes first: host, origin, key and limits; and last: its line in the log."""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from typing import Any

from h11 import LocalProtocolError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whisperport.apps.serving.api_error import ApiError, api_error
from whisperport.apps.serving.origins import is_allowed_origin, is_known_host
from whisperport.apps.serving.service import Service

log = logging.getLogger("whisperport.apps.serving")

BEARER = "bearer "
SUBPROTOCOL_KEY = "openai-insecure-api-key."  # how OpenAI's client sends a key from a browser
POLICY_VIOLATION = 1008  # WebSocket close code
SLOWEST = 4096  # bytes per second of an upload, on average
LEFT = 499  # in the log and the metrics: the client left before the answer began
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
}


class Guard:
    """Rejects what must not reach the application, answers its exceptions, and writes one line per request.

    `scope["state"]["log"]` is a dict to which an endpoint adds what the line tells.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send, self._service.options.idle_seconds)
        body = (
            _Body(receive, self._service, Headers(scope=scope)) if scope["type"] == "http" else None
        )
        try:
            self._check(scope)
            await self._app(scope, body.receive if body else receive, answer.send)
        except ClientDisconnect:  # in the middle of its request
            log.debug("id=%s left", answer.request_id)
        except Exception as error:
            with suppress(ClientDisconnect):
                await answer.fail(error)
        finally:
            self._finish(scope, answer)

    def _check(self, scope: Scope) -> None:
        headers, options = Headers(scope=scope), self._service.options
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_known_host(host, {name.lower() for name in options.allowed_hosts}):
            message = "This server has another name; --allowed-host NAME allows this one"
            raise ApiError(403, message, code="host_not_allowed")
        if not is_allowed_origin(origin, host, options.allowed_origins):
            message = "This web page may not use the server; --allowed-origin ORIGIN allows it"
            raise ApiError(403, message, code="origin_not_allowed")
        if needs_key(scope["path"]) and not self._opens(scope["path"], key_of(headers)):
            message = "Incorrect API key provided" if key_of(headers) else "No API key provided"
            authenticate = {"www-authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=authenticate)

    def _opens(self, path: str, key: str | None) -> bool:
        """Return whether a key opens a path; those for pages open realtime sessions only."""
        if self._service.options.keys.open(key):
            return True
        return path == "/v1/realtime" and self._service.client_secrets.get(key) is not None

    def _finish(self, scope: Scope, answer: "_Answer") -> None:
        route = scope.get("route")
        endpoint = getattr(route, "path", "unknown")  # never what a client wrote
        self._service.metrics.count(
            "requests_total", "Requests", endpoint=endpoint, status=str(answer.status or LEFT)
        )
        about = {
            "method": scope.get("method", "WS"),
            "endpoint": endpoint,
            "status": answer.status or LEFT,
            "seconds": f"{time.monotonic() - answer.began:.3f}",
        }
        details = {"id": answer.request_id, **scope["state"]["log"]}
        fields = " ".join(f"{name}={value}" for name, value in details.items())
        line = "{method} {endpoint} {status} {seconds} s".format(**about)
        log.info("%s %s", line, fields, extra={"request": about | details})


class _Answer:
    """The answer to one request: adds headers to it, and knows whether it has begun."""

    def __init__(self, scope: Scope, send: Send, idle_s: float) -> None:
        self._scope, self._send, self._idle_s = scope, send, idle_s
        self.began, self.status = time.monotonic(), 0
        self.request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})
        scope["state"] |= {"log": {}, "request_id": self.request_id}

    async def send(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            for name, value in SAFE_HEADERS.items():
                headers.setdefault(name, value)
        elif message["type"] == "websocket.accept":
            self.status = 101
        try:
            async with asyncio.timeout(self._idle_s):
                await self._send(message)
        except (TimeoutError, LocalProtocolError) as error:
            # The client does not read; or its body was damaged, and uvicorn has answered 400 meanwhile.
            raise ClientDisconnect from error

    async def fail(self, error: Exception) -> None:
        """Answer an exception, if the answer has not begun; an unexpected one is logged."""
        answer = api_error(error)
        if answer.status == 500:
            log.error("id=%s failed", self.request_id, exc_info=error)
        if self.status:
            return
        if self._scope["type"] == "http" or "websocket.http.response" in self._scope.get(
            "extensions", {}
        ):
            await answer.response()(self._scope, _nothing, self.send)
        else:
            self.status = answer.status
            await self._send({"type": "websocket.close", "code": POLICY_VIOLATION})


class _Body:
    """The body of a request: bounded, and not slower than one piece per `idle_seconds` and `SLOWEST`."""

    def __init__(self, receive: Receive, service: Service, headers: Headers) -> None:
        self._receive, self._options = receive, service.options
        self._n_bytes, self._ended = 0, False
        self._stated = headers.get("content-length", "")
        self._began = time.monotonic()

    async def receive(self) -> Message:
        if self._ended:  # what follows is the disconnect, whenever it comes
            return await self._receive()
        if self._stated.isdecimal():
            self._check(int(self._stated))
        try:
            async with asyncio.timeout(self._remaining_s()):
                message = await self._receive()
        except TimeoutError as error:
            late, close = "The rest of the request did not arrive", {"connection": "close"}
            raise ApiError(408, late, code="timeout", headers=close) from error
        self._n_bytes += len(message.get("body", b""))
        self._check(self._n_bytes)
        self._ended = not message.get("more_body", False)
        return message

    def _remaining_s(self) -> float:
        """Return how long the next piece may take, in seconds."""
        idle_s = self._options.idle_seconds
        late_s = time.monotonic() - self._began - self._n_bytes / SLOWEST
        return min(idle_s, max(0.0, idle_s - late_s))

    def _check(self, n_bytes: int) -> None:
        limit = self._options.max_body_bytes
        if n_bytes > limit:
            message = f"Maximum content size limit ({limit}) exceeded ({n_bytes} bytes read)"
            # The connection stays open: closing it would reset it, and the client would not read this.
            raise ApiError(413, message)


def needs_key(path: str) -> bool:
    """Return whether a path may be used with a key only: the API and the metrics."""
    return path == "/metrics" or path == "/v1" or path.startswith("/v1/")


def key_of(headers: Headers) -> str | None:
    """Return the key that a request has, in its header or, from a browser's WebSocket, its subprotocols."""
    authorization = headers.get("authorization", "")
    if authorization.lower().startswith(BEARER):
        return authorization[len(BEARER) :].strip()
    for name in headers.get("sec-websocket-protocol", "").split(","):
        if name.strip().startswith(SUBPROTOCOL_KEY):
            return name.strip()[len(SUBPROTOCOL_KEY) :]
    return None


async def _nothing() -> Any:
    await asyncio.Event().wait()
