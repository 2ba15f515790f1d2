"""A clock around a runner records each call, and does not change the results."""

import time
from threading import Thread

import numpy as np
import pytest

from whisperport.apps.bench.measure import measure
from whisperport.apps.bench.timed import MEL, Clock, TimedMel
from whisperport.program.bundle import Bundle
from whisperport.program.runner import Binding, Part, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.speech.audio import MelWindows
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle


class Time:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Doubles(Runner):
    """Doubles x in two seconds of `time`; rejects a negative x."""

    def __init__(self, time: Time) -> None:
        tensor = TensorSpec("x", (2,))
        super().__init__(ProgramSpec("doubles", (tensor,), (TensorSpec("y", (2,)),)))
        self._time = time

    def _run(self, inputs):  # type: ignore[no-untyped-def]
        self._time.seconds += 2.0
        if inputs[0].min() < 0:
            raise RuntimeError("negative")
        return [2 * inputs[0]]


def test_every_call_is_timed_under_the_name_of_its_program() -> None:
    time = Time()
    clock = Clock(time)
    runner = clock.wrap_runner(Doubles(time))

    outputs = [runner.run({"x": np.ones(2, np.float32)})["y"] for _ in range(3)]

    assert clock.calls == {"doubles": [2.0, 2.0, 2.0]}
    assert clock.cpu.keys() == clock.calls.keys()
    assert all(np.array_equal(y, [2, 2]) for y in outputs)


def test_a_timed_program_waits_for_the_same_turn_as_the_program_itself() -> None:
    runner = Doubles(Time())

    assert Clock().wrap_runner(runner).run_lock is runner.run_lock


def test_a_call_that_fails_fails_as_before_and_is_timed_too() -> None:
    time = Time()
    clock = Clock(time)
    runner = clock.wrap_runner(Doubles(time))

    with pytest.raises(RuntimeError, match="negative"):
        runner.run({"x": -np.ones(2, np.float32)})

    assert clock.calls == {"doubles": [2.0]}


def test_an_input_of_another_shape_is_refused_before_the_clock_starts() -> None:
    time = Time()
    clock = Clock(time)

    with pytest.raises(ValueError, match="expects 'x'"):
        clock.wrap_runner(Doubles(time)).run({"x": np.ones(3, np.float32)})

    assert clock.calls == {}


def test_a_timed_program_keeps_what_is_bound_where_the_program_itself_keeps_it() -> None:
    """Checks that nothing is bound twice, and records reported changes."""
    time = Time()
    clock = Clock(time)
    runner = Keeps(time)
    state = np.ones(2, np.float32)
    binding = clock.wrap_runner(runner).binding()

    binding.bind("self_k_0", state)
    first = binding.run({})
    state[1] = 5
    binding.changed("self_k_0", np.s_[1:])
    second = binding.run({})

    assert binding.copies
    assert not clock.wrap_runner(Doubles(time)).binding().copies
    assert [list(outputs["y"]) for outputs in (first, second)] == [[1, 1], [1, 5]]
    assert runner.log == ["bind self_k_0", "changed self_k_0"]
    assert clock.calls == {"keeps": [2.0, 2.0]}


class Keeps(Runner):
    """A runner that returns the state in its bindings."""

    def __init__(self, time: Time) -> None:
        tensor = TensorSpec("self_k_0", (2,))
        super().__init__(ProgramSpec("keeps", (tensor,), (TensorSpec("y", (2,)),)))
        self.time, self.log = time, []

    def binding(self) -> Binding:
        return KeepsBinding(self)

    def _run(self, inputs):  # type: ignore[no-untyped-def]
        raise AssertionError("a binding runs by itself")


class KeepsBinding(Binding):
    def _bind(self, name: str, array: np.ndarray) -> None:
        self.runner.log.append(f"bind {name}")
        self.host, self.device = array, array.copy()

    def changed(self, name: str, part: Part) -> None:
        self.runner.log.append(f"changed {name}")
        self.device[part] = self.host[part]

    def _run(self, inputs):  # type: ignore[no-untyped-def]
        self.runner.time.seconds += 2.0
        return [self.device.copy()]


def test_a_reset_clock_has_seen_nothing() -> None:
    clock = Clock()
    with clock.timing("warm-up"):
        pass

    clock.reset()

    assert clock.calls == {}
    assert clock.cpu == {}


def test_cpu_time_is_that_of_all_threads_and_not_of_waiting() -> None:
    clock = Clock()

    def work() -> None:
        ones = np.ones((300, 300))
        while clock.cpu_now() - started < 0.2:
            ones = ones @ ones / 300  # NumPy releases Python's lock meanwhile

    with clock.timing("waits"):
        time.sleep(0.1)
    started = clock.cpu_now()
    with clock.timing("works in a thread"):
        thread = Thread(target=work)
        thread.start()
        thread.join()

    assert clock.cpu["waits"][0] < 0.05 < clock.calls["waits"][0]
    assert clock.cpu["works in a thread"][0] >= 0.19


def test_a_timed_spectrogram_is_the_same_spectrogram() -> None:
    dims = Bundle.open(default_bundle(), check_hashes=False).manifest.dims
    recording, clock = shipped_audio()[0].path, Clock()

    plain = MelWindows(recording, dims.n_mels, dims.n_frames)
    timed = TimedMel(recording, dims, clock)
    windows = [mel.window(0) for mel in (plain, timed)]
    plain.close()
    timed.close()

    assert np.array_equal(windows[0][0], windows[1][0])
    assert windows[0][1] == windows[1][1]
    assert len(clock.calls[MEL]) == 2  # opened, with its first pass, and one window


# The time of n runs after a warm-up.


def test_it_runs_as_often_as_it_says() -> None:
    runs: list[None] = []

    timing = measure(lambda: runs.append(None), warmup=3, n=7)

    assert len(runs) == 10
    assert timing.n == 7


def test_the_warm_up_is_not_counted() -> None:
    slow = iter([0.05, 0.05])

    timing = measure(lambda: time.sleep(next(slow, 0.0)), warmup=2, n=5)

    assert timing.best_ms <= timing.median_ms <= timing.p90_ms < 50


def test_milliseconds_are_milliseconds() -> None:
    timing = measure(lambda: time.sleep(0.01), warmup=0, n=3)

    assert timing.best_ms >= 10


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="`n` is 0"):
        measure(lambda: None, n=0)
