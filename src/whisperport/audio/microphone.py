"""A microphone, through PortAudio (`sounddevice`, extra `live`)."""

import warnings
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.pcm import SAMPLE_RATE
from whisperport.audio.raw import from_raw
from whisperport.errors import AudioError, MissingPackageError

PIECE_S = 0.1
_LIST = "python -m sounddevice"  # lists every device


class AudioGapWarning(UserWarning):
    """The computer was too busy to take what the microphone gave."""


def microphone_audio(device: str | int | None = None) -> Iterator[NDArray[np.float32]]:
    """Pieces (n,) float32 of what is said, mono at 16 kHz, without end.

    Args:
        device: a number, or part of a name, of `python -m sounddevice`; None: the system's default.

    Warns:
        AudioGapWarning: PortAudio reported an overflow.

    Raises:
        MissingPackageError: `sounddevice`, or the PortAudio library that it needs, is not installed.
        AudioError: there is no such microphone, or it cannot be opened; or it was pulled out.
    """
    sounddevice = _sounddevice()
    try:
        rate = _rate(sounddevice, device)
        yield from from_raw(_chunks(sounddevice, device, rate), rate)
    except (sounddevice.PortAudioError, ValueError) as error:  # ValueError: no device of that name
        named = (
            "no microphone can be used" if device is None else f"cannot use microphone `{device}`"
        )
        raise AudioError(
            named,
            why=str(error),
            hint=f"plug one in, or choose one with `--microphone`; `{_LIST}` lists them",
        ) from error


def _sounddevice() -> Any:
    try:
        import sounddevice
    except ImportError as error:
        raise MissingPackageError(
            "cannot use a microphone: `sounddevice` is not installed",
            why=str(error),
            hint='pip install "whisperport[live]"',
        ) from error
    except OSError as error:  # the package is there, the library below it is not
        raise MissingPackageError(
            "cannot use a microphone: the PortAudio library is not installed",
            why=str(error),
            hint="install it, e.g. `apt install libportaudio2`",
        ) from error
    return sounddevice


def _rate(sounddevice: Any, device: str | int | None) -> int:
    """16 kHz where the device can, else what it prefers."""
    try:
        sounddevice.check_input_settings(
            device=device, channels=1, dtype="int16", samplerate=SAMPLE_RATE
        )
    except sounddevice.PortAudioError:
        preferred: float = sounddevice.query_devices(device, "input")["default_samplerate"]
        return round(preferred)
    return SAMPLE_RATE


def _chunks(sounddevice: Any, device: str | int | None, rate: int) -> Iterator[bytes]:
    come: SimpleQueue[bytes | None] = SimpleQueue()  # None: the stream ended

    def take(data: Any, _frames: int, _time: Any, status: Any) -> None:
        if status.input_overflow:
            warnings.warn("the microphone's sound has a gap", AudioGapWarning, stacklevel=2)
        come.put(bytes(data))

    with sounddevice.RawInputStream(
        samplerate=rate,
        blocksize=round(PIECE_S * rate),
        device=device,
        channels=1,
        dtype="int16",
        callback=take,
        finished_callback=lambda: come.put(None),
    ):
        while (chunk := come.get()) is not None:
            yield chunk
    raise AudioError("the microphone stopped", hint="plug it in again, and start anew")
