"""Write calibration samples to disk: one array per input, in the layout that the compiler needs.

Thousands of samples take gigabytes, so each sample is written as soon as it is computed.
"""

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import AudioError
from whisperport.progress import Counted, Progress
from whisperport.runner import Array
from whisperport.spec import ProgramSpec
from whisperport.targets.compiler import CalibrationNeed


def array_files(need: CalibrationNeed) -> tuple[str, ...]:
    """Return the file name of each input's array, in the order of the program's inputs."""
    return tuple(f"{name}.npy" for name in need.names)


def write_arrays(
    samples: Iterable[Sequence[Array]],
    spec: ProgramSpec,
    need: CalibrationNeed,
    folder: Path,
    progress: Progress,
) -> int:
    """Write samples of a program's inputs, at most `need.samples`.

    Args:
        samples: the arrays of each sample, in the order of `spec.inputs`.
        spec: the program's inputs and outputs.
        need: number, layout and dtype of the samples that the compiler reads.
        folder: where to write the arrays.
        progress: called with a line after every tenth of the samples.

    Returns:
        The number of samples written.

    Raises:
        AudioError: the disk has not enough free space.
    """
    dtype = np.dtype(need.dtype)
    shapes = [need.layout(np.zeros(tensor.shape, tensor.dtype)).shape for tensor in spec.inputs]
    paths = [folder / file for file in array_files(need)]
    _check_disk_space(folder, need.samples * dtype.itemsize * sum(map(math.prod, shapes)))
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
            stage = f"{spec.name}: {count} of {need.samples} calibration samples"
            progress(Counted(stage, count, need.samples))
        if count == need.samples:
            break
    for path, array in zip(paths, arrays, strict=True):
        array.flush()
        if 0 < count < need.samples:
            _truncate(path, count)
    return count


def _check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raise AudioError if the disk is too full: writing to a mapped file would then end the process."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise AudioError(
            f"the disk is too full for a calibration set in {folder}",
            why=f"{needed_bytes / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free",
            hint="free some disk space, or choose a folder on another disk with `--work`",
        )


def _mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def _truncate(path: Path, count: int) -> None:
    """Keep only the first `count` samples of an array on disk."""
    complete = np.load(path, mmap_mode="r")
    partial = path.with_name(f"partial.{path.name}")
    first = _mapped(partial, (count, *complete.shape[1:]), complete.dtype)
    for index in range(count):
        first[index] = complete[index]
    first.flush()
    del complete, first
    os.replace(partial, path)
