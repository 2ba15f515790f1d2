"""A probe on providers that are installed here, and on a fake one with every fault."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whisperport
from whisperport.bundle import Bundle
from whisperport.errors import LoweringError, UsageError
from whisperport.probing import Attempt, NodeCount, ProbeOptions, attempts, bundle_probe
from whisperport.probing.choice import choose
from whisperport.probing.inputs import record_inputs
from whisperport.probing.session import _message, _repeated
from whisperport.targets import RunOptions
from whisperport.targets.execution_provider import ExecutionProvider
from whisperport.targets.mediatek.neuron_provider import NEURON
from whisperport.verification.compare import Comparison

from ..embedded import default_bundle
from ..extent import core_or_all

CPU = "CPUExecutionProvider"
FAKE = "FakeExecutionProvider"
SMALL = ("cross_kv", "step")  # the programs whose sessions are fast


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(default_bundle())


@pytest.fixture(scope="module")
def recorded(bundle: Bundle) -> Any:
    return record_inputs(bundle, RunOptions())


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """Program -> its attempt on the CPU, which all tests share."""
    return {}


@pytest.fixture
def probe(
    bundle: Bundle, recorded: Any, known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """`probe(provider, programs, **options)`; inputs and attempts on the CPU are made once."""
    on_cpu = bundle_probe._on_cpu

    def once(setup: Any, name: str, progress: Any) -> Any:
        return known.get(name) or known.setdefault(name, on_cpu(setup, name, progress))

    monkeypatch.setattr(bundle_probe, "record_inputs", lambda *_: recorded)
    monkeypatch.setattr(bundle_probe, "_on_cpu", once)

    def probe(provider: str, programs: tuple[str, ...] = SMALL, **options: Any) -> Any:
        chosen = ProbeOptions(**{"programs": programs, "repeat": 2, "threads": 1, **options})
        return whisperport.probe(bundle, provider, chosen)

    return probe


@pytest.fixture
def fake(probe: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As `probe`, on the fake provider."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(attempts, "JOB", "fake_provider:run")
    monkeypatch.setattr(bundle_probe, "require_provider", lambda _: pytest)  # a `__version__`
    return lambda provider=FAKE, **options: probe(provider, **options)


def test_the_inputs_of_all_programs_are_those_of_a_real_transcription(
    bundle: Bundle, recorded: Any
) -> None:
    # when
    _, programs = recorded

    # then
    assert set(programs) == {entry.spec.name for entry in bundle.manifest.programs}
    assert programs["encoder"].calls == programs["cross_kv"].calls == 1
    assert programs["step"].calls > 3
    assert programs["align"].calls == 0
    for entry in bundle.manifest.programs:
        for tensor in entry.spec.inputs:
            array = programs[entry.spec.name].inputs[tensor.name]
            assert (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype)
            assert array.any() or tensor.name == "mask"


def test_the_cpu_provider_equals_itself_and_is_not_recommended(probe: Any) -> None:
    # when
    found = probe(CPU, ("cross_kv",))

    # then
    (attempt,) = found.attempts
    assert found
    assert attempt.status == "ran"
    assert attempt.on_provider > 0
    assert not attempt.elsewhere
    assert attempt.identical
    assert attempt.sqnr_db == math.inf
    assert found.choice.programs == ()
    assert "itself" in found.choice.because["cross_kv"]
    assert found.opsets == {"cross_kv": 20}


def test_a_provider_that_falls_back_to_the_cpu_is_found(probe: Any) -> None:
    """ONNX Runtime's wheel has this provider; it runs no local node, and sessions succeed silently."""
    # when
    found = probe("AzureExecutionProvider", ("cross_kv",))

    # then
    (attempt,) = found.attempts
    assert not found
    assert attempt.status == "ran"
    assert attempt.on_provider == 0
    assert attempt.elsewhere["MatMul"] == 3  # one product of each decoder layer is not fused
    assert "declined all nodes" in found.choice.because["cross_kv"]


def test_a_provider_that_is_not_installed_is_an_error(probe: Any) -> None:
    with pytest.raises(LoweringError, match="no execution provider `FakeExecutionProvider`"):
        probe(FAKE)


