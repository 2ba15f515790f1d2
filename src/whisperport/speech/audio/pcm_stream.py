"""Convert headerless samples of any rate to 16 kHz while they arrive, exactly as those of a file."""

from collections.abc import Iterable

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.speech.audio.downmix import Downmix
from whisperport.speech.audio.pcm import check_rate

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
