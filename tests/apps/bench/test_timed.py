"""A clock around a runner, and the acceptance table."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from whisperport.apps.bench import transcribing
from whisperport.apps.bench.acceptance import (
    TOKENS,
    AcceptanceRow,
    acceptance,
    check_accuracy,
    equal_clips,
    how_programs_run,
)
from whisperport.apps.bench.timed import MEL, Clock, TimedMel, measure
from whisperport.program.bundle import Bundle, Manifest
from whisperport.program.checks import ALL_PROGRAMS, Check
from whisperport.program.placement import Placement
from whisperport.program.runner import Binding, Part, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import Engine
from whisperport.speech.audio import MelWindows
from whisperport.targets import RunOptions, get_target
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio
from whisperport.verification.tokens import compare_tokens

from ...embedded import default_bundle

# A clock around a runner records each call, and does not change the results.


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


# The acceptance table: every value with its evidence, and no time of an emulation as that of a device.

ONE_THREAD = RunOptions(threads=1)
EMULATED = {"hailo8l.emulate": "on"}
LATENCIES = {"encoder": 40.0, "cross_kv": 5.0, "prefill_4": 6.0, "step": 2.0}
WORDS = "word error rate, 6 clips"
ON_THE_CHIP = ("encoder", "cross_kv")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(default_bundle())


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> Engine:
    return Transcriber(bundle, ONE_THREAD).engine


@pytest.fixture(scope="module")
def checks(bundle: Bundle, engine: Engine) -> tuple[Check, ...]:
    """The checks of the embedded model, which run once."""
    return check_accuracy(bundle, engine, ONE_THREAD)


@pytest.fixture(scope="module")
def with_chip(bundle: Bundle) -> Manifest:
    """The manifest as if the encoder and `cross_kv` were placed on a chip."""
    programs = tuple(
        replace(entry, placement=Placement("hailo8l", "w8a8"))
        if entry.spec.name in ON_THE_CHIP
        else entry
        for entry in bundle.manifest.programs
    )
    return replace(bundle.manifest, programs=programs)


def row(rows: Sequence[AcceptanceRow], metric: str) -> AcceptanceRow:
    """The row of a metric."""
    (found,) = [one for one in rows if one.metric == metric]
    return found


def test_latencies_are_those_of_the_programs_that_ran(bundle: Bundle) -> None:
    rows = acceptance(bundle.manifest, LATENCIES, (), {})

    assert row(rows, "encoder latency").value == 40
    assert row(rows, "cross-attention K/V latency").value == 5
    assert row(rows, "prefill latency (prefill_4)").value == 6
    assert row(rows, "token latency").value == 2
    assert {one.evidence for one in rows if one.value is not None} == {"run here"}
    assert {one.targets for one in rows if one.unit == "ms"} == {("onnxruntime",)}


def test_a_step_of_several_texts_has_a_latency_of_its_own(bundle: Bundle) -> None:
    step = bundle.manifest.program("step")
    batched = replace(step, spec=replace(step.spec, name="step_3"))
    manifest = replace(bundle.manifest, programs=(step, batched))

    rows = acceptance(manifest, {"step": 2.0, "step_3": 3.0}, (), {})

    assert row(rows, "token latency").value == 2
    assert row(rows, "token latency (step_3)").value == 3


def test_a_program_that_did_not_run_has_no_latency(bundle: Bundle) -> None:
    longer = row(acceptance(bundle.manifest, LATENCIES, (), {}), "prefill latency (prefill_64)")

    assert (longer.value, longer.evidence, longer.passed) == (None, "not run", None)


def test_the_time_of_an_emulation_is_not_that_of_the_device(with_chip: Manifest) -> None:
    rows = acceptance(with_chip, LATENCIES, (), EMULATED)

    for metric in ("encoder latency", "cross-attention K/V latency"):
        assert row(rows, metric).value is None
        assert row(rows, metric).evidence == "emulated on the CPU"
        assert row(rows, metric).targets == ("hailo8l",)
    assert row(rows, "token latency").value == 2
    assert row(rows, "token latency").evidence == "run here"


def test_on_the_device_the_same_programs_have_a_latency(with_chip: Manifest) -> None:
    rows = acceptance(with_chip, LATENCIES, (), {})

    assert set(how_programs_run(with_chip, {}).values()) == {"run here"}
    how = how_programs_run(with_chip, EMULATED)
    assert {name for name, one in how.items() if one == "emulated on the CPU"} == {*ON_THE_CHIP}
    assert row(rows, "encoder latency").value == 40
    assert row(rows, "encoder latency").evidence == "run here"


def test_the_time_in_a_simulator_is_not_that_of_the_device(
    with_chip: Manifest, checks: tuple[Check, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = type(get_target("hailo8l"))
    own = chip.run_mode

    def in_a_simulator(target, options):
        mode = own(target, options)
        return "simulator" if mode == "device" else mode

    monkeypatch.setattr(chip, "run_mode", in_a_simulator)

    rows = acceptance(with_chip, LATENCIES, checks, {})

    for metric in ("encoder latency", "cross-attention K/V latency"):
        assert row(rows, metric).value is None
        assert row(rows, metric).evidence == "simulated here"
    assert row(rows, "token latency").evidence == "run here"
    assert {row(rows, metric).evidence for metric in (TOKENS, WORDS)} == {"simulated here"}
    assert (
        row(acceptance(with_chip, {}, checks, EMULATED), TOKENS).evidence == "emulated on the CPU"
    )


def test_one_emulated_program_makes_all_tokens_and_words_emulated(
    with_chip: Manifest, checks: tuple[Check, ...]
) -> None:
    rows = acceptance(with_chip, LATENCIES, checks, EMULATED)

    for metric in (TOKENS, WORDS):
        assert row(rows, metric).evidence == "emulated on the CPU"
        assert row(rows, metric).targets == ("hailo8l", "onnxruntime")
        assert row(rows, metric).passed is True


def test_the_embedded_model_has_the_tokens_and_the_words_of_its_reference(
    bundle: Bundle, checks: tuple[Check, ...]
) -> None:
    rows = acceptance(bundle.manifest, LATENCIES, checks, {})

    tokens, words = row(rows, TOKENS), row(rows, WORDS)
    assert (tokens.value, tokens.reference, tokens.passed) == (6, 6, True)
    assert (words.value, words.passed) == (words.reference, True)
    assert tokens.rule == "the same tokens from first to last"
    assert words.rule.startswith("WER at most 0.1% above the reference's")


def test_accuracy_is_measured_and_not_read_from_the_manifest(
    bundle: Bundle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: no features, as those of a bad compilation could be. A wrong order of the frames would not be
    # enough: cross-attention sums over all frames, and its result does not depend on their order.
    encode = type(engine).encode
    monkeypatch.setattr(type(engine), "encode", lambda self, mel: 0 * encode(self, mel))

    found = check_accuracy(bundle, engine, ONE_THREAD)
    rows = acceptance(bundle.manifest, {}, found, {})

    assert row(rows, TOKENS).passed is False
    assert row(rows, TOKENS).value is not None
    assert (row(rows, TOKENS).value or 0) < 6
    assert "is the first to differ" in row(rows, TOKENS).reason
    assert row(rows, WORDS).passed is False
    assert row(rows, WORDS).value != row(rows, WORDS).reference


def free(actual: Sequence[int], expected: Sequence[int], **changes: Any) -> Check:
    compared = compare_tokens(actual, expected)
    return replace(Check.of("tokens", ALL_PROGRAMS, "clip, free", compared), **changes)


@pytest.mark.parametrize("actual", [(1, 2), (1, 2, 3, 4), (1, 5, 3), ()])
def test_tokens_are_equal_only_from_first_to_last(actual: tuple[int, ...]) -> None:
    same, other = free((1, 2, 3), (1, 2, 3)), free(actual, (1, 2, 3))

    assert equal_clips([same, other]) == (1, 2)
    assert equal_clips([]) == (0, 0)


def test_at_low_precision_a_clip_that_differs_is_still_counted_as_different(bundle: Bundle) -> None:
    reported = free((1, 2), (1, 2, 3), passed=True, reason="", rule="reported only")

    tokens = row(acceptance(bundle.manifest, {}, [reported], {}), TOKENS)

    assert (tokens.value, tokens.reference, tokens.passed) == (0, 1, True)


def test_nothing_compared_is_not_a_pass(bundle: Bundle) -> None:
    tokens = row(acceptance(bundle.manifest, {}, (), {}), TOKENS)

    assert (tokens.value, tokens.reference, tokens.passed) == (None, None, None)
    assert tokens.evidence == "not run"


def test_a_program_that_returns_nan_fails_without_a_value(bundle: Bundle) -> None:
    broken = Check(
        level="words",
        program="step",
        what="transcripts",
        value={},
        rule="every value is a finite number",
        passed=False,
        reason="step returned NaN",
    )

    found = row(acceptance(bundle.manifest, {}, [broken], {}), "transcripts")

    assert (found.value, found.reference, found.passed) == (None, None, False)
    assert found.reason == "step returned NaN"


def test_accuracy_is_checked_once_after_the_last_round(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bool] = []

    def one_round(*arguments: Any) -> transcribing._Round:
        checked.append(arguments[-1])
        calls = {transcribing.LOAD: [0.1]}
        return transcribing._Round(calls, 1.0, 1.0, "", "en")

    monkeypatch.setattr(transcribing, "_one_round", one_round)
    monkeypatch.setattr(transcribing, "peak_memory_mib", lambda *_, **__: None)

    transcribing.run_bench([bundle], Path("talk.wav"), transcribing.BenchOptions(repeat=3))

    assert checked == [False, False, True]