def test_a_crash_ends_neither_the_probe_nor_the_other_programs(fake: Any) -> None:
    # when
    found = fake(provider_options={"cross_kv": "crashes"})

    # then
    crashed, ran = found.attempts
    assert crashed.status == "crashed"
    assert crashed.reason == "creating the session: it crashed with SIGSEGV"
    assert crashed.messages == ("two", "three", "MDLA: Cannot support Float32 input")
    assert ran.status == "ran"
    assert found.choice.programs == ("step",)
    assert "SIGSEGV" in found.choice.because["cross_kv"]


def test_an_exception_is_a_failure_with_its_first_line(fake: Any) -> None:
    # when
    found = fake(provider_options={"cross_kv": "raises"}, programs=("cross_kv",))

    # then
    (attempt,) = found.attempts
    assert not found
    assert attempt.status == "failed"
    assert attempt.reason == "creating the session: RuntimeError: unordered_map::at"


def test_a_session_that_does_not_end_is_stopped(fake: Any) -> None:
    # when
    found = fake(provider_options={"cross_kv": "hangs"}, programs=("cross_kv",), timeout_s=1)

    # then
    assert found.attempts[0].status == "crashed"
    assert "took more than" in found.attempts[0].reason


FAULTS = (("wrong", "SQNR"), ("nan", "NaN"), ("unstable", "differ between runs"))
FAULTS += (("slow", "not faster"),)


@pytest.mark.parametrize(("fault", "reason"), core_or_all(FAULTS[:1], FAULTS))
def test_a_program_that_is_wrong_unstable_or_slow_is_not_recommended(
    fake: Any, fault: str, reason: str
) -> None:
    # when
    found = fake(provider_options={"cross_kv": fault}, programs=("cross_kv",))

    # then
    assert found.choice.programs == ()
    assert reason in found.choice.because["cross_kv"]
    assert bool(found) == (fault == "slow")


def test_nodes_that_stay_on_the_cpu_are_counted_by_operator(fake: Any) -> None:
    # when
    found = fake(provider_options={"cross_kv": "partly"}, programs=("cross_kv",))

    # then
    (attempt,) = found.attempts
    assert dict(attempt.elsewhere) == {"MatMul": 3}
    assert attempt.on_provider > 10
    assert found.choice.programs == ("cross_kv",)
    json.dumps(found.to_json(), allow_nan=False)


def test_the_documented_options_are_tried_and_the_limits_are_those_of_float16(fake: Any) -> None:
    # when: an error of 1e-3 of the standard deviation, 60 dB
    found = fake(NEURON.name, provider_options={"cross_kv": "almost"}, programs=("cross_kv",))

    # then
    sizes = [attempt.options["NEURON_FLAG_MIN_GROUP_SIZE"] for attempt in found.attempts]
    assert sizes == ["0", "100"]
    assert all(attempt.options["NEURON_FLAG_USE_FP16"] == "1" for attempt in found.attempts)
    assert found.precision == "fp16"
    assert all(55 < attempt.sqnr_db < 65 for attempt in found.attempts)
    assert found.choice.programs == ("cross_kv",)
    assert (found.min_opset, found.objections) == (13, {})
    assert found.notes == (
        "`cross_kv` is not a documented option of NeuronExecutionProvider; ONNX Runtime may ignore it "
        "silently",
    )


def test_a_program_that_the_bundle_does_not_have_is_an_error(probe: Any) -> None:
    with pytest.raises(UsageError, match="no program `nothing`"):
        probe(CPU, ("nothing",))


def test_a_message_is_shown_without_its_place_in_the_sources() -> None:
    # as ONNX Runtime 1.24 raised it for OpenVINO
    text = (
        "/onnxruntime/python/state.cc:1053 std::shared_ptr<X> onnxruntime::python::Create(const A&, "
        "const std::string&) Invalid OpenVINO EP option: nonsense\nsecond line"
    )

    assert _message(RuntimeError(text)) == "Invalid OpenVINO EP option: nonsense"
    assert _message(RuntimeError("unordered_map::at")) == "unordered_map::at"


