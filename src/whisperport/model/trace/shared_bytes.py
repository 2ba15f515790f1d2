"""A file in which equal pieces of data are stored once, such as weights that several programs share."""

import hashlib
from pathlib import Path


class SharedBytes:
    """Appends data to a file, unless the file has the same data already.

    Args:
        path: the file, which is created.
        alignment: each piece begins at a multiple of this number of bytes.
    """

    def __init__(self, path: Path, alignment: int) -> None:
        self.path, self._alignment = path, alignment
        self._offsets: dict[bytes, int] = {}
        self._end = 0
        path.touch()

    def place(self, data: bytes | memoryview) -> int:
        """Return the offset of the data in the file; it is appended if the file does not have it.

        Equal pieces are recognized by their SHA-256.
        """
        digest = hashlib.sha256(data).digest()
        offset = self._offsets.get(digest)
        if offset is None:
            offset = self._offsets[digest] = -(-self._end // self._alignment) * self._alignment
            with self.path.open("r+b") as file:
                file.seek(offset)
                file.write(data)
            self._end = offset + len(data)
        return offset
