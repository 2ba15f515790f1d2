"""Read numbers and tensors from an untrusted binary file in order, never beyond its size."""

import math
import struct
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from whisperport.errors import CheckpointError
from whisperport.program.untrusted import shorten

HINT = "download the file again, or convert the original checkpoint again"


class BinaryReader:
    """A little-endian file and the number of its bytes that are not read yet.

    No memory is allocated for a size that a file states before it is compared with that number.
    """

    def __init__(self, path: Path) -> None:
        self.what = f"cannot read `{path.name}` in `{path.parent}`"
        self._file = path.open("rb")
        self.size = self.remaining = path.stat().st_size

    def __enter__(self) -> "BinaryReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def error(self, why: str, hint: str = HINT) -> CheckpointError:
        """Return the error for a fault at or before the current position."""
        return CheckpointError(self.what, why=why, hint=hint)

    def take(self, n_bytes: int, meaning: str) -> bytearray:
        """Return the next bytes; `meaning` names them in errors.

        Raises:
            CheckpointError: the number is negative or larger than the rest of the file.
        """
        if not 0 <= n_bytes <= self.remaining:
            raise self.error(
                f"{meaning} should have {n_bytes} bytes, and {self.remaining} of the file's "
                f"{self.size} are left: it is truncated or damaged"
            )
        data = bytearray(n_bytes)
        if self._file.readinto(data) != n_bytes:
            raise self.error("it became shorter while it was read")
        self.remaining -= n_bytes
        return data

    def numbers(self, form: str, meaning: str) -> tuple[int, ...]:
        """Return numbers of the format `form` of `struct`, without its byte order."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), meaning))

    def number(self, form: str, meaning: str) -> int:
        """Return one number."""
        return self.numbers(form, meaning)[0]

    def text(self, n_bytes: int, meaning: str) -> str:
        """Return text in UTF-8.

        Raises:
            CheckpointError: it is not UTF-8, or longer than the rest of the file.
        """
        data = self.take(n_bytes, meaning)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{meaning} is not UTF-8: {shorten(repr(bytes(data)))}") from error

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> Tensor:
        """Return a tensor with its own memory.

        Raises:
            CheckpointError: a size is not positive, or there are too few bytes.
        """
        if any(size < 1 for size in shape):
            raise self.error(f"`{shorten(name)}` has the shape {shape}")
        data = self.take(math.prod(shape) * dtype.itemsize, f"`{shorten(name)}`")
        return torch.frombuffer(data, dtype=dtype).reshape(shape)
