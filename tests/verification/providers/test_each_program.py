"""Programs on providers that are installed here, and on a fake one with every fault."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whisperport
from whisperport.errors import LoweringError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.execution_providers import Provider
from whisperport.targets import RunOptions
from whisperport.targets.execution_provider import ExecutionProvider
from whisperport.targets.vendors.mediatek.target import NEURON
from whisperport.verification.array_comparison import Comparison
from whisperport.verification.providers import ProviderReport, Trial, each_program
from whisperport.verification.providers.each_program import record_inputs
from whisperport.verification.providers.provider_session import _message, _repeated

from ...embedded import default_bundle
from ...extent import core_or_all

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
    """Program -> its outputs on the CPU, which all tests share."""
    return {}


@pytest.fixture
def on_provider(
    bundle: Bundle, recorded: Any, known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """`on_provider(provider, programs, options)`; inputs and outputs on the CPU are made once."""
    on_cpu = each_program._Sessions.on_cpu

    def once(sessions: Any, name: str) -> Any:
        return known.get(name) or known.setdefault(name, on_cpu(sessions, name))

    monkeypatch.setattr(each_program, "record_inputs", lambda *_: recorded)
    monkeypatch.setattr(each_program._Sessions, "on_cpu", once)
    monkeypatch.setattr(each_program, "REPEAT", 2)

    def on_provider(provider: str, programs: tuple[str, ...] = SMALL, options: str = "") -> Any:
        chosen = {
            "onnxruntime.provider": provider,
            "onnxruntime.provider-programs": ",".join(programs),
        }
        if options:
            chosen["onnxruntime.provider-options"] = options
        return whisperport.verify_each_program(bundle, RunOptions(threads=1, options=chosen))

    return on_provider


@pytest.fixture
def fake(on_provider: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As `on_provider`, on the fake provider, with a fault of `cross_kv`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(each_program, "JOB", "fake_provider:run")
    monkeypatch.setattr(Provider, "require", lambda _: pytest)  # a `__version__`

    def fake(fault: str, provider: str = FAKE, programs: tuple[str, ...] = ("cross_kv",)) -> Any:
        return on_provider(provider, programs, f"cross_kv={fault}")

    return fake


def test_the_inputs_of_all_programs_are_those_of_a_real_transcription(
    bundle: Bundle, recorded: Any
) -> None:
    _, programs = recorded

    assert set(programs) == {entry.spec.name for entry in bundle.manifest.programs}
    assert programs["encoder"].calls == programs["cross_kv"].calls == 1
    assert programs["step"].calls > 3
    assert programs["align"].calls == 0
    for entry in bundle.manifest.programs:
        for tensor in entry.spec.inputs:
            array = programs[entry.spec.name].inputs[tensor.name]
            assert (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype)
            assert array.any() or tensor.name == "mask"


def test_without_a_provider_it_says_how_to_name_one(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="no execution provider is named") as caught:
        whisperport.verify_each_program(bundle, RunOptions())

    assert "onnxruntime.provider=NAME" in caught.value.hint


def test_a_provider_that_falls_back_to_the_cpu_is_found(on_provider: Any) -> None:
    """ONNX Runtime's wheel has this provider; it runs no local node, and sessions succeed silently."""
    found = on_provider("AzureExecutionProvider", ("cross_kv",))

    (trial,) = found.trials
    assert not found
    assert not trial.failure
    assert trial.sqnr_db == math.inf
    assert trial.deviation == 0
    assert trial.on_provider == 0
    assert trial.elsewhere["MatMul"] == 3  # one product of each decoder layer is not fused
    assert "declined all nodes" in trial.why_on_cpu()
    assert found.run_options() == {}
    assert found.remarks[0].startswith("opset: 20;")


def test_a_provider_that_is_not_installed_is_an_error(on_provider: Any) -> None:
    with pytest.raises(LoweringError, match="no execution provider `FakeExecutionProvider`"):
        on_provider(FAKE)


