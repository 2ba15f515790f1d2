"""The scheduler of a server: one queue for the windows of all requests, whatever their protocol.

    request ─► admission ─► reader threads: audio and spectrogram ─► queue ─► decoder threads, in a batch
                                  ▲                                                   │
                                  └───────────── the next window ◄────────────────────┘

Between two windows, a file holds no decoder, so that an hour-long file does not delay a short one. Texts
and times equal those of `Transcriber.transcribe`, whatever else is decoded at the same time.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TypeVar

from whisperport.audio import AudioSource
from whisperport.errors import QueueFullError
from whisperport.runtime import BatchExecutor, Decoder, Steps
from whisperport.serving.admission import CLOSED_RETRY_S, Admission
from whisperport.serving.cancelling import cancellable, settle
from whisperport.serving.chunks_job import ChunksJob
from whisperport.serving.job import Job, OnWindow, Transcription
from whisperport.serving.urgency import Urgency
from whisperport.serving.windows_job import WindowsJob
from whisperport.transcription import TranscribeOptions, Transcriber

T = TypeVar("T")

READERS = 4  # threads that read windows, each in some 10 ms
OPENERS = (
    16  # threads that read files for the first time: a long file must not keep a short one waiting
)
LAST_S = 5.0  # for requests that have failed, to end
SPARE = 1  # decoders beside the batch, for live decodings while all rows are in use


class Scheduler:
    """Decodes the windows of many requests together, in the order of their urgency.

    Args:
        transcriber: the loaded bundle. Calls of its own methods are not scheduled.
        max_queue_s: a request is rejected if the work before it would take longer, in seconds. The first
            one is always accepted.
        max_requests: maximum number of concurrent requests.
        longest_s: maximum duration of an audio file in seconds.
        batch: decode windows together, if the bundle has a program `step_B`. Their log-probabilities then
            differ by up to 1e-4 from those of `Transcriber.transcribe`, since sums have another order.

    Attributes:
        admission: what waits, and how fast it is transcribed.
        rows: number of windows that are decoded together.
        last_decoded: when a decoding last ended well, in seconds of the monotonic clock; None: not yet.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        *,
        max_queue_s: float = 600.0,
        max_requests: int = 256,
        longest_s: float = 6 * 3600.0,
        batch: bool = True,
    ) -> None:
        self.transcriber, self.longest_s = transcriber, longest_s
        self.admission = Admission(max_queue_s, max_requests)
        engine = transcriber.engine
        self.rows = engine.batch_size if batch else 1
        self._decoders = BatchExecutor(engine, self.rows, spare=SPARE)
        self._readers = ThreadPoolExecutor(READERS, "reader")
        self._openers = ThreadPoolExecutor(OPENERS, "opener")
        self.last_decoded: float | None = None
        self._jobs: set[Job] = set()
        self._ended = False
        self._lock = Lock()  # of the jobs

    def submit(
        self, start: Callable[[Decoder], Steps[T]], urgency: Urgency, *, yields_s: float = 0.0
    ) -> Future[T]:
        """Schedule one decoding, such as that of a window.

        Args:
            start: called on a decoder's thread with the decoder to use; returns the decoding. It should not
                read audio or wait.
            urgency: a live decoding may begin while all rows of the batch are in use.
            yields_s: decodings that are submitted within so many seconds after it may begin before it.

        Returns:
            The future result. `cancel` ends the decoding at its next step, also after it began.
        """
        result: Future[T] = Future()
        inner = self._decoders.submit(
            partial(cancellable, start, result.cancelled),
            due=urgency.due() + yields_s,
            urgent=urgency is Urgency.LIVE,
        )
        result.add_done_callback(lambda _: inner.cancel())  # if it has not begun
        inner.add_done_callback(partial(self._forward, result))
        return result

    def transcribe(
        self,
        source: AudioSource,
        options: TranscribeOptions | None = None,
        *,
        urgency: Urgency | None = None,
        on_window: OnWindow | None = None,
        admitted: object = None,
    ) -> Transcription:
        """Transcribe an audio file window by window; with `vad` in the options, chunk by chunk.

        Args:
            source: a path, an array at 16 kHz, or a file that can be reopened: it is read twice.
            options: transcription options; None: defaults.
            urgency: None: `SHORT` if the audio fits into one window, otherwise `FILE`.
            on_window: called after each window with the transcript so far, on a reader's thread.
            admitted: a request that `admission` has accepted before, and whose audio this is; None: the
                call is a request of its own.

        Returns:
            The future transcript. `cancel` ends the work at the next decoder step. Its exception is that of
            `Transcriber.transcribe`, `LongAudioError`, or `QueueFullError` if the server shuts down.

        Raises:
            QueueFullError: there is too much work, or the server is shutting down.
            UsageError: the checkpoint has no such language or task, or the options contradict each other.
        """
        options = options or TranscribeOptions()
        kind = WindowsJob if options.vad is None else ChunksJob
        job = kind(self, source, options, urgency, on_window, admitted)
        if admitted is None:
            self.admission.enter(job, waits=urgency is not Urgency.LIVE)
        else:
            self.admission.check_queue()
        with self._lock:
            is_late = self._ended
            if not is_late:
                self._jobs.add(job)
        if is_late:
            self.admission.leave(job)
            raise QueueFullError(CLOSED_RETRY_S, closing=True)
        job.start()
        return job.future

    def open(self, task: Callable[[], None]) -> None:
        """Run the first reading of a file on a thread for that. The task handles its exceptions."""
        self._openers.submit(task)

    def read(self, task: Callable[[], None]) -> None:
        """Run the reading of a window on a thread for that. The task handles its exceptions."""
        self._readers.submit(task)

    def ended(self, job: Job) -> None:
        """Called when a job has ended, and uses its audio no more."""
        with self._lock:
            self._jobs.discard(job)
        if job.request is job:
            self.admission.leave(job)
        else:
            self.admission.expect(job.request, 0.0)

    def close(self, drain_s: float) -> bool:
        """Accept no more requests, wait for the others, and end all threads.

        Args:
            drain_s: how long to wait for the requests, in seconds; after it, they fail.

        Returns:
            Whether all requests ended in time.
        """
        in_time = self.admission.close(drain_s)
        with self._lock:
            left, self._ended = list(self._jobs), True
        for job in left:
            job.fail(QueueFullError(CLOSED_RETRY_S, closing=True))
        self.admission.close(LAST_S)
        self._decoders.shutdown(cancel_futures=True)
        self._openers.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        return in_time

    @property
    def waiting(self) -> int:
        """Number of decodings that have not begun."""
        return self._decoders.waiting

    def _forward(self, result: Future[T], inner: Future[T]) -> None:
        """Give the outcome of a decoding to the future that the caller has."""
        if inner.cancelled():
            result.cancel()
            return
        error = inner.exception()
        if error is None:
            self.last_decoded = time.monotonic()
        settle(result, None if error else inner.result(), error)
