"""Find speech in audio of any duration with Silero's voice activity detector (VAD), and cut at silences.

    samples ──► probability of speech, every 32 ms ──► spans of speech ──► chunks that fit into a window

The network is Silero VAD 6.2.3 (MIT), in the version for sequences: one call computes 4 s, and its state is
passed to the next call. Its convolutions are written as matrix multiplications, which takes a third of the
time. It runs in ONNX Runtime, which the core package requires anyway.
Source: snakers4/silero-vad, src/silero_vad/sequence_vad.py and utils_vad.py.
"""

import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import UsageError, needs
from whisperport.speech.audio.mel import HOP_LENGTH
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.speech.audio.stream import AudioStream

HOP = 512  # samples from one probability to the next
CONTEXT = 64  # samples before them that are also inputs of the network
BLOCK = 128  # probabilities in one call
STATE = (1, 1, 128)  # shape of the state of the network's LSTM
RELEASE = 0.15  # speech ends at a probability this far below the threshold; Silero's value


@dataclass(frozen=True, slots=True, kw_only=True)
class VadOptions:
    """How speech is detected and cut into chunks.

    Attributes:
        threshold: probability at which speech begins, above 0.15 and below 1. Speech ends below
            `threshold` - 0.15.
        min_speech_s: shortest speech in seconds, 0 to 10; shorter speech is ignored.
        min_silence_s: shortest pause that ends speech, in seconds, 0 to 10.
        pad_s: silence before and after the speech of a chunk, in seconds, 0 to 10; less if there is less.
        max_silence_s: longest silence within a chunk, in seconds, 0 to 10; longer silence ends the chunk.
        pack: whether a chunk is as much speech as a window can hold. `max_silence_s` is not used: a silence
            of more than 2 · `pad_s` within a chunk is shortened to that. There are fewer windows to encode.

    Raises:
        UsageError: a value is out of its range.
    """

    threshold: float = 0.5
    min_speech_s: float = 0.1
    min_silence_s: float = 0.3
    pad_s: float = 0.3
    max_silence_s: float = 2.0
    pack: bool = False

    def __post_init__(self) -> None:
        if not RELEASE < self.threshold < 1:
            raise UsageError(
                f"`threshold` is {self.threshold}", why=f"expected above {RELEASE} and below 1"
            )
        for name in ("min_speech_s", "min_silence_s", "pad_s", "max_silence_s"):
            if not 0 <= getattr(self, name) <= 10:
                raise UsageError(f"`{name}` is {getattr(self, name)}", why="expected 0 to 10 s")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the audio, in mel frames of 10 ms."""

    start: int  # first frame
    end: int  # frame after the last

    @property
    def n_frames(self) -> int:
        return self.end - self.start


def speech_spans(stream: AudioStream, options: VadOptions) -> Iterator[Span]:
    """Yield the spans of speech in order. The audio is read as far as needed for each span.

    Raises:
        AudioError: the audio is damaged, or shorter than one mel frame.
        MissingPackageError: ONNX Runtime is not installed for this Python.
    """
    for span in spans_above(speech_probabilities(stream), options):
        end = min(span.end, -(-stream.n_decoded // HOP_LENGTH))  # the last frame may be incomplete
        yield Span(span.start, end)


def speech_probabilities(stream: AudioStream) -> Iterator[float]:
    """Yield the probability of speech for every `HOP` samples; the last ones are padded with zeros."""
    detector, position = SpeechDetector(), 0
    while (samples := stream.read(position, BLOCK * HOP)).size:
        position += samples.size
        yield from detector.probabilities(samples)


class SpeechDetector:
    """The network and its state in one stream of audio.

    Raises:
        MissingPackageError: ONNX Runtime is not installed for this Python.
    """

    def __init__(self) -> None:
        self._session = _session()
        self._context = np.zeros(CONTEXT, np.float32)
        self._hidden = self._cell = np.zeros(STATE, np.float32)

    def probabilities(self, samples: NDArray[np.float32]) -> list[float]:
        """Return the probability of speech in each `HOP` of the next samples (n,), float32 at 16 kHz.

        Only the last samples of the stream may be an incomplete hop; it is padded with zeros.
        """
        blocks = range(0, samples.size, BLOCK * HOP)  # a call with an hour would need gigabytes
        return [p for at in blocks for p in self._probabilities(samples[at : at + BLOCK * HOP])]

    def _probabilities(self, samples: NDArray[np.float32]) -> list[float]:
        inputs = _frames(np.concatenate([self._context, samples]))
        output, self._hidden, self._cell = self._session.run(
            None, {"input": inputs, "h": self._hidden, "c": self._cell}
        )
        self._context = samples[-CONTEXT:]
        probabilities: list[float] = output.ravel().tolist()
        return probabilities


def speech_seconds(samples: NDArray[np.float32]) -> float:
    """Return for how long someone speaks, at any level: samples (n,) of 16 kHz."""
    peak = np.abs(samples).max(initial=0)
    threshold = VadOptions().threshold
    with AudioStream(samples / peak if peak else samples, look_back_s=1.0) as stream:
        n_hops = sum(probability >= threshold for probability in speech_probabilities(stream))
    return n_hops * HOP / SAMPLE_RATE


def spans_above(probabilities: Iterable[float], options: VadOptions) -> Iterator[Span]:
    """Yield spans from the first probability above the threshold to a pause of `min_silence_s`."""
    start = 0
    for edge in _edges(probabilities, options):
        if edge.begins:
            start = edge.hop
        else:
            yield Span(start * HOP // HOP_LENGTH, -(-edge.hop * HOP // HOP_LENGTH))


def _edges(probabilities: Iterable[float], options: VadOptions) -> Iterator["SpeechEdge"]:
    edges = SpeechEdges(options)
    yield from filter(None, map(edges.push, probabilities))
    yield from filter(None, [edges.end()])


class SpeechEdge(NamedTuple):
    """The beginning or the end of speech."""

    begins: bool
    hop: int  # index of the first hop of `HOP` samples with speech, or of the first one without


class SpeechEdges:
    """Finds where speech begins and ends while probabilities arrive.

    Speech begins at a probability above the threshold, which is known once it is `min_speech_s` long. It
    ends at a pause of `min_silence_s`.

    Args:
        options: threshold and durations.
    """

    def __init__(self, options: VadOptions) -> None:
        self._options = options
        self._fewest = options.min_speech_s * SAMPLE_RATE / HOP  # hops
        self._pause = round(options.min_silence_s * SAMPLE_RATE / HOP)
        self._count = 0
        self._start: int | None = None  # hop at which the current speech began
        self._silent: int | None = None  # hop at which it may have ended
        self._is_known = False  # whether its beginning was returned

    def push(self, probability: float) -> SpeechEdge | None:
        """Add the probability of the next hop; return an edge, if one is known now."""
        hop, self._count = self._count, self._count + 1
        if probability >= self._options.threshold:
            self._start = hop if self._start is None else self._start
            self._silent = None
            return self._begun(self._start)
        if self._start is None:
            return None
        if self._silent is None:
            if probability >= self._options.threshold - RELEASE:
                return self._begun(self._start)
            self._silent = hop
        return self._ended(self._silent) if self._count - self._silent >= self._pause else None

    def end(self) -> SpeechEdge | None:
        """Return the end of speech that lasts until the end of the audio."""
        return self._ended(self._count if self._silent is None else self._silent)

    def _begun(self, start: int) -> SpeechEdge | None:
        if self._is_known or self._count - start < self._fewest:
            return None
        self._is_known = True
        return SpeechEdge(True, start)

    def _ended(self, hop: int) -> SpeechEdge | None:
        was_known, self._is_known = self._is_known, False
        self._start = self._silent = None
        return SpeechEdge(False, hop) if was_known else None


def _frames(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cut samples (CONTEXT + n,) into rows (ceil(n / HOP), CONTEXT + HOP), padded with zeros."""
    rows = -(-(samples.size - CONTEXT) // HOP)
    padded = np.pad(samples, (0, CONTEXT + rows * HOP - samples.size))
    return np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + HOP)[::HOP].copy()


