"""Microphone input, with a replacement for `sounddevice` that each test controls."""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from whisperport.errors import AudioError, MissingPackageError
from whisperport.speech.audio import AudioGapWarning, microphone_audio

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
            finished_callback()

        def __enter__(self) -> "RawInputStream":
            return self

        def __exit__(self, *_: object) -> None: ...

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
