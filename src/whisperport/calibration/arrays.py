"""Write samples into one array per input, in the layout that a compiler asks for, as they are made.

Thousands of samples take gigabytes: none is kept in memory.
"""

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import AudioError
from whisperport.progress import Progress
from whisperport.runner import Array
from whisperport.spec import ProgramSpec
from whisperport.targets.compiler import CalibrationNeed


def array_files(need: CalibrationNeed) -> tuple[str, ...]:
    """The file of each input, in the order of the program's inputs."""
    return tuple(f"{name}.npy" for name in need.names)


def write_arrays(
    samples: Iterable[Sequence[Array]],
    spec: ProgramSpec,
    need: CalibrationNeed,
    folder: Path,
    progress: Progress,
) -> int:
    """Write at most as many samples of a program's inputs as are needed.

    Returns:
        How many there are.

    Raises:
        AudioError: the disk has no room for them.
    """
    dtype = np.dtype(need.dtype)
    shapes = [need.layout(np.zeros(tensor.shape, tensor.dtype)).shape for tensor in spec.inputs]
    paths = [folder / file for file in array_files(need)]
    _check_room(folder, need.samples * dtype.itemsize * sum(map(math.prod, shapes)))
    arrays = [
        _mapped(path, (need.samples, *shape), dtype)
        for path, shape in zip(paths, shapes, strict=True)
    ]
    count = 0
    for sample in samples:
        for array, one in zip(arrays, sample, strict=True):
            array[count] = need.layout(one)
        count += 1
        if count % max(1, need.samples // 10) == 0:
            progress(f"{spec.name}: {count} of {need.samples} calibration samples")
        if count == need.samples:
            break
    for path, array in zip(paths, arrays, strict=True):
        array.flush()
        if 0 < count < need.samples:
            _cut(path, count)
    return count


def _check_room(folder: Path, needed_bytes: int) -> None:
    """A mapped file on a full disk ends the process without an error."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise AudioError(
            f"the disk is too full for a calibration set in {folder}",
            why=f"{needed_bytes / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free",
            hint="free some space, or choose another folder: `--work`",
        )


def _mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def _cut(path: Path, count: int) -> None:
    """Keep the first samples of an array on disk."""
    complete = np.load(path, mmap_mode="r")
    partial = path.with_name(f"partial.{path.name}")
    kept = _mapped(partial, (count, *complete.shape[1:]), complete.dtype)
    for index in range(count):
        kept[index] = complete[index]
    kept.flush()
    del complete, kept
    os.replace(partial, path)
