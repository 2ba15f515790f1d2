"""Types of the functions that receive the progress of long operations."""

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with the name of each stage when the stage begins: a few words in lower case, for one line."""

ProgressCallback = Callable[[float, float | None], None]
"""Called with two lengths in seconds: audio transcribed so far, and all audio; None if not known."""
