"""All realtime sessions of a server: their number is limited, and those that lost their client are kept."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from whisperport.apps.serving.admission import CLOSED_RETRY_S
from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.realtime.session import Session
from whisperport.apps.serving.realtime.settings import Settings
from whisperport.apps.serving.service import Service
from whisperport.errors import QueueFullError

FULL_RETRY_S = 10
LAST_S = 2.0
CONVERTERS = 4  # threads that parse large messages and convert audio

Released = asyncio.Future[None]
"""Done when a connection has its session no longer: another one resumed it, or the server ends."""


class Sessions:
    """Creates, keeps and ends sessions.

    Args:
        service: what is served.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        limit = service.options.max_sessions
        self._threads = ThreadPoolExecutor(limit, "realtime")  # each waits for a decoding
        self._large = asyncio.Semaphore(1)
        self._converters = ThreadPoolExecutor(CONVERTERS, "converter")
        self._sessions: dict[str, Session] = {}
        self._attached: dict[str, Released] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._is_closing = False
        service.metrics.gauge("realtime_sessions", "Realtime sessions", lambda: len(self._sessions))

    def attach(self, session_id: str | None, settings: Settings) -> tuple[Session, Released]:
        """Give a connection a new session, or one that lost its client.

        Another connection that still has the session is released: it broke, which it may not know yet.

        Raises:
            ApiError: there is no such session.
            QueueFullError: there are too many sessions, or the server is shutting down.
        """
        if self._is_closing or self.service.scheduler.admission.closed:
            raise QueueFullError(CLOSED_RETRY_S, closing=True)
        session = self._resumed(session_id) if session_id is not None else self._new(settings)
        released = self._attached[session.id] = asyncio.get_running_loop().create_future()
        return session, released

    def detach(self, session: Session, released: Released) -> bool:
        """Keep a session for `resume_seconds` that lost its client.

        Returns:
            False if the connection did not have it any more.
        """
        if self._attached.get(session.id) is not released:
            return False
        del self._attached[session.id]
        keep_s = self.service.options.resume_seconds
        expire = asyncio.get_running_loop().call_later(keep_s, self.end, session)
        self._expiries[session.id] = expire
        return True

    def end(self, session: Session) -> None:
        """End a session. May be called several times."""
        session.close()
        self._sessions.pop(session.id, None)
        self._release(session.id)

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
        for session in sessions:
            session.close()
        with suppress(TimeoutError):  # the connections send the last events
            async with asyncio.timeout(LAST_S):
                while self._attached:
                    await asyncio.sleep(0.02)
        for session in sessions:
            self.end(session)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._converters.shutdown(wait=False, cancel_futures=True)

    def _new(self, settings: Settings) -> Session:
        if len(self._sessions) >= self.service.options.max_sessions:
            if not self._expiries:
                raise QueueFullError(FULL_RETRY_S)
            self.end(self._sessions[next(iter(self._expiries))])  # the client left long ago
        session = Session(self.service, self._threads, self._converters, self._large, settings)
        self._sessions[session.id] = session
        return session

    def _resumed(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            message = "There is no such session; it may have ended"
            raise ApiError(404, message, code="session_not_found", param="session_id")
        self._release(session_id)
        return session

    def _release(self, session_id: str) -> None:
        """Take a session from its connection, or from those that will end."""
        if released := self._attached.pop(session_id, None):
            released.set_result(None)
        if expiry := self._expiries.pop(session_id, None):
            expiry.cancel()
