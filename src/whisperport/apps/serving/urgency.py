"""Which decodings of a server begin first."""

import time
from enum import Enum


class Urgency(Enum):
    """The class of a decoding; its value is how many seconds it may wait longer than a live one.

    A decoding is due when it was submitted, plus these seconds. So live decodings come before those of
    short files, and these before those of long files, but no class waits permanently. The windows of a
    file are submitted one by one, so that files of one class take turns.
    """

    LIVE = 0.0
    SHORT = 5.0  # a file that fits into one window
    FILE = 60.0

    def due(self) -> float:
        """Return when a decoding that is submitted now is due, in seconds of the monotonic clock."""
        return time.monotonic() + self.value