def test_a_crash_ends_neither_the_verification_nor_the_other_programs(fake: Any) -> None:
    found = fake("crashes", programs=SMALL)

    crashed, ran = found.trials
    assert crashed.failure == "creating the session: the process was ended by signal 11 (SIGSEGV)"
    assert crashed.messages == ("two", "three", "MDLA: Cannot support Float32 input")
    assert ran
    assert found.run_options() == {
        "onnxruntime.provider": FAKE,
        "onnxruntime.provider-options": "cross_kv=crashes",
        "onnxruntime.provider-programs": "step",
    }


def test_an_exception_is_a_failure_with_its_first_line(fake: Any) -> None:
    found = fake("raises")

    (trial,) = found.trials
    assert not found
    assert trial.failure == "creating the session: RuntimeError: unordered_map::at"


def test_a_session_that_does_not_end_is_stopped(fake: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(each_program, "TIMEOUT_S", 1.0)

    found = fake("hangs")

    assert "took more than" in found.trials[0].failure


FAULTS = (("wrong", "SQNR"), ("nan", "NaN"), ("unstable", "differ between runs"))
FAULTS += (("slow", "not faster"),)


@pytest.mark.parametrize(("fault", "reason"), core_or_all(FAULTS[:1], FAULTS))
def test_a_program_that_is_wrong_unstable_or_slow_is_not_recommended(
    fake: Any, fault: str, reason: str
) -> None:
    found = fake(fault)

    assert found.run_options() == {}
    assert reason in found.trials[0].why_on_cpu()
    assert bool(found) == (fault == "slow")


def test_nodes_that_stay_on_the_cpu_are_counted_by_operator(fake: Any) -> None:
    found = fake("partly")

    (trial,) = found.trials
    assert dict(trial.elsewhere) == {"MatMul": 3}
    assert trial.on_provider > 10
    assert found.run_options()["onnxruntime.provider"] == FAKE
    json.dumps(found.to_json(), allow_nan=False)


def test_the_documented_options_are_tried_and_the_limits_are_those_of_float16(fake: Any) -> None:
    # when: an error of 1e-3 of the standard deviation, 60 dB
    found = fake("almost", NEURON.name)

    sizes = [trial.options["NEURON_FLAG_MIN_GROUP_SIZE"] for trial in found.trials]
    assert sizes == ["0", "100"]
    assert all(trial.options["NEURON_FLAG_USE_FP16"] == "1" for trial in found.trials)
    assert found.precision == "fp16"
    assert all(55 < trial.sqnr_db < 65 for trial in found.trials)
    assert "NEURON_FLAG_MIN_GROUP_SIZE=" in found.run_options()["onnxruntime.provider-options"]
    assert found.remarks == (
        "opset: 20; the provider's documentation asks for 13 or newer",
        "`cross_kv` is not a documented option of NeuronExecutionProvider; ONNX Runtime may ignore it "
        "silently",
    )


def test_a_program_that_the_bundle_does_not_have_is_an_error(on_provider: Any) -> None:
    with pytest.raises(UsageError, match="names `nothing`"):
        on_provider("AzureExecutionProvider", ("nothing",))


def test_a_message_is_shown_without_its_place_in_the_sources() -> None:
    # as ONNX Runtime 1.24 raised it for OpenVINO
    text = (
        "/onnxruntime/python/state.cc:1053 std::shared_ptr<X> onnxruntime::python::Create(const A&, "
        "const std::string&) Invalid OpenVINO EP option: nonsense\nsecond line"
    )

    assert _message(RuntimeError(text)) == "Invalid OpenVINO EP option: nonsense"
    assert _message(RuntimeError("unordered_map::at")) == "unordered_map::at"


def test_deviation_is_the_largest_difference_between_runs() -> None:
    class Session:
        runs = iter([[np.array([1.0, -4.0])], [np.array([1.5, -4.0])], [np.array([1.0, -4.0])]])

        def run(self, names: Any, feed: Any) -> Any:
            return next(self.runs)

    first = {"y": np.array([1.0, -4.0])}
    times, deviation = _repeated(Session(), ["y"], {}, first, 3)

    assert len(times) == 3
    assert deviation == 0.125


def trial_of(program: str, size: str, ms: float, sqnr_db: float = 60.0) -> Trial:
    reason = "" if sqnr_db >= 35 else "SQNR is below 35 dB"
    return Trial(
        program=program,
        options={"SIZE": size},
        calls=1 if program == "encoder" else 20,
        cpu_ms=100 if program == "encoder" else 5,
        on_provider=1,
        create_s=1,
        ms=ms,
        comparisons=(Comparison(output="y", rule="", reason=reason, sqnr_db=sqnr_db),),
        deviation=0,
    )


def test_options_with_which_a_program_is_wrong_are_not_chosen() -> None:
    """As users saw on a board: all nodes on the NPU is fast and wrong, large groups only is right."""
    tried = (
        trial_of("encoder", "0", 10, sqnr_db=3),
        trial_of("step", "0", 4),
        trial_of("encoder", "100", 60),
        trial_of("step", "100", 6),
    )
    report = ProviderReport(
        subject="tiny", provider=FAKE, version="", clip="", precision="fp16", trials=tried
    )

    often = replace(
        report, trials=tuple(replace(t, calls=max(1, t.calls * 5 - 4)) for t in report.trials)
    )

    # then: 100 - 60 against 20 times 5 - 4, and against 96 times
    assert report.run_options() == {
        "onnxruntime.provider": FAKE,
        "onnxruntime.provider-options": "SIZE=100",
        "onnxruntime.provider-programs": "encoder",
    }
    assert [trial.saved_ms for trial in report.recommended()] == [40, -20]
    assert report.recommended()[1].why_on_cpu().startswith("it is not faster")
    assert often.run_options()["onnxruntime.provider-options"] == "SIZE=0"
    assert often.run_options()["onnxruntime.provider-programs"] == "step"
    assert "SQNR" in often.recommended()[0].why_on_cpu()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"failure": "first run: x"}, "first run: x"),
        ({"on_provider": 0}, "declined all nodes"),
        ({"comparisons": ()}, "no outputs"),
        ({"comparisons": (Comparison(output="y", rule="", reason="bad"),)}, "`y`: bad"),
        ({"deviation": 0.02}, "differ between runs"),
        ({"deviation": math.nan}, "differ between runs"),
    ],
)
def test_every_fault_of_a_trial_is_named(changes: Any, fault: str) -> None:
    assert fault in replace(trial_of("step", "0", 1), **changes).fault()
    assert bool(replace(trial_of("step", "0", 1), **changes).fault()) == bool(changes)


def test_a_given_option_replaces_that_of_every_trial() -> None:
    facts = ExecutionProvider(name="P", defaults={"A": "1"}, trials=({"B": "0"}, {"B": "9"}))

    assert facts.option_sets({}) == ({"A": "1", "B": "0"}, {"A": "1", "B": "9"})
    assert facts.option_sets({"B": "5"}) == ({"A": "1", "B": "5"},)
    assert facts.option_sets({"A": "2"}) == ({"A": "2", "B": "0"}, {"A": "2", "B": "9"})


def test_what_the_documentation_excludes_is_stated() -> None:
    old, dynamic = NEURON.objections(11, {}), NEURON.objections(17, {"DynamicQuantizeLinear": 8})

    assert "13 or newer" in old[0]
    assert "onnxruntime.opset=13" in old[0]
    assert "8 DynamicQuantizeLinear nodes" in dynamic[0]
    assert "QDQ" in dynamic[0]
    assert NEURON.objections(13, {"MatMul": 3, "QuantizeLinear": 1}) == ()
