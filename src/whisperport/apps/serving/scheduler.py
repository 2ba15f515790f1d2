"""The scheduler of a server: one queue for the windows of all requests, whatever their protocol.

    request ─► admission ─► reader threads: audio and spectrogram ─► queue ─► decoder threads, in a batch
                                  ▲                                                   │
                                  └───────────── the next window ◄────────────────────┘

Between two windows, a file holds no decoder, so that an hour-long file does not delay a short one. Texts
and times equal those of `Transcriber.transcribe`, whatever else is decoded at the same time.
"""

from threading import Lock

from whisperport.apps.serving.admission import CLOSED_RETRY_S, Admission
from whisperport.apps.serving.job import Job, OnWindow, SpeechJob, Transcription, WindowJob
from whisperport.apps.serving.lanes import Lanes, Urgency
from whisperport.errors import QueueFullError
from whisperport.speech.audio import AudioSource
from whisperport.transcription import TranscribeOptions, Transcriber

LAST_S = 5.0  # for requests that have failed, to end


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
        lanes: runs the decodings of the jobs, and those that other protocols submit.
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
        self.admission = Admission(max_queue_s, max_requests)
        self.lanes = Lanes(transcriber, self.admission, longest_s, batch=batch)
        self._jobs: set[Job] = set()
        self._closed = False
        self._lock = Lock()  # of the jobs

    def transcribe(
        self,
        source: AudioSource,
        options: TranscribeOptions | None = None,
        *,
        transcriber: Transcriber | None = None,
        urgency: Urgency | None = None,
        on_window: OnWindow | None = None,
        admitted: object = None,
    ) -> Transcription:
        """Transcribe an audio file window by window; with `vad` in the options, chunk by chunk.

        Args:
            source: a path, an array at 16 kHz, or a file that can be reopened: it is read twice.
            options: transcription options; None: defaults.
            transcriber: the one with the adapter that the client asks for; None: without one.
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
        kind = WindowJob if options.vad is None else SpeechJob
        transcriber = transcriber or self.lanes.transcriber
        job = kind(
            self.lanes, source, options, transcriber, urgency, on_window, admitted, self._ended
        )
        if admitted is None:
            self.admission.enter(job, waits=urgency is not Urgency.LIVE)
        else:
            self.admission.check_queue()
        with self._lock:
            is_late = self._closed
            if not is_late:
                self._jobs.add(job)
        if is_late:
            self.admission.leave(job)
            raise QueueFullError(CLOSED_RETRY_S, closing=True)
        job.start()
        return job.future

    def close(self, drain_s: float) -> bool:
        """Accept no more requests, wait for the others, and end all threads.

        Args:
            drain_s: how long to wait for the requests, in seconds; after it, they fail.

        Returns:
            Whether all requests ended in time.
        """
        in_time = self.admission.close(drain_s)
        with self._lock:
            left, self._closed = list(self._jobs), True
        for job in left:
            job.fail(QueueFullError(CLOSED_RETRY_S, closing=True))
        self.admission.close(LAST_S)
        self.lanes.shutdown()
        return in_time

    def _ended(self, job: Job) -> None:
        """Called when a job has ended, and uses its audio no more."""
        with self._lock:
            self._jobs.discard(job)
        if job.request is job:
            self.admission.leave(job)
        else:
            self.admission.expect(job.request, 0.0)
