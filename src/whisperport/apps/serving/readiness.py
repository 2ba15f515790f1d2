"""Whether a server can decode: a window was decoded lately, or a short clip is now."""

import time
from threading import Lock

import numpy as np

from whisperport.apps.serving.lanes import Urgency
from whisperport.apps.serving.scheduler import Scheduler
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.transcription import TranscribeOptions

FRESH_S = 30.0  # a window that was decoded so recently is enough
CLIP = np.zeros(SAMPLE_RATE, np.float32)  # 1 s


class Readiness:
    """Decodes a clip when nothing else was decoded lately.

    Args:
        scheduler: of the server.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._checking = Lock()  # calls during a check wait for its outcome

    @property
    def is_fresh(self) -> bool:
        """Whether a window was decoded lately."""
        last = self._scheduler.lanes.last_decoded
        return last is not None and time.monotonic() - last < FRESH_S

    def check(self, timeout_s: float) -> bool:
        """Return whether the server can decode and accepts requests.

        Args:
            timeout_s: how long another check may still take, and then the decoding of a clip, in seconds.
        """
        if not self._checking.acquire(timeout=timeout_s):
            return False
        try:
            return not self._scheduler.admission.closed and (
                self.is_fresh or self._can_decode(timeout_s)
            )
        finally:
            self._checking.release()

    def _can_decode(self, timeout_s: float) -> bool:
        language = next(iter(self._scheduler.lanes.transcriber.engine.generation.languages), None)
        options = TranscribeOptions(
            decode=DecodeOptions(language=language, max_tokens=4), temperatures=(0.0,)
        )
        try:
            future = self._scheduler.transcribe(CLIP, options, urgency=Urgency.LIVE)
            future.result(timeout_s)
        except Exception:  # of any kind: the server cannot decode
            return False
        return True
