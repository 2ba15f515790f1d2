"""Load audio as one array, as blocks, or as windows; the suffixes by which it is found in a folder."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.speech.audio.stream import AudioSource, AudioStream

# FFmpeg reads more formats; a file of any other suffix is transcribed if it is named.
AUDIO_SUFFIXES = frozenset(
    (
        *(".3gp", ".aac", ".ac3", ".aif", ".aiff", ".amr", ".au", ".avi", ".caf", ".flac", ".flv"),
        *(".m4a", ".m4b", ".m4v", ".mka", ".mkv", ".mov", ".mp2", ".mp3", ".mp4", ".mpeg", ".mpg"),
        *(".oga", ".ogg", ".opus", ".ts", ".w64", ".wav", ".webm", ".wma", ".wmv"),
    )
)


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """Samples of one window, and its position."""

    start_s: float  # seconds from the beginning of the audio
    samples: NDArray[np.float32]  # (n_samples,) within [-1, 1]; the last window may be shorter


def load_audio(source: AudioSource, *, sample_rate: int | None = None) -> NDArray[np.float32]:
    """Load all audio of a source, 3.8 MB per minute. For long audio files use `AudioStream`.

    Args:
        source: a path to any file FFmpeg reads, "-" for standard input, a binary file object,
            or an array of mono samples (floats within [-1, 1], int16, int32).
        sample_rate: sample rate of an array in Hz; None: 16 kHz. Must be None for files, which state it.

    Returns:
        (n_samples,) float32, mono, 16 kHz, within [-1, 1].

    Raises:
        AudioError: the source is missing, cannot be read, has no audio, is shorter than 10 ms, or has
            samples that are not finite numbers.
    """
    return np.concatenate(list(iter_audio(source, sample_rate=sample_rate)))


def iter_audio(
    source: AudioSource, *, block_s: float = 10.0, sample_rate: int | None = None
) -> Iterator[NDArray[np.float32]]:
    """Yield the samples in blocks of `block_s` seconds; the last may be shorter. See `load_audio`."""
    for window in audio_windows(source, block_s, sample_rate=sample_rate):
        yield window.samples


def audio_windows(
    source: AudioSource,
    window_s: float,
    *,
    step_s: float | None = None,
    sample_rate: int | None = None,
) -> Iterator[AudioWindow]:
    """Yield windows until the audio ends, with one window in memory.

    No window is empty. If `step_s` is below `window_s`, no window is completely inside the one before.

    Args:
        source: see `load_audio`.
        window_s: duration of a window in seconds.
        step_s: time from the start of a window to the next, in seconds; None: `window_s`.
        sample_rate: see `load_audio`.

    Raises:
        AudioError: see `load_audio`.
        ValueError: a window or a step is shorter than one sample.
    """
    window = round(window_s * SAMPLE_RATE)
    step = window if step_s is None else round(step_s * SAMPLE_RATE)
    if window < 1 or step < 1:
        raise ValueError(f"window {window_s} s, step {step_s} s; expected at least one sample each")
    with AudioStream(source, sample_rate=sample_rate, look_back_s=0.0) as stream:
        start, seen = 0, 0  # samples: start of this window, and end of the last one
        while (samples := stream.read(start, window)).size and start + samples.size > seen:
            yield AudioWindow(start / SAMPLE_RATE, samples)
            seen = start + samples.size
            start += step
