"""How fast a server transcribes, measured while it does."""

import time
from collections.abc import Callable

MEMORY = (
    0.97  # of what was measured before, after each further measurement: about the last 30 count
)


class Speed:
    """Seconds of audio that are transcribed per second while there is work. Not safe for threads.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._audio_s = self._wall_s = 0.0
        self._since: float | None = None  # when there began to be work, or the last measurement

    @property
    def audio_s_per_s(self) -> float:
        """The speed; 1 before the first measurement."""
        return self._audio_s / self._wall_s if self._wall_s else 1.0

    def begin(self) -> None:
        """There is work from now on."""
        if self._since is None:
            self._since = self._clock()

    def measured(self, audio_s: float) -> None:
        """So much audio was transcribed since the last call."""
        if self._since is None:
            return
        now = self._clock()
        self._audio_s = self._audio_s * MEMORY + audio_s
        self._wall_s = self._wall_s * MEMORY + now - self._since
        self._since = now

    def end(self) -> None:
        """There is no work from now on."""
        self._since = None
