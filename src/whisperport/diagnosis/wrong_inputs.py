"""Wrong inputs of an encoder: spectrograms that differ from the right one by one usual mistake."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import HOP_LENGTH, log_mel
from whisperport.audio.mel import DYNAMIC_RANGE, N_FFT, mel_log_power, to_whisper_scale
from whisperport.audio.pcm import SAMPLE_RATE
from whisperport.diagnosis.causes import CauseCode
from whisperport.dims import Dims

Floats = NDArray[np.float32]

OTHER_BINS = {80: 128, 128: 80}  # numbers of mel bins that Whisper models have
OTHER_HOPS = (128, 200, 256, 320)  # samples: 8, 12.5, 16 and 20 ms are usual in other front ends
LATER_WINDOWS = 8  # windows are tried that begin at so many multiples of half a second
EARLIER_S = (0.5, 1.0, 2.0)  # and windows that begin so many seconds before the audio

_C = CauseCode
_FRONT_END = (
    "Compute the spectrogram with `whisperport.audio.log_mel`, and compare the device's input file."
)


@dataclass(frozen=True, slots=True, eq=False)
class WrongInput:
    """A wrong spectrogram.

    Attributes:
        cause: the mistake.
        sentence: the mistake with its parameters.
        mel: (n_mels, 2T) float32.
        advice: what to change.
    """

    cause: CauseCode
    sentence: str
    mel: Floats
    advice: str = _FRONT_END


def wrong_inputs(audio: Floats, dims: Dims) -> Iterator[WrongInput]:
    """Yield spectrograms of a clip with one mistake each.

    Args:
        audio: (n_samples,) float32, 16 kHz; the clip.
        dims: sizes of the model.
    """
    n_mels, n_frames = dims.n_mels, dims.n_frames
    right = log_mel(audio, n_mels, n_frames=n_frames)
    power = _log_power(audio, dims)
    peak = float(power.max())
    clamped: Floats = np.maximum(power, np.float32(peak - DYNAMIC_RANGE)).astype(np.float32)
    yield WrongInput(
        _C.MEL_NOT_NORMALIZED,
        "The spectrogram is max(log10, maximum - 8), without the last step (x + 4) / 4.",
        clamped,
    )
    yield WrongInput(
        _C.MEL_NOT_CLAMPED,
        "The spectrogram is (log10 + 4) / 4, without the floor at 8 below its maximum.",
        (power + np.float32(4)) / np.float32(4),
    )
    natural = power * np.float32(np.log(10))
    natural = np.maximum(natural, np.float32(natural.max() - DYNAMIC_RANGE)).astype(np.float32)
    yield WrongInput(
        _C.NATURAL_LOG,
        "The spectrogram has the natural logarithm, not log10.",
        (natural + np.float32(4)) / np.float32(4),
    )
    yield WrongInput(
        _C.AUDIO_NOT_SCALED,
        "The samples were 16-bit integers, not divided by 32768.",
        log_mel(audio * np.float32(32768), n_mels, n_frames=n_frames),
    )
    if n_mels in OTHER_BINS:
        yield _other_bins(audio, dims)
    yield from _other_frames(audio, dims)
    yield WrongInput(
        _C.MEL_TRANSPOSED,
        f"The spectrogram is stored as ({n_frames}, {n_mels}), not as ({n_mels}, {n_frames}).",
        np.ascontiguousarray(right.T).reshape(right.shape),
        "Write the spectrogram as (bins, frames), or transpose it before the program.",
    )
    silence = log_mel(np.zeros(1, np.float32), n_mels, n_frames=n_frames)
    feed = "Check that the input file was copied to the device and given to the first input."
    yield WrongInput(_C.SILENT_INPUT, "The input was the spectrogram of silence.", silence, feed)
    zeros = np.zeros_like(right)
    yield WrongInput(_C.SILENT_INPUT, "All values of the input were 0.", zeros, feed)
    yield from _other_windows(audio, dims)


def shifted_window(audio: Floats, dims: Dims, samples: int) -> WrongInput:
    """Return the spectrogram of a window that begins earlier, in silence, or later in the audio.

    Args:
        audio: (n_samples,) float32, the clip.
        dims: sizes of the model.
        samples: number of samples by which the audio is later in the window; negative: the window begins
            so much later than the audio.
    """
    seconds = abs(samples) / SAMPLE_RATE
    if samples >= 0:
        moved = np.concatenate([np.zeros(samples, np.float32), audio])
        sentence = (
            f"The audio begins {seconds:g} s after the start of the window; silence precedes it."
        )
    else:
        moved = audio[-samples:]
        sentence = f"The window begins {seconds:g} s after the start of the audio."
    mel = log_mel(moved, dims.n_mels, n_frames=dims.n_frames)
    return WrongInput(
        _C.OTHER_WINDOW,
        sentence,
        mel,
        "Cut the same window of the audio as the bundle's reference.",
    )


def _window(audio: Floats, dims: Dims) -> Floats:
    """Return the samples of one window, padded with zeros."""
    samples = audio[: dims.n_frames * HOP_LENGTH].astype(np.float32)
    return np.pad(samples, (0, dims.n_frames * HOP_LENGTH - samples.size))


def _log_power(audio: Floats, dims: Dims) -> Floats:
    padded = np.pad(_window(audio, dims), N_FFT // 2, mode="reflect")
    return mel_log_power(padded[: dims.n_frames * HOP_LENGTH + N_FFT - 1], dims.n_mels)


def _other_bins(audio: Floats, dims: Dims) -> WrongInput:
    other = OTHER_BINS[dims.n_mels]
    mel = log_mel(audio, other, n_frames=dims.n_frames)
    used = np.zeros((dims.n_mels, dims.n_frames), np.float32)
    count = min(other, dims.n_mels)
    used[:count] = mel[:count]
    rest = "" if other >= dims.n_mels else ", followed by zeros"
    return WrongInput(
        _C.WRONG_MEL_BINS,
        f"The spectrogram has {other} mel bins, not {dims.n_mels}; the input holds its first {count} "
        f"bins{rest}.",
        used,
    )


def _other_frames(audio: Floats, dims: Dims) -> Iterator[WrongInput]:
    """Yield spectrograms with another hop length, and the one without padding at the ends of the audio."""
    window = _window(audio, dims)
    for hop in OTHER_HOPS:
        yield WrongInput(
            _C.WRONG_MEL_FRAMES,
            f"The frames of the spectrogram begin every {hop} samples, not every {HOP_LENGTH}.",
            _framed(np.pad(window, N_FFT // 2, mode="reflect"), hop, dims),
        )
    yield WrongInput(
        _C.WRONG_MEL_FRAMES,
        "The frames of the spectrogram are not centred: the audio was not padded with 200 reflected "
        "samples at its ends.",
        _framed(window, HOP_LENGTH, dims),
    )


def _framed(samples: Floats, hop: int, dims: Dims) -> Floats:
    """Return a spectrogram with a frame every `hop` samples, cut or padded with zeros to 2T frames."""
    power = mel_log_power(samples, dims.n_mels, hop)[:, : dims.n_frames]
    mel = np.zeros((dims.n_mels, dims.n_frames), np.float32)
    mel[:, : power.shape[1]] = to_whisper_scale(power, float(power.max()))
    return mel


def _other_windows(audio: Floats, dims: Dims) -> Iterator[WrongInput]:
    """Yield windows that begin later than the audio, and windows in which silence precedes it.

    The later ones begin every half second, for the first seconds of the audio, and at every whole window.
    Silence fills the window up to its end, or half of that on either side, or lasts a usual time.
    """
    window = dims.n_frames * HOP_LENGTH
    half_second = SAMPLE_RATE // 2
    starts = {half_second * i for i in range(1, LATER_WINDOWS + 1)}
    starts |= {window * i for i in range(1, 4)}
    for start in sorted(starts):
        if start < audio.size - N_FFT:
            yield shifted_window(audio, dims, -start)
    rest = window - audio.size
    delays = {round(s * SAMPLE_RATE) for s in EARLIER_S} | {rest, rest // 2}
    for delay in sorted(delays):
        if 0 < delay < window - N_FFT:
            yield shifted_window(audio, dims, delay)
