"""Put a clock around what a transcription calls, so that none of it knows that it is timed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from whisperport.audio import AudioSource, RecordingMel
from whisperport.dims import Dims
from whisperport.runner import Array, Binding, Part, Runner
from whisperport.runtime import Floats

MEL = "mel"

Now = Callable[[], float]
"""Seconds from a fixed moment on."""


class Clock:
    """Seconds of every call, by the name of what was called."""

    def __init__(self, now: Now = time.perf_counter) -> None:
        self.now = now
        self.calls: dict[str, list[float]] = {}

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Time one call; one that raises counts too, for its time is gone."""
        started = self.now()
        try:
            yield
        finally:
            self.calls.setdefault(name, []).append(self.now() - started)

    def reset(self) -> None:
        """Forget all calls, such as those of a warm-up."""
        self.calls = {}

    def wrap_runner(self, runner: Runner) -> Runner:
        """`runner`, timed under its program's name."""
        return _TimedRunner(runner, self)


class _TimedRunner(Runner):
    """Checking and copying the inputs happen before `_run`, and so count as Python's time."""

    def __init__(self, timed: Runner, clock: Clock) -> None:
        super().__init__(timed.spec, timed.turn)
        self._timed, self._clock = timed, clock

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        with self._clock.timing(self.spec.name):
            return self._timed._run(inputs)

    def binding(self) -> Binding:
        return _TimedBinding(self, self._timed.binding(), self._clock)


class _TimedBinding(Binding):
    """The target's own binding, timed."""

    def __init__(self, runner: Runner, timed: Binding, clock: Clock) -> None:
        super().__init__(runner)
        self._timed, self._clock = timed, clock

    def changed(self, name: str, part: Part) -> None:
        self._timed.changed(name, part)

    def _bind(self, name: str, array: Array) -> None:
        self._timed.bind(name, array)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        with self._clock.timing(self.runner.spec.name):
            return self._timed._run(inputs)


class TimedMel(RecordingMel):
    """A recording's spectrogram whose decoding, first pass and windows are timed as `mel`."""

    def __init__(self, source: AudioSource, dims: Dims, clock: Clock) -> None:
        self._clock = clock
        with clock.timing(MEL):
            super().__init__(source, dims.n_mels, dims.n_frames)

    def window(self, start: int) -> tuple[Floats, int]:
        with self._clock.timing(MEL):
            return super().window(start)
