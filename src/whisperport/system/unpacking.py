"""A limit on the unpacked size of an archive, so that a file of a few kilobytes cannot fill the memory."""

import zipfile

MAX_EXPANSION = 8  # unpacked size / size on disk; float32 weights do not reach half of this ratio
MIN_UNPACKED_BYTES = 64 * 2**20  # allowed for every archive: silence and zeros compress well


class UnpacksToMoreError(ValueError):
    """The unpacked size that an archive states exceeds the limit."""


def check_unpacked_size(archive: zipfile.ZipFile, size: int) -> None:
    """Check the total of the unpacked sizes that an archive states for its members.

    zip readers never unpack more of a member than the archive states.

    Args:
        archive: the open archive.
        size: bytes of the archive on disk.

    Raises:
        UnpacksToMoreError: the total exceeds both 64 MiB and eight times `size`.
    """
    total = sum(member.file_size for member in archive.infolist())
    limit = max(MIN_UNPACKED_BYTES, MAX_EXPANSION * size)
    if total > limit:
        raise UnpacksToMoreError(
            f"it unpacks to {total} bytes; at most {limit} are allowed for a file of {size} bytes"
        )
