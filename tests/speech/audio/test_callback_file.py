"""Exceptions inside of callbacks that FFmpeg makes."""

import fcntl
import io
import os
import signal
import subprocess
import sys
import termios
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import AudioError
from whisperport.speech.audio import DamagedAudioWarning, load_audio
from whisperport.speech.audio.callback_file import CallbackFile

from ...embedded import default_bundle
from .test_load import noise, wav

SOUND = wav(noise(1).repeat(200, axis=0)).getvalue()


class Failing(io.RawIOBase):
    """A pipe or a file that raises `error` after `n_bytes`, once; later reads find the end."""

    def __init__(self, error: BaseException, n_bytes: int, *, seekable: bool = False) -> None:
        self._data, self._error, self._n_bytes = io.BytesIO(SOUND), error, n_bytes
        self._seekable, self.n_after = seekable, 0
        self._failed = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._seekable

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._data.seek(offset, whence)

    def tell(self) -> int:
        return self._data.tell()

    def read(self, size: int = -1) -> Any:
        if self._failed:
            self.n_after += 1
            return b""
        if size and self._data.tell() >= self._n_bytes:
            self._failed = True
            raise self._error
        return self._data.read(min(size, 1000))


@pytest.mark.parametrize("seekable", [False, True])
@pytest.mark.parametrize("n_bytes", [0, 20, 3000, 600_000])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_a_callback_ends_the_audio(n_bytes: int, seekable: bool) -> None:
    file = Failing(KeyboardInterrupt("first"), n_bytes, seekable=seekable)

    with pytest.raises(KeyboardInterrupt, match="first"):
        load_audio(file)  # type: ignore[arg-type]

    assert file.n_after == 0  # it was not read again


def test_a_file_that_cannot_be_read_is_reported() -> None:
    with pytest.raises(AudioError) as caught:
        load_audio(Failing(OSError(5, "Input/output error"), 0))  # type: ignore[arg-type]

    assert caught.value.why == "Input/output error"


def test_what_was_read_before_an_error_is_used_with_a_warning() -> None:
    with pytest.warns(DamagedAudioWarning, match="Input/output error"):
        samples = load_audio(Failing(OSError(5, "Input/output error"), 600_000))  # type: ignore[arg-type]

    np.testing.assert_array_equal(samples, load_audio(io.BytesIO(SOUND))[: samples.size])
    assert samples.size > 290_000


def test_an_error_of_the_files_own_kind_is_raised_as_it_is() -> None:
    class BrokenError(Exception):
        pass

    with pytest.raises(BrokenError):
        load_audio(Failing(BrokenError(), 3000))  # type: ignore[arg-type]


def test_a_file_object_that_gives_too_much_does_not_overrun_a_buffer() -> None:
    class Generous(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return b"" if size == 0 else bytes(10_000_000)

        read1 = read  # type: ignore[assignment]

    with pytest.raises(AudioError, match="bytes were requested"):
        load_audio(Generous())


def test_a_seek_that_fails_is_remembered() -> None:
    class Unseekable(io.BytesIO):
        def seek(self, offset: int, whence: int = 0) -> int:
            raise OSError(29, "Illegal seek")

    file = CallbackFile(Unseekable())

    with pytest.raises(OSError, match="Illegal seek"), file.calls():
        assert file.seek(0) == -1
    assert file.read(10) == b""


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; time.sleep(0.2); sys.stdout.buffer.write(b'late')",
        ],
        stdout=writer,
    )
    os.close(writer)

    with open(reader, "rb", buffering=0) as pipe:
        assert CallbackFile(pipe).read(10) == b"late"
    child.wait()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
@pytest.mark.parametrize(
    ("number", "status", "n_bytes"), [(signal.SIGINT, 130, 20), (signal.SIGTERM, 143, 4000)]
)
def test_a_stalled_fifo_ends_at_the_first_signal(
    tmp_path: Path, number: signal.Signals, status: int, n_bytes: int
) -> None:
    # given: a process that waits for more of a FIFO, within FFmpeg's probing
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [
        sys.executable,
        "-m",
        "whisperport",
        "transcribe",
        fifo,
        "--bundle",
        default_bundle(),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with fifo.open("wb", buffering=0) as writer:
        writer.write(SOUND[:n_bytes])
        while waiting_bytes(writer.fileno()):
            time.sleep(0.01)

        process.send_signal(number)
        out, err = process.communicate(timeout=120)  # the old code waited for the end of the FIFO

    assert (process.returncode, out) == (status, "")
    assert err.startswith("interrupted:")
    assert len(err.splitlines()) == 1


def waiting_bytes(fd: int) -> int:
    """How many bytes of a pipe were not read yet."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_nothing_is_kept_of_a_file_without_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_audio(io.BytesIO(SOUND)).size == 320_000
