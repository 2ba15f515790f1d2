"""The listening socket of the Wyoming protocol, and its connections."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

from whisperport.apps.serving.origins import is_local
from whisperport.apps.serving.service import Service
from whisperport.apps.serving.wyoming.connection import Connection
from whisperport.apps.serving.wyoming.discovery import Discovery
from whisperport.apps.serving.wyoming.reader import MAX_LINE, FaultError
from whisperport.errors import UsageError

MAX_CONNECTIONS = 64
DRAIN_S = 5.0  # for utterances that have begun
SCHEMES = "tcp://ADDRESS:PORT or unix://PATH"


class WyomingServer:
    """Serves the protocol at the address in `options.wyoming`.

    Args:
        service: what is served.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._uri = service.options.wyoming
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._discovery: Discovery | None = None
        service.metrics.gauge(
            "wyoming_connections", "Wyoming connections", lambda: len(self._connections)
        )

    async def start(self) -> str:
        """Listen, let clients in the network find the server, and return the URI with the actual port.

        Raises:
            UsageError: the address cannot be used.
        """
        host, port, path = address_of(self._uri)
        try:
            if path:
                self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_LINE)
                return self._uri
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_LINE)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {self._uri}",
                why=error.strerror or str(error),
                hint="choose another --wyoming URI",
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        if not is_local(host):
            self._discovery = Discovery(self._service.options.wyoming_name, host, port)
            await self._discovery.start()
        return f"tcp://{host}:{port}"

    async def close(self, drain_s: float = DRAIN_S) -> None:
        """Stop listening, finish utterances that have begun, and close all connections.

        Args:
            drain_s: how long utterances may take, in seconds.
        """
        if self._server is None:
            return
        self._server.close()
        if path := address_of(self._uri)[2]:
            Path(path).unlink(missing_ok=True)
        if self._discovery is not None:
            await self._discovery.close()
        for connection in self._connections:
            connection.close()
        tasks = list(self._connections.values())
        if tasks:
            await asyncio.wait(tasks, timeout=drain_s)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self._service, reader, writer)
        if len(self._connections) >= MAX_CONNECTIONS:
            await connection.reject(FaultError("busy", "there are too many connections"))
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await connection.run()
        finally:
            del self._connections[connection]


def address_of(uri: str) -> tuple[str, int, str]:
    """Return host and port of a URI, or the path of a socket file.

    Raises:
        UsageError: the URI has another form.
    """
    try:
        parts = urlsplit(uri)
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None:
            return parts.hostname, parts.port, ""
        if parts.scheme == "unix" and parts.path:
            return "", 0, parts.path
    except ValueError:
        pass
    raise UsageError(f"`{uri}` is not an address for Wyoming", why=f"expected {SCHEMES}")
