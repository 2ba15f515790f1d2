"""Audio that is still being made: every sample, as it comes, from any source."""

import io
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import AudioError, MissingPackageError
from whisperport.speech.audio import microphone
from whisperport.speech.audio.live_pieces import ReadAhead, in_real_time, live_audio
from whisperport.speech.audio.microphone import AudioGapWarning, microphone_audio
from whisperport.speech.audio.pcm_stream import from_raw

# Sound that is still being made: every sample, as it comes, whatever the source does.

TONE = (8000 * np.sin(np.arange(16_000) / 5)).astype("<i2")
FLOATS = TONE.astype(np.float32) / 32768


def in_chunks(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    for size in sizes:
        yield data[:size]
        data = data[size:]
    yield data


@given(st.lists(st.integers(0, 3000), max_size=12))
def test_raw_audio_may_be_cut_anywhere(sizes: list[int]) -> None:
    pieces = list(from_raw(in_chunks(TONE.tobytes(), sizes), 16_000))

    assert np.array_equal(np.concatenate(pieces), FLOATS)


def test_half_a_sample_at_the_end_is_dropped() -> None:
    pieces = list(from_raw([TONE.tobytes(), b"\x01"], 16_000))

    assert np.array_equal(np.concatenate(pieces), FLOATS)


def test_raw_audio_of_another_rate_is_resampled() -> None:
    samples = np.concatenate(list(from_raw(in_chunks(TONE.tobytes(), [999] * 20), 48_000)))

    assert samples.size == pytest.approx(16_000 / 3, abs=20)
    assert np.abs(samples).max() <= 1


@pytest.mark.parametrize("rate", [1, 10**9])
def test_a_sample_rate_out_of_range_is_rejected(rate: int) -> None:
    with pytest.raises(AudioError, match="sample rate"):
        list(from_raw([b"\0\0"], rate))


def test_a_pipe_gives_what_it_has_before_it_ends() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as file:
        os.write(writer, TONE[:800].tobytes())
        audio = live_audio(file, raw_rate=16_000)

        first = next(audio)  # would wait for ever if it waited for more

        os.write(writer, TONE[800:].tobytes())
        os.close(writer)
        rest = list(audio)
    assert np.array_equal(first, FLOATS[:800])
    assert np.array_equal(np.concatenate([first, *rest]), FLOATS)


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def test_a_container_comes_by_a_pipe() -> None:
    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: (os.write(writer, wav(TONE)), os.close(writer)))
    thread.start()

    with open(reader, "rb", buffering=0) as file:
        pieces = list(live_audio(file))

    thread.join()
    assert np.array_equal(np.concatenate(pieces), FLOATS)
    assert len(pieces) > 3


