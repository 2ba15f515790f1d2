"""Which hosts and web pages may be in a request: protection against DNS rebinding and foreign pages."""

import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[0-9a-z._-]+))(?::[0-9]{1,5})?")


def is_local(address: str) -> bool:
    """Return whether an address that a server binds is reached from this machine only."""
    if address in ("localhost", ""):
        return address == "localhost"
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Return the name in a Host header, in lower case, without port and brackets; empty: invalid."""
    match = _HOST.fullmatch(host.lower())
    return (match["address"] or match["name"].rstrip(".")) if match else ""


def is_known_host(host: str, allowed: Collection[str]) -> bool:
    """Return whether a Host header is for this server.

    An address always is, because a page of another site cannot have one as its name. A name could point to
    this machine, so it must be localhost, the machine's own, or allowed.

    Args:
        host: the header.
        allowed: further names, in lower case.
    """
    name = host_name(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = socket.gethostname().lower()
        return name in {"localhost", own, f"{own}.local", *allowed}
    return True


def is_allowed_origin(origin: str | None, host: str, allowed: Collection[str]) -> bool:
    """Return whether the page that sent a request may do so.

    Args:
        origin: the Origin header; None: the request is no page's.
        host: the Host header: the server's own page has the same.
        allowed: exact origins of other pages, such as "https://captions.example".
    """
    if origin is None or origin in allowed:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(host) and parts.netloc == host
