"""Sounds made on the spot: a rising tone, encoded through PyAV."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

# Suffix -> encoder and the sample format it takes.
CODECS = {
    "wav": ("pcm_s16le", "s16"),
    "flac": ("flac", "s16"),
    "mp3": ("libmp3lame", "fltp"),
    "ogg": ("libopus", "flt"),
    "m4a": ("aac", "fltp"),
}

WriteAudio = Callable[..., Path]


def tone(rate: int, seconds: float = 2.0) -> NDArray[np.float32]:
    """(rate * seconds,) float32: 200 Hz rising to about 1 kHz, so that any shift in time shows."""
    t = np.arange(round(rate * seconds)) / rate
    return (0.4 * np.sin(2 * np.pi * (200 + 200 * t) * t)).astype(np.float32)


@pytest.fixture(scope="session")
def write_audio(tmp_path_factory: pytest.TempPathFactory) -> WriteAudio:
    """Write (channels, n) or (n,) samples as `suffix`; returns the path."""
    folder = tmp_path_factory.mktemp("sounds")

    def write(
        samples: NDArray[np.float32], rate: int, suffix: str = "wav", *, codec: str = ""
    ) -> Path:
        default_codec, sample_format = CODECS[suffix]
        if codec == "pcm_f32le":
            sample_format = "flt"
        channels = np.atleast_2d(samples)
        layout = {1: "mono", 2: "stereo", 6: "5.1"}[channels.shape[0]]
        path = folder / f"{len(list(folder.iterdir()))}.{suffix}"
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec or default_codec, rate=rate, layout=layout)
            for start in range(0, channels.shape[1], rate):
                block = np.ascontiguousarray(channels[:, start : start + rate], np.float32)
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
                frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
                converter = av.AudioResampler(
                    format=sample_format,
                    layout=layout,
                    rate=stream.rate,
                )
                for converted in [*converter.resample(frame), *converter.resample(None)]:
                    if converted is not None:
                        container.mux(stream.encode(converted))
            container.mux(stream.encode(None))
        return path

    return write
