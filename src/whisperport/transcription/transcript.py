"""What comes out."""

from collections.abc import Callable
from dataclasses import dataclass

from whisperport.text import Segment

Heard = Callable[[float, float | None], None]
"""Told how many seconds were transcribed, and of how many where that is known."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said in a recording."""

    text: str
    segments: tuple[Segment, ...]
    language: str
    duration_s: float
    truncated: tuple[float, ...]  # starts of windows that met the token limit, in seconds
