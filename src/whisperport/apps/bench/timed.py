"""Measure the time of a function, and of those that a transcription calls, without changing them."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from whisperport.program.dims import Dims
from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.runtime import Floats
from whisperport.speech.audio import AudioSource, MelWindows


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of `n` runs after the warm-up, in milliseconds."""

    median_ms: float
    best_ms: float
    p90_ms: float  # 90th percentile
    n: int


def measure(run: Callable[[], object], *, warmup: int = 2, n: int = 10) -> Timing:
    """Measure the time of `run`, which must not return before its result is ready.

    Args:
        warmup: number of runs before the measured ones.
        n: number of measured runs.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"`n` is {n}; expected 1 or more")
    for _ in range(warmup):
        run()
    times = sorted(_milliseconds(run) for _ in range(n))
    return Timing(statistics.median(times), times[0], times[min(n - 1, round(0.9 * n))], n)


def _milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


MEL = "mel"

Now = Callable[[], float]
"""Returns the current time in seconds since any fixed moment, such as `time.perf_counter`."""


class Clock:
    """Records how long every call took, and how much CPU time the process used meanwhile.

    Args:
        now: the time.
        cpu_now: the CPU time of the process; by default, user and system time of all threads.
    """

    def __init__(self, now: Now = time.perf_counter, cpu_now: Now = time.process_time) -> None:
        self.now, self.cpu_now = now, cpu_now
        self._laps: list[tuple[str, float, float]] = []

    @property
    def calls(self) -> dict[str, list[float]]:
        """Name of what was called -> seconds of each call."""
        return self._by_name(1)

    @property
    def cpu(self) -> dict[str, list[float]]:
        """Name of what was called -> seconds of CPU time in each call."""
        return self._by_name(2)

    def record(self, name: str, seconds: float, cpu_seconds: float) -> None:
        """Record one call."""
        self._laps.append((name, seconds, cpu_seconds))

    def timing(self, name: str) -> AbstractContextManager[None]:
        """Measure the time of a `with` block. A block that raises is counted too."""
        return _Timing(self, name)

    def reset(self) -> None:
        """Remove all recorded calls, such as those of a warm-up."""
        self._laps = []

    def wrap_runner(self, runner: Runner) -> Runner:
        """Return a runner that runs `runner` and records its calls under the program's name."""
        return _TimedRunner(runner, self)

    def _by_name(self, index: int) -> dict[str, list[float]]:
        laps: dict[str, list[float]] = {}
        for lap in self._laps:
            laps.setdefault(lap[0], []).append(float(lap[index]))
        return laps


class _Timing:
    """Measures one call. It is not a generator: that would take longer, which is measured too."""

    __slots__ = ("_clock", "_name", "_started", "_used")

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._used = self._clock.cpu_now()
        self._started = self._clock.now()

    def __exit__(self, *error: object) -> None:
        clock = self._clock
        seconds = clock.now() - self._started
        clock.record(self._name, seconds, clock.cpu_now() - self._used)


class _TimedRunner(Runner):
    """A runner that measures another one. The time of checking and copying inputs is not included."""

    def __init__(self, timed: Runner, clock: Clock) -> None:
        super().__init__(timed.spec, timed.run_lock)
        self._timed, self._clock = timed, clock
        self.free_axes, self.writes_in_place = timed.free_axes, timed.writes_in_place

    def _run_into(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        with self._clock.timing(self.spec.name):
            self._timed._run_into(inputs, outputs)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        with self._clock.timing(self.spec.name):
            return self._timed._run(inputs)

    def binding(self) -> Binding:
        return _TimedBinding(self, self._timed.binding(), self._clock)


class _TimedBinding(Binding):
    """A binding that measures the target's own binding."""

    def __init__(self, runner: Runner, timed: Binding, clock: Clock) -> None:
        super().__init__(runner)
        self._timed, self._clock = timed, clock

    @property
    def copies(self) -> bool:
        return self._timed.copies

    def changed(self, name: str, part: Part) -> None:
        self._timed.changed(name, part)

    def _bind(self, name: str, array: Array) -> None:
        self._timed.bind(name, array)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        with self._clock.timing(self.runner.spec.name):
            return self._timed._run(inputs)


class TimedMel(MelWindows):
    """The spectrogram of an audio file; the time of decoding audio and of computing mel counts as `mel`."""

    def __init__(self, source: AudioSource, dims: Dims, clock: Clock) -> None:
        self._clock = clock
        with clock.timing(MEL):
            super().__init__(source, dims.n_mels, dims.n_frames)

    def window(self, start: int, n_frames: int | None = None) -> tuple[Floats, int]:
        with self._clock.timing(MEL):
            return super().window(start, n_frames)
