"""The transcription of one audio file on the lanes of a server."""

from collections.abc import Callable
from concurrent.futures import Future

from whisperport.apps.serving.lanes import Lanes, Urgency, settle
from whisperport.runtime.decoding.decode import check_language
from whisperport.speech.audio import FRAMES_PER_SECOND, AudioSource, MelWindows
from whisperport.transcription import TranscribeOptions, Transcript

LARGEST_KEPT = 4 * 2**20  # bytes of a spectrogram in memory: many files may be waiting

OnWindow = Callable[[Transcript], None]


class Transcription(Future[Transcript]):
    """The future transcript of one audio file. It can be cancelled until it is done.

    Attributes:
        waited_s: how long its windows waited for a decoder, in seconds.
        decoded_s: how long they were decoded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = self.decoded_s = 0.0


class Job:
    """The transcription of one audio file: what its window-wise and chunk-wise forms share.

    Attributes:
        future: its outcome.
        request: as the admission knows it.
        urgency: of its windows; known when the duration is known.
    """

    def __init__(
        self,
        lanes: Lanes,
        source: AudioSource,
        options: TranscribeOptions,
        urgency: Urgency | None,
        on_window: OnWindow | None,
        admitted: object,
        on_end: Callable[["Job"], None],
    ) -> None:
        """
        Args:
            lanes: runs its parts.
            source: the audio.
            options: transcription options.
            urgency: None: found from the duration.
            on_window: called after each window with the transcript so far.
            admitted: the request that it is a part of; None: it is one of its own.
            on_end: called when the job uses its audio no more, before its future is done.
        """
        self.lanes, self.source, self.options = lanes, source, options
        self.request = self if admitted is None else admitted
        self.urgency = urgency or Urgency.FILE
        self._is_given, self._on_window, self._on_end = urgency is not None, on_window, on_end
        engine = lanes.transcriber.engine
        options.check_for_one()
        check_language(engine.generation, options.decode)
        self.window_s = engine.audio_frames / FRAMES_PER_SECOND
        self.future = Transcription()

    def start(self) -> None:
        """Begin the work on another thread."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """End the work soon, with this error."""
        settle(self.future, None, error)

    @property
    def is_stopped(self) -> bool:
        """Whether the future is done although the work is not: it was cancelled, or failed from outside."""
        return self.future.done()

    def open_mel(self, is_stopped: Callable[[], bool] | None = None) -> MelWindows:
        """Open the spectrogram, and count the audio as waiting.

        Raises:
            AudioError: see `MelWindows`.
        """
        dims = self.lanes.transcriber.engine.dims
        mel = MelWindows(
            self.source,
            dims.n_mels,
            dims.n_frames,
            is_stopped=lambda: self.is_stopped or (is_stopped is not None and is_stopped()),
            longest_s=self.lanes.longest_s,
            largest_kept=LARGEST_KEPT,
        )
        duration_s = mel.duration_s or 0.0
        if not self._is_given and duration_s <= self.window_s:
            self.urgency = Urgency.SHORT
        self.expect(duration_s)
        return mel

    def expect(self, left_s: float) -> None:
        """Tell the admission how much audio is not done, in seconds: a window at least."""
        self.lanes.admission.expect(self.request, max(left_s, self.window_s))

    def report(self, transcript: Callable[[], Transcript]) -> None:
        """Call `on_window` with the transcript so far."""
        if self._on_window is not None and not self.is_stopped:
            self._on_window(transcript())

    def end(self, transcript: Transcript | None, error: BaseException | None = None) -> None:
        """End the job with its outcome."""
        if error is None:
            self.lanes.admission.expect(self.request, 0.0)
        self._on_end(self)
        settle(self.future, transcript, error)
