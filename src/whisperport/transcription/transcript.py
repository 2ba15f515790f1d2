"""The result of a transcription."""

from dataclasses import dataclass

from whisperport.text import Segment


@dataclass(frozen=True, slots=True)
class Transcript:
    """The transcript of an audio file.

    Attributes:
        text: all text, without spaces at both ends.
        segments: in order of time.
        language: language code, as given or detected.
        duration_s: duration of the audio in seconds.
        truncated: starts of the windows that reached the token limit, in seconds.
    """

    text: str
    segments: tuple[Segment, ...]
    language: str
    duration_s: float
    truncated: tuple[float, ...]
