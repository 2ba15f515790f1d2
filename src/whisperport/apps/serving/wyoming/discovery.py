"""Let Home Assistant find a Wyoming server in the local network, by multicast DNS."""

import ipaddress
import logging
import socket
from typing import Any

from zeroconf import Error, ServiceInfo
from zeroconf import get_all_addresses as all_addresses  # type: ignore[attr-defined]  # not in its list
from zeroconf.asyncio import AsyncZeroconf

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
