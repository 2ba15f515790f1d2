"""The transcription of one audio file, window by window."""

import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from whisperport.apps.serving.job import Job
from whisperport.runtime import Decoder, Steps
from whisperport.speech.audio import MelWindows
from whisperport.transcription.session import Session, SessionWindow, clip_frames


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
        engine, tokenizer = self.lanes.transcriber.engine, self.lanes.transcriber.tokenizer
        parts = clip_frames(self.options.clip_timestamps)
        self._session = session = Session(engine, tokenizer, self.options, mel, None, parts)
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
        self._decoding = decoding = self.lanes.submit(start, self.urgency)
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
