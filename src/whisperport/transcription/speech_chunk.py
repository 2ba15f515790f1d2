"""A chunk of speech: the parts of the audio that one window holds.

audio   ──[ part ]────────[ part ]──[ part ]──►
chunk     [ part ][ part ][ part ]
"""

from dataclasses import dataclass, replace

import numpy as np

from whisperport.runtime import Floats
from whisperport.speech.audio import FRAMES_PER_SECOND, MelWindows, Span
from whisperport.speech.text import Segment
from whisperport.transcription.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts of the audio in order, without the silence between them.

    Times in the chunk are those of the audio in the first part. In each later part they are smaller, by the
    silence that was left out before it.

    Attributes:
        parts: at least one.
        pad: mel frames without speech at both ends of each part.
    """

    parts: tuple[Span, ...]
    pad: int = 0

    @property
    def start(self) -> int:
        """First mel frame, in the chunk and in the audio."""
        return self.parts[0].start

    @property
    def n_frames(self) -> int:
        """Length in mel frames."""
        return sum(part.n_frames for part in self.parts)

    def in_audio(self, transcript: Transcript) -> Transcript:
        """Return a transcript of the chunk with times in the audio."""
        return replace(
            transcript,
            segments=tuple(self._in_audio(segment) for segment in transcript.segments),
            truncated=tuple(self.times(start, start)[0] for start in transcript.truncated),
        )

    def times(self, start: float, end: float) -> tuple[float, float]:
        """Return the times in the audio of a text, in seconds.

        The model often ends one text and begins the next at the same time in the silence between two parts.
        A text that ends there belongs to the earlier part, and one that begins there to the later part.

        Args:
            start: time in the chunk, in seconds.
            end: not before `start`.
        """
        first, last = (round(time * FRAMES_PER_SECOND) for time in (start, end))
        from_start, from_end = self._left_out(first + self.pad), self._left_out(last - self.pad)
        if first + from_start > last + from_end:  # the text is in the silence
            from_start, from_end = self._left_out(first), self._left_out(last)
        return start + from_start / FRAMES_PER_SECOND, end + from_end / FRAMES_PER_SECOND

    def _left_out(self, frame: int) -> int:
        """Return how many frames of the audio before a frame of the chunk are not in the chunk."""
        at = self.start  # first frame of a part in the chunk
        for part in self.parts[:-1]:
            if frame < at + part.n_frames:
                return part.start - at
            at += part.n_frames
        return self.parts[-1].start - at

    def _in_audio(self, segment: Segment) -> Segment:
        start, end = self.times(segment.start, segment.end)
        words = segment.words
        if words is not None:
            timed = [(word, *self.times(word.start, word.end)) for word in words]
            words = tuple(replace(word, start=begin, end=stop) for word, begin, stop in timed)
        seek = segment.seek + self._left_out(segment.seek)
        return replace(segment, start=start, end=end, seek=seek, words=words)


class ChunkMel:
    """The spectrogram of one chunk that fits into a window, in memory, with silence after it.

    Args:
        mel: of the audio; not yet read beyond the beginning of the chunk.
        chunk: fits into a window.
        n_frames: of a window.
    """

    def __init__(self, mel: MelWindows, chunk: Chunk, n_frames: int) -> None:
        self.duration_s = mel.duration_s
        self._start = chunk.start
        parts = []
        for part in chunk.parts:
            frames, n_audio = mel.window(part.start, part.n_frames)
            parts.append(frames[:, :n_audio])  # the last part may end after the audio
        self._n_frames = sum(part.shape[1] for part in parts)
        silence = np.zeros((len(frames), n_frames - self._n_frames), np.float32)
        self.frames: Floats = np.concatenate([*parts, silence], axis=1)  # (n_mels, n_frames)

    def window(self, start: int) -> tuple[Floats, int]:
        offset = start - self._start
        frames = np.zeros_like(self.frames)
        frames[:, : frames.shape[1] - offset] = self.frames[:, offset:]
        return frames, max(self._n_frames - offset, 0)
