"""What comes out."""

from dataclasses import dataclass

from whisperport.text import Segment


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a recording."""

    text: str
    segments: tuple[Segment, ...]
    language: str
    duration_s: float
    truncated: tuple[float, ...]  # starts of windows that met the token limit, in seconds
