"""Keys that open realtime sessions for a short time, so that a page needs no permanent key."""

import secrets
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Generic, TypeVar

from whisperport.errors import QueueFullError

T = TypeVar("T")

PREFIX = "ek_"
MAX_SECRETS = 10_000
FULL_RETRY_S = 60


class ClientSecrets(Generic[T]):
    """Secrets and what belongs to each. They are kept as hashes only.

    Args:
        clock: returns seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: dict[
            bytes, tuple[float, T]
        ] = {}  # of a hash: when it expires, what belongs to it

    def new(self, belongs: T, seconds: float) -> tuple[str, int]:
        """Return a new secret, and when it expires.

        Raises:
            QueueFullError: there are too many.
        """
        now = self._clock()
        self._kept = {key: kept for key, kept in self._kept.items() if kept[0] > now}
        if len(self._kept) >= MAX_SECRETS:
            raise QueueFullError(FULL_RETRY_S)
        secret = PREFIX + secrets.token_urlsafe(32)
        self._kept[_digest(secret)] = now + seconds, belongs
        return secret, int(now + seconds)

    def get(self, secret: str | None) -> T | None:
        """Return what belongs to a secret; None: there is no such secret, or it has expired.

        It is found by its hash, so that the time tells nothing about the secrets.
        """
        expires, belongs = self._kept.get(_digest(secret or ""), (0.0, None))
        return belongs if expires > self._clock() else None


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "replace")).digest()
