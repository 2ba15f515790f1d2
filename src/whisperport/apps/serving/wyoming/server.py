"""The listening socket of the Wyoming protocol, its connections, and how Home Assistant finds it."""

import asyncio
import ipaddress
import logging
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zeroconf import Error, ServiceInfo
from zeroconf import get_all_addresses as all_addresses  # type: ignore[attr-defined]  # not in its list
from zeroconf.asyncio import AsyncZeroconf

from whisperport.apps.serving.origins import is_local
from whisperport.apps.serving.service import Service
from whisperport.apps.serving.wyoming.connection import Connection
from whisperport.apps.serving.wyoming.reader import MAX_LINE, FaultError
from whisperport.errors import UsageError

SERVICE = "_wyoming._tcp.local."

log = logging.getLogger("whisperport.apps.serving")


class Discovery:
    """The entry of one server. Its name must stay the same: clients recognize the server by it.

    Args:
        name: of this server in the network; empty: made of the name of this machine.
        host: address that it listens on.
        port: port that it listens on.
        interfaces: addresses of network interfaces to use; None: all.
    """

    def __init__(
        self, name: str, host: str, port: int, *, interfaces: list[str] | None = None
    ) -> None:
        self._interfaces = interfaces
        self._zeroconf: AsyncZeroconf | None = None
        self._info = ServiceInfo(
            SERVICE,
            f"{name or default_name()}.{SERVICE}",
            port=port,
            addresses=_addresses(host),
        )

    async def start(self) -> None:
        """Announce the server. If that fails, it is served anyway, and the log tells it."""
        chosen: Any = {} if self._interfaces is None else {"interfaces": self._interfaces}
        try:
            self._zeroconf = AsyncZeroconf(**chosen)
            await self._zeroconf.async_register_service(self._info)
        except (OSError, Error) as error:
            log.warning("the Wyoming server is not announced in the network: %r", error)
            await self.close()

    async def close(self) -> None:
        """Withdraw the entry. May be called several times."""
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is not None:
            await zeroconf.async_unregister_all_services()
            await zeroconf.async_close()


def default_name() -> str:
    """Return a name that stays the same on this machine."""
    return f"whisperport-{socket.gethostname().split('.')[0].lower()}"


def _addresses(host: str) -> list[bytes]:
    """Return the addresses at which a server that listens on `host` is reached."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return [socket.inet_aton(socket.gethostbyname(host))]
    if not address.is_unspecified:
        return [address.packed]
    own = [ipaddress.ip_address(address) for address in all_addresses()]
    return [address.packed for address in own if not address.is_loopback]


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
