"""Files, pipes and arrays become mono samples at 16 kHz."""

import fcntl
import io
import os
import signal
import subprocess
import sys
import termios
import time
import warnings
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.audio.resampler import AudioResampler
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.speech.audio import (
    SAMPLE_RATE,
    audio_windows,
    decode,
    iter_audio,
    load_audio,
)
from whisperport.speech.audio.callback_file import CallbackFile
from whisperport.speech.audio.decode import DamagedAudioWarning

from ...embedded import default_bundle
from .conftest import WriteAudio, tone

# Files, pipes and arrays become mono samples at 16 kHz.

EXPECTED = tone(SAMPLE_RATE)
MIDDLE = slice(1600, EXPECTED.size - 1600)  # codecs fade in and out


def signal_to_noise_db(actual: NDArray[np.float32]) -> float:
    error = actual[: EXPECTED.size][MIDDLE] - EXPECTED[MIDDLE]
    return float(10 * np.log10((EXPECTED[MIDDLE] ** 2).sum() / (error**2).sum()))


@pytest.mark.parametrize(
    ("suffix", "rate", "least_db"),
    # 16 bit allow 88 dB here. The lossy codecs reach 20 (the AAC encoder of PyAV 19, mono at 44.1 kHz;
    # 26 for mp3: lame lowers the volume by 5 %) to 60; a shift by one sample would leave 12.
    [(suffix, rate, 80) for suffix in ("wav", "flac") for rate in (8000, 22050, 44100, 48000)]
    + [
        (suffix, rate, least)
        for suffix, least in (("mp3", 25), ("m4a", 18))
        for rate in (8000, 22050, 44100, 48000)
    ]
    + [("ogg", rate, 25) for rate in (8000, 48000)],
)
@pytest.mark.parametrize("n_channels", [1, 2])
def test_a_tone_survives_format_rate_and_channels(
    write_audio: WriteAudio, suffix: str, rate: int, least_db: float, n_channels: int
) -> None:
    path = write_audio(np.stack([tone(rate)] * n_channels), rate, suffix)

    samples = load_audio(path)

    assert samples.dtype == np.float32
    assert samples.ndim == 1
    # AAC counts in frames of 1024 samples, and its last one is not cut off.
    n_extra = samples.size - EXPECTED.size
    assert 0 <= n_extra <= (1024 * SAMPLE_RATE / rate if suffix == "m4a" else 0)
    assert signal_to_noise_db(samples) > least_db


def test_a_16_khz_wav_is_read_bit_for_bit(write_audio: WriteAudio) -> None:
    samples = load_audio(write_audio(EXPECTED, SAMPLE_RATE))

    assert np.abs(samples - EXPECTED).max() <= 0.5 / 32768 + 1e-7


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 48_000])
@pytest.mark.parametrize("lost", [0, 1, 4097])
def test_opening_a_mono_wav_faster_changes_no_sample(
    write_audio: WriteAudio, monkeypatch: pytest.MonkeyPatch, rate: int, lost: int
) -> None:
    path = write_audio(tone(rate, 3.0), rate)
    data = path.read_bytes()[: path.stat().st_size - lost]

    with warnings.catch_warnings(record=True) as faster:
        warnings.simplefilter("always")
        samples = load_audio(io.BytesIO(data))
    monkeypatch.setattr(decode, "_MONO_WAV_OPTIONS", {})
    with warnings.catch_warnings(record=True) as slower:
        warnings.simplefilter("always")
        expected = load_audio(io.BytesIO(data))

    np.testing.assert_array_equal(samples, expected)
    assert [str(one.message) for one in faster] == [str(one.message) for one in slower]


def test_only_mono_wavs_are_opened_without_the_search_for_dts(write_audio: WriteAudio) -> None:
    mono, stereo = (write_audio(np.stack([EXPECTED] * n), SAMPLE_RATE).read_bytes() for n in (1, 2))
    flac = write_audio(EXPECTED, SAMPLE_RATE, "flac").read_bytes()

    recognized = [decode._is_mono_wav(io.BytesIO(data)) for data in (mono, stereo, flac, mono[:30])]

    assert recognized == [True, False, False, False]


def test_channels_are_averaged(write_audio: WriteAudio) -> None:
    path = write_audio(np.stack([EXPECTED, np.zeros_like(EXPECTED)]), SAMPLE_RATE)

    samples = load_audio(path)

    assert np.abs(samples - EXPECTED / 2).max() <= 1.5 / 32768


