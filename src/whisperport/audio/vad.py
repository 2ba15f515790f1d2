"""Where somebody speaks: Silero's voice activity detector over a sound of any length.

    samples ──► probability of speech, every 32 ms ──► spans of speech

The network is Silero VAD 6.2.3 (MIT), its form that takes many frames at once: one call for 4 s, its
state handed from call to call. It runs in ONNX Runtime, which the core needs anyway.
Source: snakers4/silero-vad, src/silero_vad/sequence_vad.py and utils_vad.py.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.mel import HOP_LENGTH
from whisperport.audio.pcm import SAMPLE_RATE
from whisperport.audio.stream import AudioStream
from whisperport.errors import MissingPackageError, UsageError

HOP = 512  # samples from one probability to the next
CONTEXT = 64  # samples before them that the network sees too
BLOCK = 128  # probabilities of one call
STATE = (1, 1, 128)  # of the network's LSTM
RELEASE = 0.15  # speech ends this far below the threshold at which it begins; Silero's


@dataclass(frozen=True, slots=True, kw_only=True)
class VadOptions:
    """What counts as speech, and how it is put into chunks.

    Raises:
        UsageError: a value out of its range.
    """

    threshold: float = 0.5  # probability from which it is speech
    min_speech_s: float = 0.1  # shorter bursts are none
    min_silence_s: float = 0.3  # shorter pauses are part of it
    pad_s: float = 0.3  # silence kept around a chunk where there is as much
    max_silence_s: float = (
        2.0  # a longer silence ends a chunk, whatever room there is in its window
    )

    def __post_init__(self) -> None:
        if not RELEASE < self.threshold < 1:
            raise UsageError(
                f"`threshold` is {self.threshold}", why=f"expected more than {RELEASE}, below 1"
            )
        for name in ("min_speech_s", "min_silence_s", "pad_s", "max_silence_s"):
            if not 0 <= getattr(self, name) <= 10:
                raise UsageError(f"`{name}` is {getattr(self, name)}", why="expected 0 to 10 s")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a sound, in mel frames of 10 ms: `start` up to and without `end`."""

    start: int
    end: int

    @property
    def n_frames(self) -> int:
        return self.end - self.start


def speech_spans(stream: AudioStream, options: VadOptions) -> Iterator[Span]:
    """Where somebody speaks, in rising order; the sound is read as the spans are asked for.

    Raises:
        AudioError: the sound proves damaged, or shorter than one mel frame.
        MissingPackageError: ONNX Runtime is not installed, or not for this Python.
    """
    for span in spans_above(speech_probabilities(stream), options):
        end = min(span.end, -(-stream.n_decoded // HOP_LENGTH))  # the last frame may be half empty
        yield Span(span.start, end)


def speech_probabilities(stream: AudioStream) -> Iterator[float]:
    """Probability of speech in every `HOP` samples; the last ones are followed by silence."""
    session = _session()
    context, hidden, cell = (
        np.zeros(CONTEXT, np.float32),
        np.zeros(STATE, "f4"),
        np.zeros(STATE, "f4"),
    )
    position = 0
    while (samples := stream.read(position, BLOCK * HOP)).size:
        position += samples.size
        heard = _frames(np.concatenate([context, samples]))
        found, hidden, cell = session.run(None, {"input": heard, "h": hidden, "c": cell})
        context = samples[-CONTEXT:]
        yield from found.ravel().tolist()


def spans_above(probabilities: Iterable[float], options: VadOptions) -> Iterator[Span]:
    """Spans from a probability above the threshold to a pause that is long enough."""
    pause = round(options.min_silence_s * SAMPLE_RATE / HOP)
    start: int | None = None  # of the speech that goes on
    quiet: int | None = None  # where it may have ended
    i = -1
    for i, probability in enumerate(probabilities):
        if probability >= options.threshold:
            start = i if start is None else start
            quiet = None
        elif start is not None and (quiet is not None or probability < options.threshold - RELEASE):
            quiet = i if quiet is None else quiet
            if i + 1 - quiet >= pause:
                yield from _long_enough(start, quiet, options)
                start = quiet = None
    if start is not None:
        yield from _long_enough(start, i + 1 if quiet is None else quiet, options)


def _long_enough(start: int, end: int, options: VadOptions) -> Iterator[Span]:
    """Hops to frames: the whole of what was heard."""
    if (end - start) * HOP >= options.min_speech_s * SAMPLE_RATE:
        yield Span(start * HOP // HOP_LENGTH, -(-end * HOP // HOP_LENGTH))


def _frames(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """(CONTEXT + n,) to overlapping rows (ceil(n / HOP), CONTEXT + HOP), zeros after the end."""
    rows = -(-(samples.size - CONTEXT) // HOP)
    padded = np.pad(samples, (0, CONTEXT + rows * HOP - samples.size))
    return np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + HOP)[::HOP].copy()


def _session() -> Any:
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise MissingPackageError(
            "cannot look for speech: ONNX Runtime is not installed, or not for this Python",
            why=str(error),
            hint="pip install --upgrade whisperport",
        ) from error
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1  # its products are tiny
    settings.log_severity_level = 3
    path = Path(str(files("whisperport"))) / "data" / "vad" / "silero_vad_16k.onnx"
    return ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
