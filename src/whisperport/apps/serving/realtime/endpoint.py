"""The endpoints `/v1/realtime`, a WebSocket, and `/v1/realtime/client_secrets`."""

import asyncio
import json
import secrets
from contextlib import suppress
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.guard import key_of
from whisperport.apps.serving.json_text import parsed
from whisperport.apps.serving.models import check_model
from whisperport.apps.serving.realtime.session import Session
from whisperport.apps.serving.realtime.sessions import Sessions
from whisperport.apps.serving.realtime.settings import Settings, invalid, updated

SUBPROTOCOL = "realtime"
DEFAULT_LIFE_S, SHORTEST_LIFE_S, LONGEST_LIFE_S = 600, 10, 7200  # OpenAI's
IDLE_FACTOR = 10  # a client may send nothing for so many times `idle_seconds`
SEND_S = 30.0  # a client that does not read for so long is disconnected
MAX_JSON = 2**16  # bytes
GOING_AWAY, NORMAL = 1001, 1000  # WebSocket close codes


def realtime_routes(sessions: Sessions) -> list[BaseRoute]:
    """Return the routes."""

    async def realtime(websocket: WebSocket) -> None:
        await _Connection(sessions, websocket).run()

    async def client_secrets(request: Request) -> JSONResponse:
        return JSONResponse(_new_secret(sessions, await _object(request)))

    return [
        WebSocketRoute("/v1/realtime", realtime),
        Route("/v1/realtime/client_secrets", client_secrets, methods=["POST"]),
    ]


class _Connection:
    """One WebSocket, and the session that it serves."""

    def __init__(self, sessions: Sessions, websocket: WebSocket) -> None:
        self._sessions, self._websocket = sessions, websocket
        self._query = websocket.query_params
        self._idle_s = sessions.service.options.idle_seconds * IDLE_FACTOR

    async def run(self) -> None:
        """Serve until the client leaves, another connection resumes the session, or the server ends."""
        session, released = self._sessions.attach(self._query.get("session_id"), self._settings())
        tasks: list[asyncio.Future[Any]] = [released]
        try:
            offered = self._websocket.scope.get("subprotocols", [])
            await self._websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
            tasks.append(asyncio.create_task(self._send_all(session)))
            tasks.append(asyncio.create_task(self._receive_all(session)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            had_it = self._sessions.detach(session, released)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            if had_it and NORMAL in results:  # the client wants nothing more
                self._sessions.end(session)
            self._websocket.scope["state"]["log"]["audio"] = f"{session.received_s:.2f}"
            with suppress(RuntimeError, OSError, WebSocketDisconnect):
                await self._websocket.close(GOING_AWAY)

    def _settings(self) -> Settings:
        """Return the settings at the beginning: those of the client's secret, and the query's model.

        Raises:
            ApiError: there is no such model.
        """
        service = self._sessions.service
        settings = service.client_secrets.get(key_of(self._websocket.headers))
        settings = settings or Settings(service.model_ids[0])
        if model := self._query.get("model"):
            check_model(service, model)
            settings = replace(settings, model=model)
        return settings

    async def _send_all(self, session: Session) -> None:
        """Send the events of the session, from that on which the client does not have."""
        after = self._query.get("after")
        position = session.outbox.position_after(after)
        if after is not None:
            await self._send(json.dumps({**session.created(), "event_id": after}))
        with suppress(EOFError):
            while True:
                position, text = await session.outbox.next(position)
                await self._send(text)

    async def _send(self, text: str) -> None:
        if text:
            async with asyncio.timeout(SEND_S):
                await self._websocket.send_text(text)

    async def _receive_all(self, session: Session) -> int:
        """Handle the events of the client; return the code with which it closed the connection."""
        while True:
            async with asyncio.timeout(self._idle_s):
                message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return int(message.get("code") or 0)
            # Not cancelled with this connection: the audio belongs to the session.
            await asyncio.shield(session.handle(message.get("text") or ""))


def _new_secret(sessions: Sessions, body: dict[str, Any]) -> dict[str, Any]:
    """Return a secret and the session that it opens."""
    service = sessions.service
    settings = Settings(service.model_ids[0])
    if body.get("session") is not None:
        generation = service.transcriber.engine.generation
        settings = updated(settings, body["session"], service.model_ids, generation)
    value, expires_at = service.client_secrets.new(settings, _life_s(body.get("expires_after")))
    session = {**settings.document(f"sess_{secrets.token_hex(12)}"), "expires_at": expires_at}
    return {"value": value, "expires_at": expires_at, "session": session}


def _life_s(expiry: Any) -> float:
    if expiry is None:
        return DEFAULT_LIFE_S
    seconds = expiry.get("seconds", DEFAULT_LIFE_S) if isinstance(expiry, dict) else None
    if type(seconds) is not int or not SHORTEST_LIFE_S <= seconds <= LONGEST_LIFE_S:
        limits = f"{SHORTEST_LIFE_S} to {LONGEST_LIFE_S}"
        raise invalid("expires_after.seconds", f"expected a whole number from {limits}")
    return seconds


async def _object(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request; an empty one, if there is no body."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_JSON:
            raise ApiError(413, f"Maximum content size limit ({MAX_JSON}) exceeded")
    try:
        document = parsed(body or b"{}")
    except ValueError as error:
        message = f"The request cannot be read as JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from error
    if not isinstance(document, dict):
        raise ApiError(400, "The request is not a JSON object", code="invalid_json")
    return document
