"""What the parts of a server share: the bundle, the scheduler, the options, the metrics, the readiness."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from threading import Lock

import numpy as np

from whisperport.apps.serving.keys import ClientSecrets
from whisperport.apps.serving.lanes import Urgency
from whisperport.apps.serving.metrics import Metrics
from whisperport.apps.serving.realtime.settings import Settings
from whisperport.apps.serving.scheduler import Scheduler
from whisperport.apps.serving.serve_options import ServeOptions
from whisperport.apps.serving.turns import Turns
from whisperport.program.bundle.folder import read_manifest_bytes
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.transcription import TranscribeOptions, Transcriber

FRESH_S = 30.0  # a window that was decoded so recently is enough
CLIP = np.zeros(SAMPLE_RATE, np.float32)  # 1 s
ALIAS = "whisper-1"  # OpenAI's name, which existing programs ask for


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


class Service:
    """A loaded bundle that is served.

    Args:
        transcriber: the loaded bundle.
        options: of the server.

    Attributes:
        scheduler: decodes the windows of all requests.
        metrics: what is counted.
        readiness: whether a clip can be decoded.
        model_ids: names by which clients may ask for the model; the first is shown.
        transcribers: by these names: the bundle without an adapter, and behind a colon with one.
        about: name, hash and back end of the bundle.
        client_secrets: keys of pages, each with the settings of its realtime sessions.
        turns: in which what clients send is parsed.
        created: when the bundle was written, in seconds since 1970.
    """

    def __init__(self, transcriber: Transcriber, options: ServeOptions) -> None:
        self.transcriber, self.options = transcriber, options
        self.scheduler = Scheduler(
            transcriber,
            max_queue_s=options.max_queue_seconds,
            max_requests=options.max_requests,
            longest_s=options.max_audio_seconds,
            batch=options.batch,
        )
        self.readiness = Readiness(self.scheduler)
        bundle = transcriber.bundle
        name = str(bundle.manifest.source.get("name") or bundle.folder.name)
        self.model_ids = tuple(
            dict.fromkeys((options.model_id or name, name, ALIAS, *options.aliases))
        )
        targets = {entry.placement.target for entry in bundle.manifest.programs}
        self.about = {
            "bundle": bundle.manifest.name,
            "sha256": hashlib.sha256(read_manifest_bytes(bundle.folder)).hexdigest(),
            "backend": ", ".join(sorted(targets)),
        }
        self.transcribers = dict.fromkeys(self.model_ids, transcriber)
        self.transcribers |= {
            f"{self.model_ids[0]}:{own}": transcriber.adapted(folder)
            for own, folder in options.adapters.items()
        }
        self.model_ids = tuple(self.transcribers)
        self.created = int(bundle.folder.stat().st_mtime)
        self.metrics = Metrics()
        self.turns = Turns()
        self.client_secrets = ClientSecrets[Settings]()
        self._describe()

    @contextmanager
    def request(self) -> Iterator[object]:
        """Accept a request that may have a file, and count it to the last byte of its answer.

        Yields:
            What the scheduler's `transcribe` knows it by (`admitted`).

        Raises:
            QueueFullError: there are too many, there is too much work, or the server is shutting down.
        """
        request = object()
        self.scheduler.admission.enter(request)
        try:
            yield request
        finally:
            self.scheduler.admission.leave(request)

    def _describe(self) -> None:
        admission, began = self.scheduler.admission, time.time()
        self.metrics.describe(**self.about, version=version("whisperport"))
        for name, about, value in (
            (
                "requests_running",
                "Requests from the first byte to the last",
                lambda: admission.requests,
            ),
            (
                "requests_waiting",
                "Windows that wait for a decoder",
                lambda: self.scheduler.lanes.waiting,
            ),
            (
                "audio_seconds_waiting",
                "Audio that is not transcribed yet",
                lambda: admission.audio_s,
            ),
            ("audio_seconds_per_second", "Measured speed", lambda: admission.speed.audio_s_per_s),
            (
                "batch_rows",
                "Windows that can be decoded together",
                lambda: self.scheduler.lanes.rows,
            ),
            ("start_time_seconds", "When the server began", lambda: began),
        ):
            self.metrics.gauge(name, about, value)