def test_five_point_one_is_mixed_down(write_audio: WriteAudio) -> None:
    path = write_audio(np.stack([EXPECTED] * 6), SAMPLE_RATE)

    samples = load_audio(path)

    assert samples.size == EXPECTED.size
    assert np.corrcoef(samples, EXPECTED)[0, 1] > 0.999


@pytest.mark.parametrize("suffix", ["wav", "mp3", "m4a"])
def test_path_string_and_file_object_agree(write_audio: WriteAudio, suffix: str) -> None:
    path = write_audio(tone(44100), 44100, suffix)

    by_path = load_audio(path)

    np.testing.assert_array_equal(by_path, load_audio(str(path)))
    with path.open("rb") as file:
        np.testing.assert_array_equal(by_path, load_audio(file))
        assert not file.closed  # its owner closes it
    np.testing.assert_array_equal(by_path, load_audio(io.BytesIO(path.read_bytes())))


class Pipe(io.RawIOBase):
    """Bytes that can be read once, in order."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        return self._data.readinto(buffer)

    def isatty(self) -> bool:
        return False


class StandardInput:
    def __init__(self, data: bytes, *, terminal: bool = False) -> None:
        self.buffer = Pipe(data)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_a_dash_reads_standard_input(
    write_audio: WriteAudio, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = write_audio(tone(48000), 48000, suffix)
    monkeypatch.setattr(sys, "stdin", StandardInput(path.read_bytes()))

    samples = load_audio("-")

    np.testing.assert_array_equal(samples, load_audio(path))


def test_a_terminal_as_standard_input_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StandardInput(b"", terminal=True))

    with pytest.raises(AudioError, match="standard input is a terminal"):
        load_audio("-")


def test_a_closed_standard_input_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)

    with pytest.raises(AudioError, match="standard input is closed"):
        load_audio("-")


def test_an_m4a_from_a_pipe_says_to_save_it_first(write_audio: WriteAudio) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(20 * SAMPLE_RATE)
    data = write_audio(noise, SAMPLE_RATE, "m4a").read_bytes()  # too long to be buffered completely

    with pytest.raises(AudioError, match="save it to a file first"):
        load_audio(Pipe(data))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int16", "int32"])
def test_arrays_of_numbers_are_scaled(dtype: str) -> None:
    full_scale = {"int16": 2**15, "int32": 2**31}.get(dtype, 1)
    given = (EXPECTED.astype(np.float64) * full_scale).astype(dtype)

    samples = load_audio(given)

    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, EXPECTED, atol=2.0**-11 if dtype == "float16" else 2.0**-15)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_an_array_at_another_rate_is_resampled(rate: int) -> None:
    samples = load_audio(tone(rate), sample_rate=rate)

    assert samples.size == EXPECTED.size
    assert signal_to_noise_db(samples) > 80


def test_hot_floats_are_clipped_as_a_file_would() -> None:
    samples = load_audio(EXPECTED * 3)  # peaks at 1.2

    np.testing.assert_array_equal(samples, np.clip(EXPECTED * 3, -1, 1))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.zeros(0, np.float32), "contains no samples"),
        (np.zeros(1, np.float32), r"too short: 1 sample at 16 kHz(.|\n)*160 samples, 10 ms"),
        (np.zeros(159, np.float32), "too short: 159 samples"),
        (np.zeros((1, 400), np.float32), r"got \(1, 400\)"),
        (np.float32(0), r"got \(\)"),
        (np.full(400, np.nan), "NaN or an infinity"),
        (np.full(400, -np.inf), "NaN or an infinity"),
        (np.full(400, 3000.0), r"values up to 3000(.|\n)*divide them by"),
        (np.zeros(400, np.uint8), "dtype uint8"),
        (np.zeros(400, np.complex64), "dtype complex64"),
        (np.array(["a"] * 400), "dtype <U1"),
    ],
)
def test_arrays_that_are_not_audio_are_rejected(
    samples: NDArray[np.float32], expected: str
) -> None:
    with pytest.raises(AudioError, match=expected):
        load_audio(np.asarray(samples))


@pytest.mark.parametrize("rate", [-1, 0, 999, 768_001])
def test_an_impossible_rate_is_rejected(rate: int) -> None:
    with pytest.raises(AudioError, match=f"{rate} Hz"):
        load_audio(EXPECTED, sample_rate=rate)


def test_a_rate_beside_a_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="for arrays"):
        load_audio(tmp_path / "talk.wav", sample_rate=8000)


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int16, np.int32]),
        st.integers(0, 2000),
    )
)
@settings(max_examples=100)
def test_any_array_is_accepted_or_rejected(samples: NDArray[np.float32]) -> None:
    try:
        loaded = load_audio(samples)
    except AudioError:
        return

    assert loaded.size == samples.size
    assert np.isfinite(loaded).all()
    assert np.abs(loaded).max() <= 1.0


@given(block_s=st.floats(0.001, 3.0))
@settings(max_examples=30)
def test_blocks_joined_are_the_audio(block_s: float) -> None:
    blocks = list(iter_audio(EXPECTED, block_s=block_s))

    np.testing.assert_array_equal(np.concatenate(blocks), EXPECTED)
    assert {block.size for block in blocks[:-1]} <= {round(block_s * SAMPLE_RATE)}


@given(window=st.integers(1, 900), step=st.integers(1, 1200), n_samples=st.integers(160, 2000))
@settings(max_examples=100)
def test_windows_begin_every_step_and_each_brings_something_new(
    window: int, step: int, n_samples: int
) -> None:
    audio = EXPECTED[:n_samples]

    windows = list(audio_windows(audio, window / SAMPLE_RATE, step_s=step / SAMPLE_RATE))

    seen = 0
    for number, found in enumerate(windows):
        start = round(found.start_s * SAMPLE_RATE)
        assert start == number * step
        np.testing.assert_array_equal(found.samples, audio[start : start + window])
        assert start + found.samples.size > seen
        seen = start + found.samples.size
    assert seen == n_samples or step > window


@pytest.mark.parametrize(("window_s", "step_s"), [(0.0, None), (1.0, 0.0), (-1.0, None)])
def test_a_window_of_nothing_is_rejected(window_s: float, step_s: float | None) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        next(audio_windows(EXPECTED, window_s, step_s=step_s))


# Files of many channels as mono.


N = 1600
RANDOM = np.random.default_rng(0)


def wav(samples: NDArray[np.int16], rate: int = SAMPLE_RATE) -> io.BytesIO:
    """(n, channels) as a file that gives the number of its channels, and not what they are."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(samples.itemsize)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return io.BytesIO(file.getvalue())


