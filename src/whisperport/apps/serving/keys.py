"""API keys, from a file or the environment; and short-lived ones, so that a page needs no permanent key."""

import hmac
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Generic, Self, TypeVar

from whisperport.errors import QueueFullError, UsageError
from whisperport.system.regular_file import read_short_text

VARIABLE = "WHISPERPORT_API_KEY"  # environment variable; with _FILE after it: the path of a file
SHORTEST = 8  # characters


class Keys:
    """The keys that open a server; without any, it is open. They are kept as hashes only.

    Args:
        keys: texts, each at least 8 characters long.

    Raises:
        UsageError: a key is shorter, or contains characters that a header cannot have.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        keys = tuple(keys)
        for number, key in enumerate(keys, start=1):
            if len(key) < SHORTEST or not (key.isascii() and key.isprintable()) or " " in key:
                raise UsageError(
                    f"API key {number} cannot be used",
                    why=f"a key has at least {SHORTEST} ASCII characters and no space",
                    hint="`openssl rand -hex 24` prints a good one",
                )
        self._digests = [sha256(key.encode()).digest() for key in keys]

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> Self:
        """Read keys from a file, one per line, or from the environment; empty lines are skipped.

        Args:
            file: the file; None: that in `$WHISPERPORT_API_KEY_FILE`, or else `$WHISPERPORT_API_KEY`.
            environment: environment variables.

        Raises:
            UsageError: the file cannot be read or has no key, or a key cannot be used.
        """
        named = environment.get(f"{VARIABLE}_FILE")
        file = file or (Path(named) if named else None)
        if file is None:
            key = environment.get(VARIABLE)
            return cls([key] if key else [])
        try:
            lines = read_short_text(file).splitlines()
        except (OSError, UnicodeError) as error:
            raise UsageError(
                f"cannot read the API keys in {file}", why=str(error), hint="check the path"
            ) from error
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise UsageError(f"{file} has no API key", hint="write one key per line")
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def open(self, key: str | None) -> bool:
        """Return whether a key opens the server; the time does not depend on which, or how nearly."""
        if not self:
            return True
        client_digest = sha256((key or "").encode("utf-8", "replace")).digest()
        equal = [
            hmac.compare_digest(client_digest, digest) for digest in self._digests
        ]  # always all of them
        return any(equal)


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
