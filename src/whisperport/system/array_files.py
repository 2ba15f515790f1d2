"""Read arrays of unknown origin: `.npy` files, and archives that may unpack to more than the memory."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.system.regular_file import other_kind

KINDS = "biuf"  # kinds of numpy dtypes: booleans, integers and floats


def open_array(path: Path) -> NDArray[Any]:
    """Return the numbers of an `.npy` file, memory-mapped: a false size in its header needs no memory.

    Raises:
        ValueError: it is no regular file, it is damaged, or it does not hold numbers only.
    """
    try:
        if kind := other_kind(path):
            raise ValueError(f"it is {kind}, not a file")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap) or array.dtype.kind not in KINDS:
            raise ValueError(f"it holds {getattr(array, 'dtype', 'several arrays')}")
        if extra := path.stat().st_size - array.offset - array.nbytes:
            raise ValueError(f"it has {extra:,} bytes after the values that its header states")
    except Exception as error:  # numpy raises nine types of exceptions for damaged files
        raise ValueError(f"{type(error).__name__}: {error}"[:200]) from error
    return array


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
