"""A sound as one array, as blocks, or as windows."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.pcm import SAMPLE_RATE
from whisperport.audio.stream import AudioSource, AudioStream


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """A stretch of sound and where it begins."""

    start_s: float  # seconds from the beginning of the sound
    samples: NDArray[np.float32]  # (n_samples,) within [-1, 1]; the last may be shorter


def load_audio(source: AudioSource, *, sample_rate: int | None = None) -> NDArray[np.float32]:
    """The whole sound: 3.8 MB a minute. For long recordings see `AudioStream`.

    Args:
        source: a path to any file FFmpeg reads, "-" for standard input, a binary file object,
            or an array of mono samples (floats within [-1, 1], int16, int32).
        sample_rate: of an array, in Hz; None: 16 kHz. Files state their own.

    Returns:
        (n_samples,) float32, mono, 16 kHz, within [-1, 1].

    Raises:
        AudioError: missing, unreadable, no sound, shorter than 10 ms, or not numbers.
    """
    return np.concatenate(list(iter_audio(source, sample_rate=sample_rate)))


def iter_audio(
    source: AudioSource, *, block_s: float = 10.0, sample_rate: int | None = None
) -> Iterator[NDArray[np.float32]]:
    """The sound in order, in blocks of `block_s` seconds, the last shorter; see `load_audio`."""
    for window in audio_windows(source, block_s, sample_rate=sample_rate):
        yield window.samples


def audio_windows(
    source: AudioSource,
    window_s: float,
    *,
    step_s: float | None = None,
    sample_rate: int | None = None,
) -> Iterator[AudioWindow]:
    """Windows of `window_s` seconds, one every `step_s` (None: side by side), until the sound ends.

    No window is empty, and with `step_s` below `window_s` none lies wholly inside the one before.
    Memory is bounded by one window. Sources and errors are those of `load_audio`.

    Raises ValueError when a window or a step is shorter than one sample.
    """
    window = round(window_s * SAMPLE_RATE)
    step = window if step_s is None else round(step_s * SAMPLE_RATE)
    if window < 1 or step < 1:
        raise ValueError(f"window {window_s} s, step {step_s} s; expected at least one sample each")
    with AudioStream(source, sample_rate=sample_rate, look_back_s=0.0) as stream:
        start, seen = 0, 0  # samples: of this window, and handed out so far
        while (samples := stream.read(start, window)).size and start + samples.size > seen:
            yield AudioWindow(start / SAMPLE_RATE, samples)
            seen = start + samples.size
            start += step
