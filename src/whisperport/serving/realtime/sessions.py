"""All realtime sessions of a server: their number is limited, and those that lost their client are kept."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from whisperport.errors import QueueFullError
from whisperport.serving.admission import CLOSED_RETRY_S
from whisperport.serving.api_error import ApiError
from whisperport.serving.realtime.session import Session
from whisperport.serving.realtime.settings import Settings
from whisperport.serving.service import Service

FULL_RETRY_S = 10
LAST_S = 2.0


class Sessions:
    """Creates, keeps and ends sessions.

    Args:
        service: what is served.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        limit = service.options.max_sessions
        self._threads = ThreadPoolExecutor(
            2 * limit, "realtime"
        )  # a conversion and a decoding of each
        self._sessions: dict[str, Session] = {}
        self._attached: dict[str, asyncio.Task[object]] = {}  # the connection of each session
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._is_closing = False
        service.metrics.gauge("realtime_sessions", "Realtime sessions", lambda: len(self._sessions))

    def attach(self, session_id: str | None, settings: Settings) -> Session:
        """Give the current task, which serves a connection, a new session or one that lost its client.

        A connection that still has the session is cancelled: its client may not know yet that it broke.

        Raises:
            ApiError: there is no such session.
            QueueFullError: there are too many sessions, or the server is shutting down.
        """
        if self._is_closing or self.service.scheduler.admission.closed:
            raise QueueFullError(CLOSED_RETRY_S, closing=True)
        session = self._resumed(session_id) if session_id is not None else self._new(settings)
        task = asyncio.current_task()
        assert task is not None
        self._attached[session.id] = task
        return session

    def detach(self, session: Session) -> None:
        """Keep a session for `resume_seconds` that lost its client, unless another connection has it."""
        if self._attached.get(session.id) is not asyncio.current_task():
            return
        del self._attached[session.id]
        keep_s = self.service.options.resume_seconds
        expire = asyncio.get_running_loop().call_later(keep_s, self.end, session)
        self._expiries[session.id] = expire

    def end(self, session: Session) -> None:
        """End a session. May be called several times."""
        session.close()
        self._sessions.pop(session.id, None)
        self._attached.pop(session.id, None)
        if expiry := self._expiries.pop(session.id, None):
            expiry.cancel()

    async def close(self, drain_s: float) -> None:
        """Accept no more sessions, send the transcripts of the others, and end them.

        Args:
            drain_s: how long the last transcripts may take, in seconds.
        """
        self._is_closing = True
        sessions = list(self._sessions.values())
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await asyncio.gather(*(session.finish() for session in sessions))
        connections = list(self._attached.values())
        for session in sessions:
            session.close()
        if connections:
            await asyncio.wait(connections, timeout=LAST_S)  # they send the last events
        for connection in connections:
            connection.cancel()
        for session in sessions:
            self.end(session)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _new(self, settings: Settings) -> Session:
        if len(self._sessions) >= self.service.options.max_sessions:
            if not self._expiries:
                raise QueueFullError(FULL_RETRY_S)
            self.end(self._sessions[next(iter(self._expiries))])  # the client left long ago
        session = Session(self.service, self._threads, settings)
        self._sessions[session.id] = session
        return session

    def _resumed(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            message = "There is no such session; it may have ended"
            raise ApiError(404, message, code="session_not_found", param="session_id")
        if before := self._attached.pop(session_id, None):
            before.cancel()
        if expiry := self._expiries.pop(session_id, None):
            expiry.cancel()
        return session
