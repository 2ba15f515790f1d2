"""A limit on what an archive unpacks to, so that a file of kilobytes cannot fill the memory."""

import zipfile

MAX_EXPANSION = 8  # times the size on disk: weights in float32 do not compress half as well
MIN_UNPACKED_BYTES = 64 * 2**20  # allowed to any archive: silence and zeros compress well


class UnpacksToMoreError(ValueError):
    """An archive states that it unpacks to more than is allowed."""


def check_unpacked_size(archive: zipfile.ZipFile, size: int) -> None:
    """Check the stated sizes of all members; zip readers never unpack more of a member than is stated.

    Args:
        size: bytes of the archive on disk.

    Raises:
        UnpacksToMoreError: together they exceed eight times `size`, and 64 MiB.
    """
    total = sum(member.file_size for member in archive.infolist())
    limit = max(MIN_UNPACKED_BYTES, MAX_EXPANSION * size)
    if total > limit:
        raise UnpacksToMoreError(
            f"it unpacks to {total} bytes; at most {limit} are allowed for a file of {size} bytes"
        )
