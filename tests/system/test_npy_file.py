"""Arrays from elsewhere: a file that is damaged, too short or no array is one kind of error."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.system.npy_file import open_array

NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.npy"
    np.save(path, NUMBERS)
    return path


@pytest.mark.parametrize("array", [NUMBERS, np.asfortranarray(NUMBERS), NUMBERS > 3], ids=str)
def test_an_array_comes_back(array: np.ndarray, file: Path) -> None:
    np.save(file, array)

    np.testing.assert_array_equal(open_array(file), array)


def test_a_file_that_states_more_than_it_holds_is_refused_without_memory(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"(3, 4)", b"(3" + b"0" * 15 + b",)")[: len(data)])

    with pytest.raises(ValueError, match="ValueError"):
        open_array(file)


def test_values_after_those_that_are_stated_are_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() * 2)

    with pytest.raises(ValueError, match=r"176 bytes after the values"):
        open_array(file)


@pytest.mark.parametrize("what", ["objects", "text", "archive", "pipe", "folder", "nothing"])
def test_what_is_no_file_of_numbers_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    if what == "objects":
        np.save(path, np.array([{}]), allow_pickle=True)
    elif what == "text":
        np.save(path, np.array(["a"]))
    elif what == "archive":
        with path.open("wb") as out:
            np.savez(out, x=NUMBERS)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()

    with pytest.raises(ValueError, match=r"."):
        open_array(path)


@given(place=st.integers(0, 127), byte=st.integers(0, 255))
def test_any_damaged_header_is_read_or_refused(
    place: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    np.save(path, NUMBERS)
    data = bytearray(path.read_bytes())
    data[place] = byte
    path.write_bytes(data)

    with suppress(ValueError):
        assert open_array(path).nbytes == NUMBERS.nbytes