def noise(channels: int) -> NDArray[np.int16]:
    return (RANDOM.standard_normal((N, channels)) * 3000).clip(-32768, 32767).astype("<i2")


@pytest.mark.parametrize("channels", [9, 17, 64, 255])
def test_channels_that_ffmpeg_does_not_know_are_averaged(channels: int) -> None:
    samples = noise(channels)

    mono = load_audio(wav(samples))

    # Rounded to 16 bit once.
    np.testing.assert_allclose(mono, samples.mean(axis=1) / 32768, atol=0.51 / 32768)


def test_averages_of_8_bits_are_centred() -> None:
    samples = RANDOM.integers(0, 256, (N, 11), dtype=np.uint8)

    mono = load_audio(wav(samples))  # type: ignore[arg-type]

    np.testing.assert_allclose(mono, samples.mean(axis=1) / 128 - 1, atol=0.51 / 32768)


def test_averages_are_resampled() -> None:
    t = np.arange(3 * N) / 48_000
    tone = np.sin(2 * np.pi * 440 * t)
    samples = (8000 * tone[:, None] * np.linspace(0.5, 1.5, 64)).astype("<i2")

    mono = load_audio(wav(samples, rate=48_000))

    expected = 8000 / 32768 * tone[::3]
    assert mono.size == pytest.approx(N, abs=2)
    np.testing.assert_allclose(mono[200 : N - 200], expected[200 : N - 200], atol=2e-3)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 6, 7, 8, 10, 16, 24])
def test_channels_that_ffmpeg_knows_or_guesses_are_mixed_by_it(channels: int) -> None:
    samples = noise(channels)
    frame = av.AudioFrame.from_ndarray(
        samples.reshape(1, -1), format="s16", layout=f"{channels} channels"
    )
    frame.sample_rate = SAMPLE_RATE
    resampler = AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
    mixed = [out.to_ndarray()[0] for out in resampler.resample(frame) if out is not None]

    mono = load_audio(wav(samples))

    np.testing.assert_allclose(mono, np.concatenate(mixed) / 32768, atol=1.01 / 32768)


# Exceptions inside of callbacks that FFmpeg makes.

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