@cache
def _session() -> Any:
    """Load the network, which keeps no state and may be shared by threads.

    Raises:
        MissingPackageError: ONNX Runtime cannot be imported.
    """
    with needs(
        "cannot detect speech: ONNX Runtime is not installed for this Python",
        hint="pip install --upgrade whisperport",
    ):
        import onnxruntime as ort
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = (
        1  # its matrix multiplications are small
    )
    settings.log_severity_level = 3
    path = Path(str(files("whisperport.speech.data"))) / "vad" / "silero_vad_16k.onnx.xz"
    network = lzma.decompress(path.read_bytes())
    return ort.InferenceSession(network, settings, providers=["CPUExecutionProvider"])


class SpeechTurn(NamedTuple):
    """The beginning or the end of speech, in samples from the beginning of the stream."""

    begins: bool
    at: int
    known_at: int  # after how many samples of the stream it is known


Turns = list[SpeechTurn]


class SpeechTurns:
    """Detects speech in one stream of audio at 16 kHz, in pieces of any length.

    Args:
        options: threshold and durations; chunks are not cut here.

    Raises:
        MissingPackageError: ONNX Runtime is not installed for this Python.
    """

    def __init__(self, options: VadOptions) -> None:
        self._detector, self._edges = SpeechDetector(), SpeechEdges(options)
        self._rest = np.empty(0, np.int16)
        self._n_hops = 0

    def push(self, samples: NDArray[np.int16]) -> Turns:
        """Add samples (n,) int16, and return what is known now. It does not depend on the pieces."""
        samples = np.concatenate([self._rest, samples])
        complete = samples.size // HOP * HOP
        self._rest = samples[complete:]
        return self._found(samples[:complete])

    def end(self) -> Turns:
        """Return the last turns at the end of the stream."""
        return [*self._found(self._rest), *self._turn(self._edges.end())]

    def _found(self, samples: NDArray[np.int16]) -> Turns:
        turns: Turns = []
        if samples.size:
            floats = samples.astype(np.float32) / np.float32(32768)
            for probability in self._detector.probabilities(floats):
                self._n_hops += 1
                turns += self._turn(self._edges.push(probability))
        return turns

    def _turn(self, edge: SpeechEdge | None) -> Turns:
        if edge is None:
            return []
        return [SpeechTurn(edge.begins, edge.hop * HOP, self._n_hops * HOP)]


