"""Write calibration samples to disk: one array per input, in the layout that the compiler needs.

Thousands of samples take gigabytes, so each sample is written as soon as it is computed.
"""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.errors import AudioError
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.system.progress import Counted, begin_stage
from whisperport.system.system_error import lack_of_space
from whisperport.targets.compiler import CalibrationNeed


def array_files(need: CalibrationNeed) -> tuple[str, ...]:
    """Return the file name of each input's array, in the order of the program's inputs."""
    return tuple(f"{name}.npy" for name in need.names)


class ArrayWriter:
    """Writes samples of one program's inputs, at most `need.samples`.

    Attributes:
        count: number of samples written.
    """

    def __init__(self, spec: ProgramSpec, need: CalibrationNeed, folder: Path) -> None:
        """
        Args:
            spec: the program's inputs and outputs.
            need: number, layout and dtype of the samples that the compiler reads.
            folder: where to write the arrays.

        Raises:
            AudioError: the disk has not enough free space.
        """
        self._spec, self._need = spec, need
        dtype = np.dtype(need.dtype)
        shapes = [need.layout(np.zeros(tensor.shape, tensor.dtype)).shape for tensor in spec.inputs]
        self._paths = [folder / file for file in array_files(need)]
        _check_disk_space(folder, need.samples * dtype.itemsize * sum(map(math.prod, shapes)))
        self._arrays = [
            _mapped(path, (need.samples, *shape), dtype)
            for path, shape in zip(self._paths, shapes, strict=True)
        ]
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether all samples that the compiler reads are written."""
        return self.count == self._need.samples

    def add(self, samples: Iterable[Sequence[Array]]) -> None:
        """Write samples, each with its arrays in the order of `spec.inputs`, until all are written."""
        for sample in samples:
            if self.is_full:
                return
            for array, values in zip(self._arrays, sample, strict=True):
                array[self.count] = self._need.layout(values)
            self.count += 1
            if self.count % max(1, self._need.samples // 10) == 0:
                stage = (
                    f"{self._spec.name}: {self.count} of {self._need.samples} calibration samples"
                )
                begin_stage(Counted(stage, self.count, self._need.samples))

    def close(self) -> int:
        """Complete the files, and return the number of samples."""
        for path, array in zip(self._paths, self._arrays, strict=True):
            array.flush()
            if 0 < self.count < self._need.samples:
                _truncate(path, self.count)
        return self.count


def _check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raise AudioError if the disk is too full: writing to a mapped file would then end the process."""
    if lack := lack_of_space(folder, needed_bytes):
        raise AudioError(
            f"the disk is too full for a calibration set in {folder}",
            why=lack,
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
