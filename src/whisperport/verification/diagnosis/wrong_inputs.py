"""Wrong inputs of an encoder: usual mistakes with the samples of a window or with their spectrogram."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from whisperport.program.dims import Dims
from whisperport.speech.audio import HOP_LENGTH, log_mel
from whisperport.speech.audio.mel import DYNAMIC_RANGE, N_FFT, mel_log_power, to_whisper_scale
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.verification.diagnosis.causes import CauseCode

Floats = NDArray[np.float32]
Spectrogram = Callable[[Floats, Dims], Floats | None]
"""(audio, sizes of the model) -> (n_mels, 2T); None if the audio has no such window."""

OTHER_BINS = {80: 128, 128: 80}  # numbers of mel bins that Whisper models have
OTHER_HOPS = (128, 200, 256, 320)  # samples: 8, 12.5, 16 and 20 ms are usual in other front ends
LATER_WINDOWS = 8  # windows are tried that begin at so many multiples of half a second
WHOLE_WINDOWS = 3  # and at so many multiples of a window
EARLIER_S = (0.5, 1.0, 2.0)  # and windows that begin so many seconds before the audio

_C = CauseCode
_FRONT_END = (
    "Compute the spectrogram with `whisperport.speech.audio.log_mel`, "
    "and compare the device's input file."
)
_FEED = "Check that the input file was copied to the device and given to the first input."
_CUT = "Cut the same window of the audio as the bundle's reference."


@dataclass(frozen=True, slots=True, eq=False)
class InputMistake:
    """One usual mistake with an encoder's input.

    Attributes:
        cause: the cause.
        sentence: the mistake with its parameters.
        spectrogram: makes the wrong input of a clip, of 16 kHz.
        advice: what to change.
    """

    cause: CauseCode
    sentence: str
    spectrogram: Spectrogram
    advice: str = _FRONT_END


def input_mistakes(dims: Dims) -> Iterator[InputMistake]:
    """Yield every mistake with the input of a model."""
    yield InputMistake(
        _C.MEL_NOT_NORMALIZED,
        "The spectrogram is max(log10, maximum - 8), without the last step (x + 4) / 4.",
        _not_normalized,
    )
    yield InputMistake(
        _C.MEL_NOT_CLAMPED,
        "The spectrogram is (log10 + 4) / 4, without the floor at 8 below its maximum.",
        _not_clamped,
    )
    yield InputMistake(
        _C.NATURAL_LOG,
        "The spectrogram has the natural logarithm, not log10.",
        _natural_log,
    )
    yield InputMistake(
        _C.AUDIO_NOT_SCALED,
        "The samples were 16-bit integers, not divided by 32768.",
        _not_scaled,
    )
    if dims.n_mels in OTHER_BINS:
        yield _other_bins(dims)
    yield from _other_frames()
    yield InputMistake(
        _C.MEL_TRANSPOSED,
        f"The spectrogram is stored as ({dims.n_frames}, {dims.n_mels}), not as ({dims.n_mels}, "
        f"{dims.n_frames}).",
        _transposed,
        "Write the spectrogram as (bins, frames), or transpose it before the program.",
    )
    yield InputMistake(
        _C.SILENT_INPUT, "The input was the spectrogram of silence.", _silence, _FEED
    )
    yield InputMistake(_C.SILENT_INPUT, "All values of the input were 0.", _zeros, _FEED)
    yield from _other_windows(dims)


def _other_windows(dims: Dims) -> Iterator[InputMistake]:
    """Yield windows that begin later than the audio, and windows in which silence precedes it.

    The later ones begin every half second, for the first seconds of the audio, and at every whole window.
    Silence fills the window up to its end, or half of that on either side, or lasts a usual time.
    """
    window = dims.n_frames * HOP_LENGTH
    starts = {SAMPLE_RATE // 2 * i for i in range(1, LATER_WINDOWS + 1)}
    starts |= {window * i for i in range(1, WHOLE_WINDOWS + 1)}
    for start in sorted(starts):
        yield _window(
            f"The window begins {start / SAMPLE_RATE:g} s after the start of the audio.",
            partial(_later, start),
        )
    for seconds in EARLIER_S:
        yield _window(
            f"The audio begins {seconds:g} s after the start of the window; silence precedes it.",
            partial(_delayed, round(seconds * SAMPLE_RATE)),
        )
    yield _window("The audio ends with the window; silence precedes it.", partial(_aligned, 1))
    yield _window("The audio is in the middle of the window.", partial(_aligned, 2))


def _window(sentence: str, spectrogram: Spectrogram) -> InputMistake:
    return InputMistake(_C.OTHER_WINDOW, sentence, spectrogram, _CUT)


def _log_mel(samples: Floats, dims: Dims) -> Floats:
    return log_mel(samples, dims.n_mels, n_frames=dims.n_frames)


def _later(start: int, audio: Floats, dims: Dims) -> Floats | None:
    return _log_mel(audio[start:], dims) if start < audio.size - N_FFT else None


def _delayed(delay: int, audio: Floats, dims: Dims) -> Floats | None:
    if not 0 < delay < dims.n_frames * HOP_LENGTH - N_FFT:
        return None
    return _log_mel(np.concatenate([np.zeros(delay, np.float32), audio]), dims)


def _aligned(parts: int, audio: Floats, dims: Dims) -> Floats | None:
    """Let silence precede the audio that lasts one of `parts` equal parts of the window's rest."""
    return _delayed((dims.n_frames * HOP_LENGTH - audio.size) // parts, audio, dims)


def _silence(audio: Floats, dims: Dims) -> Floats:
    return _log_mel(np.zeros(dims.n_frames * HOP_LENGTH, np.float32), dims)


def _not_normalized(samples: Floats, dims: Dims) -> Floats:
    power = _log_power(samples, dims)
    clamped: Floats = np.maximum(power, np.float32(power.max() - DYNAMIC_RANGE))
    return clamped


def _not_clamped(samples: Floats, dims: Dims) -> Floats:
    scaled: Floats = (_log_power(samples, dims) + np.float32(4)) / np.float32(4)
    return scaled


def _natural_log(samples: Floats, dims: Dims) -> Floats:
    natural = _log_power(samples, dims) * np.float32(np.log(10))
    natural = np.maximum(natural, np.float32(natural.max() - DYNAMIC_RANGE)).astype(np.float32)
    scaled: Floats = (natural + np.float32(4)) / np.float32(4)
    return scaled


def _not_scaled(samples: Floats, dims: Dims) -> Floats:
    return _log_mel(samples * np.float32(32768), dims)


def _transposed(samples: Floats, dims: Dims) -> Floats:
    right = _log_mel(samples, dims)
    return np.ascontiguousarray(right.T).reshape(right.shape)


def _zeros(samples: Floats, dims: Dims) -> Floats:
    return np.zeros((dims.n_mels, dims.n_frames), np.float32)


def _other_bins(dims: Dims) -> InputMistake:
    n_bins = OTHER_BINS[dims.n_mels]
    count = min(n_bins, dims.n_mels)
    rest = "" if n_bins >= dims.n_mels else ", followed by zeros"
    return InputMistake(
        _C.WRONG_MEL_BINS,
        f"The spectrogram has {n_bins} mel bins, not {dims.n_mels}; the input holds its first {count} "
        f"bins{rest}.",
        partial(_first_bins, n_bins),
    )


def _first_bins(bins: int, samples: Floats, dims: Dims) -> Floats:
    mel = log_mel(samples, bins, n_frames=dims.n_frames)
    used = np.zeros((dims.n_mels, dims.n_frames), np.float32)
    count = min(bins, dims.n_mels)
    used[:count] = mel[:count]
    return used


def _other_frames() -> Iterator[InputMistake]:
    """Yield spectrograms with another hop length, and the one without padding at the ends of the audio."""
    for hop in OTHER_HOPS:
        yield InputMistake(
            _C.WRONG_MEL_FRAMES,
            f"The frames of the spectrogram begin every {hop} samples, not every {HOP_LENGTH}.",
            partial(_other_hop, hop),
        )
    yield InputMistake(
        _C.WRONG_MEL_FRAMES,
        "The frames of the spectrogram are not centred: the audio was not padded with 200 reflected "
        "samples at its ends.",
        _not_centred,
    )


def _other_hop(hop: int, samples: Floats, dims: Dims) -> Floats:
    return _framed(np.pad(_padded(samples, dims), N_FFT // 2, mode="reflect"), hop, dims)


def _not_centred(samples: Floats, dims: Dims) -> Floats:
    return _framed(_padded(samples, dims), HOP_LENGTH, dims)


def _framed(samples: Floats, hop: int, dims: Dims) -> Floats:
    """Return a spectrogram with a frame every `hop` samples, cut or padded with zeros to 2T frames."""
    power = mel_log_power(samples, dims.n_mels, hop)
    scaled = to_whisper_scale(power, float(power.max()))[:, : dims.n_frames]
    return np.pad(scaled, ((0, 0), (0, dims.n_frames - scaled.shape[1])))


def _padded(samples: Floats, dims: Dims) -> Floats:
    """Return the samples of one window, cut or padded with zeros."""
    window = dims.n_frames * HOP_LENGTH
    cut = samples[:window].astype(np.float32)
    return np.pad(cut, (0, window - cut.size))


def _log_power(samples: Floats, dims: Dims) -> Floats:
    padded = np.pad(_padded(samples, dims), N_FFT // 2, mode="reflect")
    return mel_log_power(padded[: dims.n_frames * HOP_LENGTH + N_FFT - 1], dims.n_mels)