def cut_chunks(
    speech: Iterable[Span], limit: int, *, pad: int = 0, longest_silence: int | None = None
) -> Iterator[Span]:
    """Yield chunks that contain all speech, in order and without overlap, cut at silences.

        speech   ▄▄▄▄▄▄  ▄▄▄▄     ▄▄▄▄▄▄▄ ▄▄▄        ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄
        chunks  |─────────────|  |──────────────|   |─────────────────────────|
        limit   |──────────────────|

    Args:
        speech: spans of speech in order.
        limit: maximum length of a chunk in mel frames of 10 ms. A single longer span is one chunk.
        pad: mel frames of silence before and after a chunk's speech, or half of the silence if it is
            shorter.
        longest_silence: maximum silence within a chunk, in mel frames; None: no limit.
    """
    held: list[Span] = []  # spans that fit into one chunk, or one span that does not
    before = -2 * pad  # end of the previous speech; at first far enough to have no effect
    for span in speech:
        if held and longest_silence is not None and span.start - held[-1].end > longest_silence:
            yield _padded(held, before, span.start, limit, pad)
            before, held = held[-1].end, []
        while held and span.end - held[0].start + 2 * pad > limit:
            count = _best_cut([*held, span], limit)
            chunk, held = held[:count], held[count:]
            yield _padded(chunk, before, (held or [span])[0].start, limit, pad)
            before = chunk[-1].end
        held.append(span)
    if held:
        yield _padded(held, before, held[-1].end + 2 * pad, limit, pad)


def fill_windows(chunks: Iterable[Span], limit: int) -> Iterator[tuple[Span, ...]]:
    """Yield groups of neighbouring chunks. Without the silence between them, a group fits into a window.

    Args:
        chunks: in order.
        limit: maximum length of a group in mel frames of 10 ms. A single longer chunk is one group.
    """
    held: list[Span] = []
    for chunk in chunks:
        if held and sum(span.n_frames for span in held) + chunk.n_frames > limit:
            yield tuple(held)
            held = []
        held.append(chunk)
    if held:
        yield tuple(held)


def _best_cut(spans: list[Span], limit: int) -> int:
    """Return how many of the spans make a chunk that ends at the longest silence in its second half."""
    silences = {
        count: after.start - last.end
        for count, (last, after) in enumerate(pairwise(spans), start=1)
        if last.end - spans[0].start >= limit / 2
    }
    return max(silences, key=silences.__getitem__) if silences else len(spans) - 1


def _padded(spans: list[Span], before: int, after: int, limit: int, pad: int) -> Span:
    """Return the chunk of spans with its padding; `before` and `after` bound the silence around it."""
    start, end = spans[0].start, spans[-1].end
    if end - start <= limit:
        pad = min(pad, (limit - (end - start)) // 2)
    return Span(start - min(pad, start, (start - before) // 2), end + min(pad, (after - end) // 2))
