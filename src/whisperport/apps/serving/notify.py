"""Tell systemd that a service is ready or ending (its `Type=notify`). Source: sd_notify(3)."""

import os
import socket


def notify(state: str) -> None:
    """Send a state such as "READY=1" to the service manager; nothing, if there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        sender.sendall(state.encode())
