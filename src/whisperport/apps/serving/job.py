"""The transcription of one audio file on the lanes of a server: by windows, or by chunks of speech."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from whisperport.apps.serving.lanes import Lanes, Urgency, settle
from whisperport.runtime import Decoder, Steps
from whisperport.runtime.decoding.decode import check_language
from whisperport.speech.audio import FRAMES_PER_SECOND, AudioSource, AudioStream, MelWindows
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.transcription.session import Session, SessionWindow, clip_frames
from whisperport.transcription.speech_pipeline import ChunkedTranscription

T = TypeVar("T")

CHUNK_S = 1.0  # about the time to decode a chunk
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
        transcriber: Transcriber,
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
            transcriber: the one with the adapter that the client asks for.
            urgency: None: found from the duration.
            on_window: called after each window with the transcript so far.
            admitted: the request that it is a part of; None: it is one of its own.
            on_end: called when the job uses its audio no more, before its future is done.
        """
        self.lanes, self.source, self.options = lanes, source, options
        self.engine, self.tokenizer = transcriber.engine, transcriber.tokenizer
        self.request = self if admitted is None else admitted
        self.urgency = urgency or Urgency.FILE
        self._is_given, self._on_window, self._on_end = urgency is not None, on_window, on_end
        options.check_for_one()
        check_language(self.engine.generation, options.decode)
        self.window_s = self.engine.audio_frames / FRAMES_PER_SECOND
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
        dims = self.engine.dims
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


class WindowJob(Job):
    """Reads a window on a reader's thread, submits its decoding, and goes on when that is done."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mel: MelWindows | None = None
        self._session: Session | None = None
        self._decoding: Future[None] | None = None
        self.future.add_done_callback(lambda _: self._stop())

    def start(self) -> None:
        self.lanes.open(partial(self._guarded, self._begin))

    def _begin(self) -> None:
        """Read the file for the first time, and begin with the language or the first window."""
        self._mel = mel = self.open_mel()
        parts = clip_frames(self.options.clip_timestamps)
        self._session = session = Session(
            self.engine, self.tokenizer, self.options, mel, None, parts
        )
        if session.state.language.code:
            self._go_on(session)
        else:
            self._submit(session, None)

    def _go_on(self, session: Session) -> None:
        """Read the next window and submit it, or end."""
        window = session.next_window()
        if window is None:
            self._end(session)
        else:
            self._submit(session, window)

    def _submit(self, session: Session, window: SessionWindow | None) -> None:
        """Submit a window; None: the detection of the language, which comes before the first window."""
        start = partial(self._decode, session, window, time.monotonic())
        self._decoding = decoding = self.lanes.submit(start, self.urgency, self.engine)
        if self.is_stopped:  # before `_decoding` was set
            decoding.cancel()
        task = partial(self._guarded, partial(self._decoded, session, decoding))
        decoding.add_done_callback(lambda _: self.lanes.read(task))

    def _decode(
        self, session: Session, window: SessionWindow | None, submitted: float, decoder: Decoder
    ) -> Steps[None]:
        begun = time.monotonic()
        self.future.waited_s += begun - submitted
        if window is None:
            session.detect_language(decoder)
        else:
            yield from session.decode_window(decoder, window)
        self.future.decoded_s += time.monotonic() - begun

    def _decoded(self, session: Session, decoding: Future[None]) -> None:
        """Report a window that was decoded, and go on with the next."""
        decoding.result()
        if (duration_s := session.mel.duration_s) is not None:
            self.expect(duration_s - session.state.done_s)
        self.report(session.transcript)
        self._go_on(session)

    def _guarded(self, stage: Any) -> None:
        """Run a stage of the work; its exception ends the job."""
        try:
            stage()
        except BaseException as error:
            self._end(None, error)

    def _end(self, session: Session | None, error: BaseException | None = None) -> None:
        if self._mel is not None:
            self._mel.close()
        self.end(session.transcript() if session else None, error)

    def _stop(self) -> None:
        """End the decoding that is waiting or running; if there is none, a stage is, which sees the end."""
        if self._decoding is not None:
            self._decoding.cancel()


class SpeechJob(Job):
    """Finds and reads speech on a thread of its own; the decodings of the chunks are submitted."""

    def start(self) -> None:
        Thread(target=self._run, name="chunks", daemon=True).start()

    def _run(self) -> None:
        try:
            transcript = self._transcribed()
        except BaseException as error:
            self.end(None, error)
        else:
            self.end(transcript)

    def _transcribed(self) -> Transcript:
        assert self.options.vad is not None
        decoders = _SharedDecoders(self)
        parts = self.engine, self.tokenizer, self.options, self.options.vad, None
        chunked = ChunkedTranscription(*parts, decoders)
        self.future.add_done_callback(lambda _: chunked.stop())
        self.future.add_done_callback(lambda _: decoders.cancel())

        def progress(done_s: float, of_s: float | None) -> None:
            if of_s is not None:
                self.expect(of_s - done_s)
            self.report(chunked.transcript)

        def open_mel(is_stopped: Callable[[], bool]) -> MelWindows:
            return self.open_mel(is_stopped)

        with AudioStream(self.source, look_back_s=0) as stream:
            return chunked.run(stream, open_mel, progress)


class _SharedDecoders:
    """The decoders of the lanes, as a chunked transcription uses them."""

    def __init__(self, job: Job) -> None:
        self._job, self._submitted = job, set[Future[Any]]()

    def submit(self, start: Callable[[Decoder], Steps[T]]) -> Future[T]:
        # Not all chunks that are ahead before those of other files.
        ahead_s = len(self._submitted) * CHUNK_S
        job = self._job
        future = job.lanes.submit(start, job.urgency, job.engine, yields_s=ahead_s)
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        if self._job.is_stopped:
            future.cancel()
        return future

    def cancel(self) -> None:
        """End the decodings at their next step."""
        for future in list(self._submitted):
            future.cancel()

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self.cancel()
        wait(list(self._submitted))