@pytest.mark.parametrize("raw_rate", [None, 16_000])
def test_a_named_pipe_is_read_and_not_played(raw_rate: int | None, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = wav(TONE) if raw_rate is None else TONE.tobytes()
    thread = threading.Thread(target=lambda: path.write_bytes(data))
    thread.start()

    samples = np.concatenate(list(live_audio(path, raw_rate=raw_rate)))

    thread.join()
    assert np.array_equal(samples, FLOATS)


@pytest.mark.parametrize("raw_rate", [None, 16_000])
def test_no_audio_at_all_is_an_error(raw_rate: int | None) -> None:
    with pytest.raises(AudioError):
        list(live_audio(io.BytesIO(), raw_rate=raw_rate))


def test_a_file_is_read_in_real_time() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    pieces = [np.zeros(1600, np.float32)] * 5
    times = [now[0] - 100 for _ in in_real_time(pieces, clock=lambda: now[0], sleep=sleep)]

    assert times == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_who_plays_late_does_not_sleep() -> None:
    now = [0.0]
    slept: list[float] = []
    audio = in_real_time([np.zeros(1600, np.float32)] * 3, clock=lambda: now[0], sleep=slept.append)

    for _ in audio:
        now[0] += 5.0

    assert slept == pytest.approx([0.1, 0.0, 0.0])


def test_reading_ahead_drops_nothing_while_the_reader_is_away() -> None:
    done = threading.Event()

    def pieces() -> Iterator[np.ndarray]:
        yield from np.split(FLOATS, 10)
        done.set()

    source = ReadAhead(pieces())
    assert done.wait(10)

    taken = [source.take()]
    while (more := source.take()) is not None:
        taken.append(more)

    assert np.array_equal(np.concatenate(taken), FLOATS)


def test_a_source_that_fails_is_read_until_then() -> None:
    def pieces() -> Iterator[np.ndarray]:
        yield FLOATS
        raise AudioError("unplugged")

    source = ReadAhead(pieces())
    taken = source.take()

    assert taken is not None
    assert taken.size == FLOATS.size
    with pytest.raises(AudioError, match="unplugged"):
        source.take()


def test_a_source_that_waits_can_be_stopped() -> None:
    forever = threading.Event()

    def pieces() -> Iterator[np.ndarray]:
        yield FLOATS
        forever.wait(30)

    source = ReadAhead(pieces())
    assert source.take() is not None
    source.stop()

    assert source.take() is None
    forever.set()


def test_a_source_that_runs_far_ahead_waits_until_audio_is_taken() -> None:
    asked: list[int] = []

    def pieces() -> Iterator[np.ndarray]:
        for number in range(1000):
            asked.append(number)
            yield np.full(1600, number, np.float32)  # 0.1 s

    def settled() -> int:
        before = -1
        while before != len(asked):
            before = len(asked)
            time.sleep(0.2)
        return before

    source = ReadAhead(pieces(), ahead_s=1.0)
    first = settled()
    taken = source.take()
    second = settled()
    source.stop()

    assert first == 11  # 1 s, and one piece more
    assert taken is not None
    assert taken.size == 11 * 1600
    assert second == 22


class ClosedPipe(io.RawIOBase):
    """A pipe whose other side goes wrong after some samples."""

    def __init__(self) -> None:
        self.left = [TONE.tobytes()]

    def read(self, size: int = -1) -> Any:
        if size == 0:
            return b""
        if not self.left:
            raise OSError(5, "Input/output error")
        return self.left.pop()


def test_a_pipe_that_breaks_says_so_after_what_it_gave() -> None:
    audio = live_audio(ClosedPipe(), raw_rate=16_000)  # type: ignore[arg-type]

    assert np.array_equal(next(audio), FLOATS)
    with pytest.raises(AudioError, match="cannot read more"):
        next(audio)


# Microphone input, with a replacement for `sounddevice` that each test controls.

CHUNK = np.arange(1600, dtype="<i2")


class PortAudioError(Exception):
    pass


class Status:
    def __init__(self, input_overflow: bool = False) -> None:
        self.input_overflow = input_overflow


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A microphone that says one chunk and is pulled out; 16 kHz and 48 kHz."""
    fake: Any = types.ModuleType("sounddevice")
    fake.PortAudioError, fake.rates, fake.overflow, fake.opened = (
        PortAudioError,
        (16_000,),
        False,
        [],
    )

    def check_input_settings(*, samplerate: int, **_: Any) -> None:
        if samplerate not in fake.rates:
            raise PortAudioError("Invalid sample rate")

    class RawInputStream:
        def __init__(
            self, *, callback: Callable[..., None], finished_callback: Any, **options: Any
        ) -> None:
            fake.opened.append(options)
            callback(CHUNK.tobytes(), CHUNK.size, None, Status(fake.overflow))
            if fake.says_that_it_ends:
                finished_callback()

        def __enter__(self) -> "RawInputStream":
            return self

        def __exit__(self, *_: object) -> None: ...

    fake.says_that_it_ends = True
    fake.check_input_settings = check_input_settings
    fake.query_devices = lambda device, kind: {"default_samplerate": 48_000.0}
    fake.RawInputStream = RawInputStream
    monkeypatch.setitem(sys.modules, "sounddevice", fake)
    return fake


def test_a_microphone_yields_samples_until_it_is_disconnected(device: Any) -> None:
    audio = microphone_audio("usb")

    assert np.array_equal(next(audio), CHUNK.astype(np.float32) / 32768)
    with pytest.raises(AudioError, match="stopped"):
        next(audio)
    assert (
        device.opened[0] | {"device": "usb", "samplerate": 16_000, "channels": 1}
        == device.opened[0]
    )


def test_one_that_disappears_without_a_word_is_not_waited_for(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a device that PortAudio takes for open, and that sends nothing more
    device.says_that_it_ends = False
    monkeypatch.setattr(microphone, "SILENT_S", 0.05)
    audio = microphone_audio("usb")
    next(audio)
    # then the command ends, with what it has transcribed
    with pytest.raises(AudioError, match="stopped"):
        next(audio)


def test_one_that_cannot_do_16_khz_is_resampled(device: Any) -> None:
    device.rates = (48_000,)

    piece = next(microphone_audio())

    assert device.opened[0]["samplerate"] == 48_000
    assert 400 < piece.size <= 1600 // 3 + 1


def test_a_gap_is_warned_of(device: Any) -> None:
    device.overflow = True

    with pytest.warns(AudioGapWarning, match="audio from the microphone was lost"):
        next(microphone_audio())


@pytest.mark.parametrize(
    "error", [PortAudioError("Error querying device -1"), ValueError("No match")]
)
def test_no_microphone_is_an_error_that_says_how_to_choose_one(
    device: Any, error: Exception
) -> None:
    def fail(**_: Any) -> None:
        raise error

    device.check_input_settings = device.RawInputStream = fail
    device.query_devices = lambda *_: fail()

    with pytest.raises(AudioError) as raised:
        next(microphone_audio())

    assert raised.value.why == str(error)
    assert "--microphone" in raised.value.hint


class Absent:
    """Make imports of `sounddevice` fail as if it, or the PortAudio library, were missing."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, *_: object) -> None:
        if name == "sounddevice":
            raise self.error


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ImportError("No module named 'sounddevice'"), "whisperport[live]"),
        (OSError("PortAudio library not found"), "libportaudio2"),
        (AttributeError("module '_cffi_backend' has no attribute 'FFI'"), "--force-reinstall"),
    ],
)
def test_what_is_not_installed_is_named(
    error: Exception, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(error), *sys.meta_path])

    with pytest.raises(MissingPackageError) as raised:
        next(microphone_audio())

    assert hint in raised.value.hint
