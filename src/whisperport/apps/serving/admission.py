"""Which requests a server accepts: as much audio as it transcribes in a given time."""

import math
import time
from collections.abc import Callable
from threading import Condition

from whisperport.errors import QueueFullError

CLOSED_RETRY_S = 5  # a new process is usually there by then
LONGEST_RETRY_S = 120  # OpenAI's clients ignore longer times
KEPT = 0.97  # of what was measured before, after each further measurement: about the last 30 count


class Admission:
    """Counts the audio of all requests that has not been transcribed. Safe for threads.

    Args:
        max_queue_s: a request is rejected if the work before it would take longer, in seconds.
        max_requests: maximum number of concurrent requests.
        clock: returns seconds.
    """

    def __init__(
        self,
        max_queue_s: float,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_queue_s, self._max_requests = max_queue_s, max_requests
        self.speed = Speed(clock)
        self._changed = Condition()
        self._left: dict[object, float] = {}  # seconds of audio of each request that are not done
        self.closed = False

    @property
    def audio_s(self) -> float:
        """Seconds of audio that are waiting or being transcribed."""
        with self._changed:
            return sum(self._left.values())

    @property
    def requests(self) -> int:
        """Number of requests that were accepted and have not ended."""
        return len(self._left)

    def check(self) -> None:
        """Raise QueueFullError if no request would be accepted now."""
        with self._changed:
            self._check()

    def enter(self, request: object, *, waits: bool = True) -> None:
        """Accept a request, whose duration is not known yet.

        Args:
            request: identifies it.
            waits: whether it waits for the work before it. If not, only the number of requests counts, and
                it is accepted while the server is shutting down: it may belong to what has begun.

        Raises:
            QueueFullError: there is too much work, or the server is shutting down.
        """
        with self._changed:
            self._check(waits)
            self._left[request] = 0.0

    def check_queue(self) -> None:
        """Raise QueueFullError if there is too much work for the audio of a request that was accepted."""
        with self._changed:
            self._check_queue()

    def expect(self, request: object, audio_s: float) -> None:
        """Set how much of the request's audio is not done, in seconds."""
        with self._changed:
            if request not in self._left:
                return
            done_s, self._left[request] = self._left[request] - audio_s, audio_s
            if done_s > 0:
                self.speed.measured(done_s)
            self._set_busy()

    def leave(self, request: object) -> None:
        """End a request, whatever its result. May be called several times."""
        with self._changed:
            self._left.pop(request, None)
            self._set_busy()
            self._changed.notify_all()

    def close(self, wait_s: float) -> bool:
        """Accept no more requests, and wait for the others; return whether they ended in time."""
        with self._changed:
            self.closed = True
            return self._changed.wait_for(lambda: not self._left, wait_s)

    def _check(self, waits: bool = True) -> None:
        if self.closed and waits:
            raise QueueFullError(CLOSED_RETRY_S, closing=True)
        if len(self._left) >= self._max_requests:
            raise QueueFullError(1)
        if waits:
            self._check_queue()

    def _check_queue(self) -> None:
        excess_s = sum(self._left.values()) / self.speed.audio_s_per_s - self._max_queue_s
        if excess_s > 0:
            raise QueueFullError(min(math.ceil(excess_s), LONGEST_RETRY_S))

    def _set_busy(self) -> None:
        """Measure the speed only while there is audio: an upload may be slow."""
        if any(self._left.values()):
            self.speed.begin()
        else:
            self.speed.end()


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
        self._audio_s = self._audio_s * KEPT + audio_s
        self._wall_s = self._wall_s * KEPT + now - self._since
        self._since = now

    def end(self) -> None:
        """There is no work from now on."""
        self._since = None