def test_deviation_is_the_largest_difference_between_runs() -> None:
    # given
    class Session:
        runs = iter([[np.array([1.0, -4.0])], [np.array([1.5, -4.0])], [np.array([1.0, -4.0])]])

        def run(self, names: Any, feed: Any) -> Any:
            return next(self.runs)

    # when
    first = {"y": np.array([1.0, -4.0])}
    times, deviation, identical = _repeated(Session(), ["y"], {}, first, 3)

    # then
    assert len(times) == 3
    assert deviation == 0.125
    assert not identical


def attempt_of(program: str, size: str, ms: float, sqnr_db: float = 60.0) -> Attempt:
    reason = "" if sqnr_db >= 35 else "SQNR is below 35 dB"
    return Attempt(
        program=program,
        provider=FAKE,
        options={"SIZE": size},
        status="ran",
        nodes=(NodeCount(provider=FAKE, operator="fused", count=1, ms=ms),),
        create_s=1,
        ms=ms,
        comparisons=(Comparison(output="y", rule="", reason=reason, sqnr_db=sqnr_db),),
        deviation=0,
        identical=True,
    )


def test_options_with_which_a_program_is_wrong_are_not_chosen() -> None:
    """As users saw on a board: all nodes on the NPU is fast and wrong, large groups only is right."""
    # given
    tried = [
        attempt_of("encoder", "0", 10, sqnr_db=3),
        attempt_of("step", "0", 4),
        attempt_of("encoder", "100", 60),
        attempt_of("step", "100", 6),
    ]
    cpu = {name: attempt_of(name, "", ms) for name, ms in (("encoder", 100), ("step", 5))}
    cpu = {
        name: Attempt(program=name, provider=CPU, status="ran", ms=a.ms) for name, a in cpu.items()
    }

    # when
    choice = choose(tried, cpu, {"encoder": 1, "step": 20}, 1e-2)
    per_token = choose(tried, cpu, {"encoder": 1, "step": 100}, 1e-2)

    # then: 100 - 60 against 20 times 5 - 4, and against 100 times
    assert choice.options == {"SIZE": "100"}
    assert choice.programs == ("encoder",)
    assert choice.saved_ms == 40
    assert choice.because["step"].startswith("it is not faster")
    assert per_token.options == {"SIZE": "0"}
    assert per_token.programs == ("step",)
    assert "SQNR" in per_token.because["encoder"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"status": "failed", "reason": "x"}, "it failed: x"),
        ({"nodes": ()}, "declined all nodes"),
        ({"comparisons": ()}, "no outputs"),
        ({"comparisons": (Comparison(output="y", rule="", reason="bad"),)}, "`y`: bad"),
        ({"deviation": 0.02}, "differ between runs"),
        ({"deviation": math.nan}, "differ between runs"),
    ],
)
def test_every_fault_of_an_attempt_is_named(changes: Any, fault: str) -> None:
    assert fault in replace(attempt_of("step", "0", 1), **changes).fault(1e-2)
    assert bool(replace(attempt_of("step", "0", 1), **changes).fault(1e-2)) == bool(changes)


def test_a_given_option_replaces_that_of_every_trial() -> None:
    # given
    facts = ExecutionProvider(name="P", defaults={"A": "1"}, trials=({"B": "0"}, {"B": "9"}))

    # then
    assert facts.option_sets({}) == ({"A": "1", "B": "0"}, {"A": "1", "B": "9"})
    assert facts.option_sets({"B": "5"}) == ({"A": "1", "B": "5"},)
    assert facts.option_sets({"A": "2"}) == ({"A": "2", "B": "0"}, {"A": "2", "B": "9"})


def test_what_the_documentation_excludes_is_stated() -> None:
    # when
    old, dynamic = NEURON.objections(11, {}), NEURON.objections(17, {"DynamicQuantizeLinear": 8})

    # then
    assert "13 or newer" in old[0]
    assert "onnxruntime.opset=13" in old[0]
    assert "8 DynamicQuantizeLinear nodes" in dynamic[0]
    assert "QDQ" in dynamic[0]
    assert NEURON.objections(13, {"MatMul": 3, "QuantizeLinear": 1}) == ()
