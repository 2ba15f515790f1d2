"""Find where someone begins and stops speaking, while audio arrives."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whisperport.speech.audio.vad import HOP, SpeechDetector, SpeechEdge, SpeechEdges, VadOptions


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
