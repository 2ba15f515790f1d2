"""Convert headerless samples of any rate to 16 kHz while they arrive.

`PcmStream` returns exactly the samples that a file would have; `from_raw` is for microphones and pipes.
"""

from collections.abc import Iterable, Iterator

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.speech.audio.downmix import Downmix
from whisperport.speech.audio.pcm import SAMPLE_RATE, check_rate

MAX_CHANNELS = 8
BLOCK = 16_384  # samples of each channel in one call: the resampler keeps 25 times the bytes of its largest
# FFmpeg's name of each form of samples, and its bytes per sample. 8-bit ones are unsigned, as in wav.
BYTES = {
    "pcm_u8": 1,
    "pcm_s16le": 2,
    "pcm_s24le": 3,
    "pcm_s32le": 4,
    "pcm_mulaw": 1,
    "pcm_alaw": 1,
}
PCM_OF_BYTES = {1: "pcm_u8", 2: "pcm_s16le", 3: "pcm_s24le", 4: "pcm_s32le"}


class PcmStream:
    """Converts the bytes of one stream; pieces may end anywhere, also within a sample.

    The samples equal those that `AudioDecoder` reads from a wav file with the same bytes.

    Args:
        codec: form of the samples, a key of `BYTES`.
        rate: sample rate in Hz.
        channels: number of interleaved channels.

    Raises:
        AudioError: the rate is not 1,000 to 768,000 Hz, or there are not 1 to 8 channels.
    """

    def __init__(self, codec: str, rate: int, channels: int = 1) -> None:
        check_rate(rate, "the audio")
        if not 1 <= channels <= MAX_CHANNELS:
            raise AudioError(
                f"the audio states {channels} channels", why=f"expected 1 to {MAX_CHANNELS}"
            )
        decoder = av.CodecContext.create(codec, "r")
        assert isinstance(decoder, AudioCodecContext), "the name is one of samples"
        decoder.sample_rate = rate
        decoder.layout = {1: "mono", 2: "stereo"}.get(channels, f"{channels} channels")
        self._decoder = decoder
        self._downmix, self._frame_bytes = Downmix(), BYTES[codec] * channels
        self._rest = b""
        self.bytes_per_s = rate * self._frame_bytes

    def push(self, data: bytes) -> NDArray[np.int16]:
        """Convert bytes that arrived, and return the samples (n,) at 16 kHz that are ready."""
        data = self._rest + data
        complete = len(data) // self._frame_bytes * self._frame_bytes
        self._rest = data[complete:]
        size = BLOCK * self._frame_bytes
        pieces = (data[at : min(at + size, complete)] for at in range(0, complete, size))
        return self._converted(
            f for piece in pieces for f in self._decoder.decode(av.Packet(piece))
        )

    def end(self) -> NDArray[np.int16]:
        """Return the remaining samples at the end of the stream. An incomplete sample is dropped."""
        return self._converted([None])

    def _converted(self, frames: Iterable[AudioFrame | None]) -> NDArray[np.int16]:
        parts = [part for frame in frames for part in self._downmix.push(frame)]
        return np.concatenate(parts) if parts else np.empty(0, np.int16)


def from_raw(chunks: Iterable[bytes], sample_rate: int) -> Iterator[NDArray[np.float32]]:
    """Convert signed 16-bit little-endian mono samples to float32 at 16 kHz.

    Args:
        chunks: bytes, of any length. A chunk may end within a sample; half a sample at the end is dropped.
        sample_rate: of the chunks, in Hz.

    Returns:
        Pieces (n,) float32 within [-1, 1], each as soon as its chunk has arrived.

    Raises:
        AudioError: the rate is not 1,000 to 768,000 Hz.
    """
    samples = _samples(chunks)
    return samples if sample_rate == SAMPLE_RATE else _resampled(samples, sample_rate)


def _samples(chunks: Iterable[bytes]) -> Iterator[NDArray[np.float32]]:
    """Yield float32 samples at the rate of the chunks."""
    half = b""
    for chunk in chunks:
        data = half + chunk
        whole = len(data) // 2 * 2
        half = data[whole:]
        if whole:
            yield np.frombuffer(data[:whole], "<i2").astype(np.float32) / np.float32(32768.0)


def _resampled(
    pieces: Iterator[NDArray[np.float32]], sample_rate: int
) -> Iterator[NDArray[np.float32]]:
    """Resample pieces to 16 kHz."""
    check_rate(sample_rate, "the raw audio")
    resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    for piece in pieces:
        frame = AudioFrame.from_ndarray(piece[None], format="flt", layout="mono")
        frame.sample_rate = sample_rate
        yield from _out(resampler, frame)
    yield from _out(resampler, None)


def _out(resampler: AudioResampler, frame: AudioFrame | None) -> Iterator[NDArray[np.float32]]:
    """Resample one frame, or for None return the remaining samples."""
    for out in resampler.resample(frame):
        samples: NDArray[np.float32] = out.to_ndarray()[0]
        yield np.clip(samples, -1.0, 1.0)  # the resampling filter may overshoot
