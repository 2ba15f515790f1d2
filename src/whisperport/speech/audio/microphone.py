"""Read a microphone through PortAudio (package `sounddevice`, extra `live`)."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import AudioError, MissingPackageError, needs
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.speech.audio.pcm_stream import from_raw

PIECE_S = 0.1  # duration of a piece in seconds
SILENT_S = 10.0  # without a piece: the device is gone, although PortAudio did not say so
_LIST = "python -m sounddevice"  # command that lists every device


class AudioGapWarning(UserWarning):
    """Audio from the microphone was lost because the process did not read it in time."""


def microphone_audio(
    device: str | int | None = None, opened: Callable[[], None] = lambda: None
) -> Iterator[NDArray[np.float32]]:
    """Return pieces (n,) float32 from a microphone, mono at 16 kHz, without end.

    The library and the device are checked by this call; the first piece opens the device.

    Args:
        device: number or part of the name of a device, as `python -m sounddevice` lists them; None: the
            system's default.
        opened: called when the device is open.

    Warns:
        AudioGapWarning: PortAudio reported an overflow.

    Raises:
        MissingPackageError: `sounddevice`, or the PortAudio library that it needs, is not installed.
        AudioError: there is no such microphone, it cannot be opened, or it was disconnected.
    """
    sounddevice = _sounddevice()
    with _as_audio_error(sounddevice, device):
        rate = _rate(sounddevice, device)
    return _pieces(sounddevice, device, rate, opened)


def _pieces(
    sounddevice: Any, device: str | int | None, rate: int, opened: Callable[[], None]
) -> Iterator[NDArray[np.float32]]:
    with _as_audio_error(sounddevice, device):
        yield from from_raw(_chunks(sounddevice, device, rate, opened), rate)


@contextmanager
def _as_audio_error(sounddevice: Any, device: str | int | None) -> Iterator[None]:
    """Raise PortAudio's errors as AudioError."""
    try:
        yield
    except (sounddevice.PortAudioError, ValueError) as error:  # ValueError: no device of that name
        named = "cannot use a microphone" if device is None else f"cannot use microphone `{device}`"
        raise AudioError(
            named,
            why=str(error),
            hint=f"connect a microphone, or choose one with `--microphone`; `{_LIST}` lists them",
        ) from error


def _sounddevice() -> Any:
    """Import `sounddevice`.

    Raises:
        MissingPackageError: it, or the PortAudio library, is not installed.
    """
    try:
        with needs("cannot use a microphone: `sounddevice` is not installed", extra="live"):
            import sounddevice
    except OSError as error:  # the package is installed, the library is not
        raise MissingPackageError(
            "cannot use a microphone: the PortAudio library is not installed",
            why=str(error),
            hint="install it, e.g. `apt install libportaudio2`",
        ) from error
    except MissingPackageError:
        raise
    except Exception as error:  # its code, or that of cffi, which it uses, is damaged
        raise MissingPackageError(
            "cannot use a microphone: `sounddevice` cannot be imported",
            why=f"{type(error).__name__}: {error}",
            hint="install it again: `pip install --force-reinstall sounddevice cffi`",
        ) from error
    return sounddevice


def _rate(sounddevice: Any, device: str | int | None) -> int:
    """Return a sample rate of the device in Hz: 16,000 if it supports that, or else its default."""
    try:
        sounddevice.check_input_settings(
            device=device, channels=1, dtype="int16", samplerate=SAMPLE_RATE
        )
    except sounddevice.PortAudioError:
        preferred: float = sounddevice.query_devices(device, "input")["default_samplerate"]
        return round(preferred)
    return SAMPLE_RATE


def _chunks(
    sounddevice: Any, device: str | int | None, rate: int, opened: Callable[[], None]
) -> Iterator[bytes]:
    """Yield signed 16-bit samples as bytes, as they arrive."""
    arrived: SimpleQueue[bytes | None] = SimpleQueue()  # None: the stream ended

    def callback(data: Any, _frames: int, _time: Any, status: Any) -> None:
        if status.input_overflow:
            warnings.warn("some audio from the microphone was lost", AudioGapWarning, stacklevel=2)
        arrived.put(bytes(data))

    with sounddevice.RawInputStream(
        samplerate=rate,
        blocksize=round(PIECE_S * rate),
        device=device,
        channels=1,
        dtype="int16",
        callback=callback,
        finished_callback=lambda: arrived.put(None),
    ):
        opened()
        with suppress(Empty):
            while (chunk := arrived.get(timeout=SILENT_S)) is not None:
                yield chunk
    raise AudioError("the microphone stopped", hint="connect it again, and restart the command")
