"""Read `.npy` files of unknown origin."""

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
