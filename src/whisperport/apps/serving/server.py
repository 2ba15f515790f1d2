"""Run a server until a signal: it finishes what it has begun. A second signal ends it immediately."""

import asyncio
import logging
import os
import signal
import socket
import warnings
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.app import create_app
from whisperport.apps.serving.realtime.endpoint import realtime_routes
from whisperport.apps.serving.realtime.sessions import Sessions
from whisperport.apps.serving.serve_options import ServeOptions
from whisperport.apps.serving.service import Service
from whisperport.apps.serving.turns import Connections, Pace
from whisperport.errors import UsageError, needs
from whisperport.program.bundle import Bundle
from whisperport.speech.audio.decode import DamagedAudioWarning
from whisperport.system.process import return_large_blocks
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.transcription.session import TruncatedPromptWarning

if TYPE_CHECKING:
    from whisperport.apps.serving.wyoming.server import WyomingServer

MAX_CONNECTIONS = 1000  # beyond, uvicorn answers 503 by itself
MAX_FILES = 8192  # of the process
MAX_HEAD = 2**14  # bytes of the first lines of a request
MAX_WAITING = 2**16  # bytes of a connection that wait to be parsed
MAX_MESSAGE = (
    24 * 2**20
)  # bytes of a WebSocket message: OpenAI allows 15 MiB, which base64 makes 20 MiB
LAST_S = 5  # seconds for answers after the drain: their clients must read them


def run_server(
    bundle: Bundle | str | os.PathLike[str] | Transcriber | None,
    options: ServeOptions,
    run: RunOptions | None,
) -> None:
    """Serve until a signal; see `serve`."""
    # Their texts quote what clients sent, which a log must not have.
    for category in (TruncatedPromptWarning, DamagedAudioWarning):
        warnings.simplefilter("ignore", category)
    _allow_files(MAX_FILES)
    return_large_blocks()  # spectrograms: without it, 200 clients left 770 MiB in the process
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # not a line for each hostile request
    with _listening(options) as listener:
        transcriber = bundle if isinstance(bundle, Transcriber) else Transcriber(bundle, run)
        _Server(Service(transcriber, options)).run(sockets=[listener])


def _allow_files(count: int) -> None:
    """Allow this process as many open files, if the system does: connections and uploads are some."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < count:
            most = count if hard == resource.RLIM_INFINITY else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listening(options: ServeOptions) -> socket.socket:
    """Return a socket that is bound to the address, before the bundle is loaded.

    Raises:
        UsageError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {options.host}, port {options.port}",
            why=error.strerror or str(error),
            hint="choose another --port or --host",
        ) from error
    return listener


def _load(config: uvicorn.Config) -> None:
    """Load the application and the certificate.

    Raises:
        UsageError: the certificate or its key cannot be used.
    """
    try:
        config.load()
    except OSError as error:  # also ssl.SSLError
        raise UsageError(
            f"cannot use the certificate {config.ssl_certfile} with the key {config.ssl_keyfile}",
            why=str(error),
            hint="give PEM files: the chain of certificates, and the key of the first",
        ) from error


class _Server(uvicorn.Server):
    """uvicorn's server, with our way to end."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ending: asyncio.Task[None] | None = None
        self._sessions = Sessions(service)
        self._wyoming = wyoming_server(service) if service.options.wyoming else None
        options = service.options
        config = uvicorn.Config(
            create_app(service, realtime_routes(self._sessions)),
            http=_Connection,
            ws=_WebSocket,
            ws_max_size=MAX_MESSAGE,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEAD,
            timeout_graceful_shutdown=round(options.drain_seconds) + LAST_S,
            ssl_certfile=options.certfile,
            ssl_keyfile=options.keyfile,
        )
        config.header_seconds = options.idle_seconds  # type: ignore[attr-defined]  # for _Connection
        config.connections = Connections()  # type: ignore[attr-defined]  # for _Piecewise
        _load(config)
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if hasattr(signal, "SIGHUP"):  # a closed terminal; uvicorn handles the others
            signal.signal(signal.SIGHUP, self.handle_exit)
        options, scheme = self._service.options, "https" if self.config.is_ssl else "http"
        assert sockets is not None
        host, port = sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        begin_stage(f"listening on {scheme}://{shown}:{port}")
        if self._wyoming is not None:
            begin_stage(f"listening on {await self._wyoming.start()}")
        ready = await asyncio.to_thread(self._service.readiness.check, options.idle_seconds)
        if ready:
            _notify("READY=1")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; end immediately at the second."""
        if self._ending is not None:
            os._exit(128 + sig)
        _notify("STOPPING=1")
        self._ending = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Accept nothing new and finish what has begun; what is left then fails with `shutting_down`."""
        self._service.scheduler.admission.close(0)
        if self._wyoming is not None:
            await self._wyoming.close()
        await self._sessions.close(LAST_S)
        self.should_exit = True  # uvicorn closes the listening socket and waits for the answers
        await asyncio.to_thread(self._service.scheduler.close, self._service.options.drain_seconds)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._ending is not None:
            await self._ending


def _notify(state: str) -> None:
    """Send a state such as "READY=1" to systemd; nothing, if it did not start this service.

    Source: sd_notify(3).
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        sender.sendall(state.encode())


def wyoming_server(service: Service) -> "WyomingServer":
    """Return a server for Home Assistant.

    Raises:
        MissingPackageError: the extra `wyoming` is not installed.
    """
    with needs("the packages of Wyoming are not installed", extra="serve,wyoming"):
        from whisperport.apps.serving.wyoming.server import WyomingServer
    return WyomingServer(service)


class _Piecewise(asyncio.Protocol):
    """Parses what it receives in small pieces, in turn with other connections; see uvicorn's class."""

    config: uvicorn.Config
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.pace, self._received = Pace(), bytearray()
        self._is_waiting = False
        transport.max_size = MAX_WAITING  # type: ignore[attr-defined]  # of asyncio's: it reads 256 KiB
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) >= MAX_WAITING:
            self.transport.pause_reading()
        if not self._is_waiting:
            self._is_waiting = True
            self.config.connections.add(self)  # type: ignore[attr-defined]

    def parse_some(self) -> bool:
        """Parse a piece; return whether there is more."""
        piece = bytes(self._received[: self.pace.n_bytes])
        del self._received[: len(piece)]
        if piece:  # the connection is not lost
            self.pace.begin()
            super().data_received(piece)
            self.pace.end()
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            self._received.clear()  # nothing follows an upgrade until it is answered
        elif not self._received and not self.is_paused:
            self.transport.resume_reading()
        self._is_waiting = bool(self._received)
        return self._is_waiting

    @property
    def is_paused(self) -> bool:
        """Whether uvicorn wants no more data now."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        self._received.clear()
        super().connection_lost(exc)


class _WebSocket(_Piecewise, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket."""

    @property
    def is_paused(self) -> bool:
        return self.read_paused


class _Connection(_Piecewise, H11Protocol):
    """uvicorn's connection, closed if no request follows: a half-open socket must not stay forever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        seconds = self.config.header_seconds  # type: ignore[attr-defined]
        self._first = self.loop.call_later(seconds, self._close_if_idle)

    @property
    def is_paused(self) -> bool:
        return self.flow.read_paused

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._first.cancel()  # it is another protocol's connection now
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the shape of the application's errors, unless it has been answered."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = ApiError(400, msg, headers={"connection": "close"}).response()
            head = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._first.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
