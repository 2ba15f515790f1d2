"""The form of a request: its file, and its fields in the spellings that clients use.

x=1            one value
x[]=1, x=1     lists: the official clients repeat `x[]`, others repeat `x`, or write a JSON list
x[key]=1       objects: the official clients; others write a JSON object
"""

import io
import math
import os
import re
from collections.abc import Mapping
from threading import Lock
from typing import Any, BinaryIO, Self, cast

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.json_text import parsed
from whisperport.apps.serving.turns import Turns


class Upload:
    """A file that several readers may read at the same time, each at its own position.

    Args:
        file: holds the data; with `fileno` if the data are in a file. The caller closes it after `close`.
        size: bytes.
    """

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._size = file, size
        self._lock, self._closed = Lock(), False
        file.flush()  # readers read the descriptor, not the buffer
        rolled = getattr(file, "_rolled", True)  # False: a SpooledTemporaryFile in memory
        self._data: bytes | None = None if rolled else _all_of(file)

    def reopen(self) -> BinaryIO:
        """Return a new reader, at the beginning.

        Raises:
            ValueError: the upload was closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the upload was closed")
            if self._data is not None:
                return io.BytesIO(self._data)
            raw = _Positioned(os.dup(self._file.fileno()), self._size)
        return cast(BinaryIO, io.BufferedReader(raw))

    def close(self) -> None:
        """Let no further reader begin. Those that exist go on: they have descriptors of their own."""
        with self._lock:
            self._closed, self._data = True, None


class _Positioned(io.RawIOBase):
    """Reads a descriptor at a position of its own; closes it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size, self._at = descriptor, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._descriptor, len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("negative position")
        self._at = base + offset
        return self._at

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _all_of(file: Any) -> bytes:
    file.seek(0)
    data: bytes = file.read()
    return data


MAX_FIELDS = 64
MAX_FIELD_BYTES = 64 * 1024  # a prompt has at most 223 tokens
MAX_TYPE = 256  # characters of the header Content-Type, whose boundary has at most 70
MAX_SHOWN = 50  # characters of a value in a message
_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")


class Fields:
    """The text fields of a form. It knows which were read, so that others can be named to the client.

    Args:
        values: by name, as the client wrote the names.
    """

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self._values, self._read = values, set[str]()

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields that were not read, as far as a header may have them."""
        names = (name for name in self._values if name not in self._read)
        return tuple(name for name in names if _NAME.fullmatch(name))

    def one(self, name: str) -> str | None:
        """Return the value of a field; None: it is absent or empty.

        Raises:
            ApiError: it has several values.
        """
        values = self._take(name)
        if len(values) > 1:
            raise wrong(name, f"`{name}` was given {len(values)} times; it has one value")
        return values[0] if values and values[0] else None

    def many(self, name: str) -> list[str]:
        """Return all values of a list."""
        values = [*self._take(name), *self._take(f"{name}[]")]
        if len(values) == 1 and values[0].lstrip().startswith("["):
            texts = _json(name, values[0])
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise wrong(name, f"`{name}` is not a list of texts")
            return texts
        return [value for value in values if value]

    def members(self, name: str) -> dict[str, Any] | str | None:
        """Return an object, or the text in its place; None: it is absent."""
        prefix = f"{name}["
        inside = {key: key[len(prefix) : -1] for key in self._values if key.startswith(prefix)}
        if inside:
            return {member: self.one(key) for key, member in inside.items()}
        value = self.one(name)
        if value is None or not value.lstrip().startswith("{"):
            return value
        members = _json(name, value)
        return members if isinstance(members, dict) else value

    def flag(self, name: str) -> bool:
        """Return a boolean; an absent one is False."""
        value = (self.one(name) or "false").lower()
        if value not in ("true", "false", "1", "0"):
            raise wrong(name, f"`{name}` is {value[:MAX_SHOWN]!r}; expected true or false")
        return value in ("true", "1")

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number within a range; None: it is absent."""
        value = self.one(name)
        return None if value is None else checked_number(name, value, low, high)

    def _take(self, name: str) -> list[str]:
        self._read.add(name)
        return self._values.get(name, [])


class Form:
    """A form that was read. Use it in an `async with` block, which deletes its file.

    Attributes:
        fields: its text fields.
        upload: its file, if it has one.
    """

    def __init__(self, data: FormData) -> None:
        self._data = data
        texts: dict[str, list[str]] = {}
        self.upload: Upload | None = None
        for name, value in data.multi_items():
            if not isinstance(value, UploadFile):
                texts.setdefault(name, []).append(value)
            elif name == "file":
                self.upload = Upload(value.file, value.size or 0)
                self.size = value.size or 0
        self.fields = Fields(texts)

    @classmethod
    async def read(cls, request: Request, turns: Turns) -> Self:
        """Read the form of a request. A file above 1 MB is kept in one anonymous temporary file.

        Args:
            request: the request.
            turns: in which the body is parsed.

        Raises:
            ApiError: it is no multipart form, is damaged, or has too many or too large fields.
        """
        parser = MultiPartParser(
            Headers({"content-type": _content_type(request)}),
            turns.pieces(request.stream()),
            max_files=1,
            max_fields=MAX_FIELDS,
            max_part_size=MAX_FIELD_BYTES,
        )
        try:
            return cls(await parser.parse())
        except MultiPartException as error:
            raise ApiError(400, error.message, code="invalid_value") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.upload is not None:
            self.upload.close()
        await self._data.close()


def wrong(name: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """Return the error of a field with a wrong value."""
    return ApiError(400, message, code=code, param=name)


def _content_type(request: Request) -> str:
    """Return the type of a body that is a form in UTF-8: others can take minutes to decode."""
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith("multipart/form-data") or len(content_type) > MAX_TYPE:
        raise ApiError(400, "The body must be multipart/form-data", code="invalid_value")
    _, about = parse_options_header(content_type)
    if about.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise ApiError(400, "The charset of the form must be utf-8", code="invalid_value")
    return content_type


def checked_number(name: str, value: Any, low: float, high: float) -> float:
    """Return a number within a range.

    Raises:
        ApiError: it is none, or out of the range.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        shown = repr(value)[:MAX_SHOWN]
        raise wrong(name, f"`{name}` is {shown}; expected a number from {low:g} to {high:g}")
    return abs(number) if number == 0 else number


def _json(name: str, text: str) -> Any:
    try:
        return parsed(text)
    except ValueError as error:
        raise wrong(name, f"`{name}` cannot be read as JSON: {error}") from error
