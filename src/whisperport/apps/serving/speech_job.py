"""The transcription of one audio file in chunks of speech, which the lanes decode."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar

from whisperport.apps.serving.job import Job
from whisperport.runtime import Decoder, Steps
from whisperport.speech.audio import AudioStream, MelWindows
from whisperport.transcription import Transcript
from whisperport.transcription.speech_pipeline import ChunkedTranscription

T = TypeVar("T")

CHUNK_S = 1.0  # about the time to decode a chunk


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
        transcriber = self.lanes.transcriber
        assert self.options.vad is not None
        decoders = _SharedDecoders(self)
        parts = transcriber.engine, transcriber.tokenizer, self.options, self.options.vad, None
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
        future = self._job.lanes.submit(start, self._job.urgency, yields_s=ahead_s)
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
