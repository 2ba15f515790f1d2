"""Arrays that share blocks of memory: each is separate, aligned, and of its own shape and dtype."""

import numpy as np
import pytest

from whisperport.system.memory import ALIGNMENT, Memory, room


@pytest.mark.parametrize("block", [1, 1000, 2**20])
def test_arrays_are_separate_and_begin_at_a_cache_line(block: int) -> None:
    memory = Memory(block)
    shapes = [((3, 5), np.float32), ((1,), np.float16), ((1000,), np.float32), ((0, 2), np.float32)]

    arrays = [memory.array(shape, dtype) for shape, dtype in shapes * 5]
    for number, array in enumerate(arrays):
        array[...] = number

    assert [(array.shape, array.dtype) for array in arrays] == shapes * 5
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays if array.size)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)


def test_small_arrays_share_a_block() -> None:
    memory = Memory(4096)

    first, second = memory.array((10,)), memory.array((10,))

    assert second.ctypes.data - first.ctypes.data == ALIGNMENT


def test_arrays_fit_into_a_block_of_their_room() -> None:
    shapes = [(3,), (64, 64), (1, 5)]
    memory = Memory(sum(map(room, shapes)))

    arrays = [memory.array(shape) for shape in shapes]

    places = [array.ctypes.data for array in arrays]
    assert places == sorted(places)
    assert places[-1] - places[0] < sum(map(room, shapes))
