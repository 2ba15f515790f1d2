"""Find where someone begins and stops speaking, while audio arrives."""

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.vad import HOP, SpeechDetector, SpeechEdge, SpeechEdges, VadOptions

Edges = list[tuple[bool, int]]
"""Whether speech begins or ends, and at which sample of the stream."""


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

    def push(self, samples: NDArray[np.int16]) -> Edges:
        """Add samples (n,) int16, and return what is known now."""
        samples = np.concatenate([self._rest, samples])
        complete = samples.size // HOP * HOP
        self._rest = samples[complete:]
        return self._found(samples[:complete])

    def end(self) -> Edges:
        """Return the last edges at the end of the stream."""
        found = self._found(self._rest)
        return found + _as_samples([self._edges.end()])

    def _found(self, samples: NDArray[np.int16]) -> Edges:
        if not samples.size:
            return []
        floats = samples.astype(np.float32) / np.float32(32768)
        return _as_samples([self._edges.push(p) for p in self._detector.probabilities(floats)])


def _as_samples(edges: list[SpeechEdge | None]) -> Edges:
    return [(edge.begins, edge.hop * HOP) for edge in edges if edge is not None]
