"""Types of the functions that long work calls to report its progress."""

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with the name of each stage when it begins: a few words, in lower case, for one line."""

ProgressCallback = Callable[[float, float | None], None]
"""Called with the seconds of audio transcribed so far and the total, None where that is not known."""
