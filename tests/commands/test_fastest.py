"""`export_fastest`: which targets are tried, what is chosen, and what is left behind."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport import targets
from whisperport.bundle import Bundle
from whisperport.cli.export import _print_timed, _timed_json
from whisperport.commands import fastest
from whisperport.commands.fastest import Timed, candidates, choose, export_fastest
from whisperport.errors import LoweringError, UsageError
from whisperport.exporting.export import ExportOptions
from whisperport.program.runner import Array, Runner
from whisperport.targets import RunOptions
from whisperport.verification.clips import Clip

from ..extent import EVERYTHING
from ..fake_target import FakeTarget, fake

HISS = (0.1 * np.random.default_rng(0).standard_normal(3200)).astype(np.float32)
OPTIONS = ExportOptions(clips=[Clip("hiss", "", HISS)], run=RunOptions(threads=1))


def table(**rows: dict[str, float]) -> list[Timed]:
    """The times of programs: program -> target -> milliseconds; below 0: not verified."""
    return [
        Timed(program, target, abs(ms), ms > 0)
        for program, on in rows.items()
        for target, ms in on.items()
    ]


# The choice --------------------------------------------------------------------------------------


def test_the_step_counts_as_often_as_it_runs_in_a_window() -> None:
    timed = table(encoder={"a": 100, "b": 104}, step={"a": 10.2, "b": 10})

    assert choose(timed) == {"encoder": "b", "step": "b"}


def test_a_program_leaves_the_fastest_target_only_for_a_clearly_faster_one() -> None:
    timed = table(encoder={"a": 100, "b": 96}, cross_kv={"a": 10, "b": 9}, step={"a": 10, "b": 20})

    assert choose(timed) == {"encoder": "a", "cross_kv": "b", "step": "a"}


def test_a_program_that_is_not_verified_is_not_chosen_however_fast_it_is() -> None:
    timed = table(encoder={"a": 100, "b": -1}, step={"a": 10, "b": 5})

    assert choose(timed) == {"encoder": "a", "step": "b"}


def test_without_a_target_that_has_all_programs_each_is_on_its_fastest_target() -> None:
    timed = table(encoder={"a": 100, "b": -1}, step={"a": -1, "b": 5}, align={"a": 4, "b": 3.9})

    assert choose(timed) == {"encoder": "a", "step": "b", "align": "b"}


def test_an_exempt_program_is_on_its_fastest_target_and_does_not_count_for_the_others() -> None:
    timed = table(encoder={"b": 50}, step={"a": 10, "b": 20}, align={"a": 4, "b": 3.9})

    assert choose(timed, {"encoder"}) == {"encoder": "b", "step": "a", "align": "a"}
    assert choose(timed) == {"encoder": "b", "step": "a", "align": "b"}


def test_a_program_that_is_verified_nowhere_is_an_error_that_names_it() -> None:
    with pytest.raises(LoweringError, match="`step` is verified on no target") as nowhere:
        choose(table(encoder={"a": 1}, step={"a": -1, "b": -2}))

    assert "a, b" in nowhere.value.why


def test_coarse_logits_are_chosen_if_they_are_clearly_faster_than_exact_ones() -> None:
    exact = {"encoder": {"a": 9, "b": 9}, "step": {"a": 2, "b": 1}}
    exact |= {"vocab_projection": {"a": 3, "b": 3}}

    faster = choose(table(**exact, coarse_projection={"a": 1}))
    equal = choose(table(**exact, coarse_projection={"a": 2.9}))
    wrong = choose(table(**exact, coarse_projection={"a": -1}))

    parts = {"vocab_projection": "b", "coarse_projection": "a"}
    assert faster == {"encoder": "b", "step": "b", **parts}
    assert equal == wrong == {"encoder": "b", "step": "b"}


# The candidates ----------------------------------------------------------------------------------


@pytest.mark.needs("torch")
def test_targets_that_are_installed_and_run_here_are_candidates() -> None:
    names = {target.spec.name for target in candidates()}

    assert {"onnxruntime", "xnnpack", "litert", "openvino"} <= names
    assert not names & {"hailo8", "sm8650", "genio720", "aws-neuron"}


@pytest.mark.needs("torch")
def test_a_target_without_its_runtime_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = fastest.is_installed
    monkeypatch.setattr(fastest, "is_installed", lambda x: x != "openvino" and installed(x))

    names = {target.spec.name for target in candidates()}

    assert "openvino" not in names
    assert "onnxruntime" in names


# From the checkpoint to the bundle ---------------------------------------------------------------


class Clock:
    """Replaces the module `time`; the time changes only when a program runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Ticking(Runner):
    """A runner that lets time go by when it runs another one."""

    def __init__(self, runner: Runner, clock: Clock, ms: float) -> None:
        super().__init__(runner.spec)
        self._runner, self._clock, self._ms = runner, clock, ms

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self._clock.now_s += self._ms / 1000
        return self._runner._run(inputs)


@pytest.fixture
def rivals(
    fake_targets: Any, quick_tracing: None, monkeypatch: pytest.MonkeyPatch
) -> tuple[FakeTarget, FakeTarget]:
    """Two targets that need 1 ms for a program. The encoder of the first needs 20 ms, and so does the
    step of the second, whose `align` returns wrong hidden states."""
    clock = Clock()
    slow = {"first": "encoder", "second": "step"}
    found = tuple(fake(name, fake_targets["fake"].runners) for name in slow)

    def ticking(target: FakeTarget) -> Any:
        load = target.load

        def loaded(*arguments: Any) -> dict[str, Runner]:
            return {
                name: Ticking(runner, clock, 20 if slow[target.spec.name] == name else 1)
                for name, runner in load(*arguments).items()
            }

        return loaded

    for target in found:
        monkeypatch.setattr(target, "load", ticking(target))
    found[1].wrong["align"] = {"rows": lambda rows: rows + 1}
    monkeypatch.setattr(targets, "TARGETS", found)
    monkeypatch.setattr(fastest, "is_installed", lambda _: True)
    monkeypatch.setattr(fastest, "time", clock)
    return found


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "partial" in path.name]


def test_every_program_is_on_the_target_that_is_fastest_and_right(
    micro_checkpoint: Any,
    rivals: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages: list[str] = []

    found = export_fastest(micro_checkpoint, tmp_path / "out", OPTIONS, progress=stages.append)

    manifest = Bundle.open(tmp_path / "out").manifest
    placed = {entry.spec.name: entry.target for entry in manifest.programs}
    assert placed == choose(found.timed)
    assert placed["encoder"] == "second"
    assert placed["step"] == placed["align"] == "first"
    assert manifest.verified
    measured = {(one.program, one.target): one for one in found.timed}
    assert set(measured) == {(name, t.spec.name) for name in placed for t in rivals}
    assert not measured["align", "second"].verified
    assert measured["encoder", "first"].ms == pytest.approx(20)
    assert measured["encoder", "second"].ms == pytest.approx(1)
    assert all(f"timing {program}" in stages for program in placed)
    assert hidden(tmp_path) == []

    _print_timed(found)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["encoder"].split() == ["encoder", "20.00", "ms", "1.00", "ms", "second"]
    assert "not verified" in rows["align"]
    assert len(json.loads(json.dumps(_timed_json(found)))["programs"]) == 2 * len(placed)


def test_a_program_that_the_user_places_stays_there(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    options = replace(OPTIONS, placement={"encoder": "first"})

    found = export_fastest(micro_checkpoint, tmp_path / "out", options)

    assert found.bundle.manifest.program("encoder").target == "first"
    assert ("encoder", "second") not in {(one.program, one.target) for one in found.timed}


def test_a_target_that_cannot_lower_is_named_with_its_reason(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    rivals[1].failure = LoweringError("the compiler is broken", why="of a reason")

    found = export_fastest(micro_checkpoint, tmp_path / "out", OPTIONS)

    assert found.rejected == {"second": "the compiler is broken: of a reason"}
    assert {entry.target for entry in found.bundle.manifest.programs} == {"first"}


def test_where_no_target_has_the_precision_the_error_is_that_of_the_first(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="w9"):
        export_fastest(micro_checkpoint, tmp_path / "out", replace(OPTIONS, precision="w9"))

    assert not (tmp_path / "out").exists()
    assert hidden(tmp_path) == []


def test_a_program_with_a_precision_is_measured_on_the_targets_that_have_it(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    rivals[0].spec = replace(rivals[0].spec, precisions=("fp32", "fp16"))
    options = replace(OPTIONS, precisions={"encoder": "fp16"})

    found = export_fastest(micro_checkpoint, tmp_path / "out", options)

    manifest, measured = found.bundle.manifest, {(one.program, one.target) for one in found.timed}
    encoder = manifest.program("encoder")
    assert (encoder.target, encoder.precision) == ("first", "fp16")
    assert manifest.program("cross_kv").precision == "fp32"
    assert ("encoder", "first") in measured
    assert ("encoder", "second") not in measured
    assert {("cross_kv", "first"), ("cross_kv", "second")} <= measured
    assert not found.rejected


def test_ctrl_c_leaves_no_hidden_folder_and_no_bundle(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    rivals[1].failure = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        export_fastest(micro_checkpoint, tmp_path / "out", OPTIONS)

    assert not (tmp_path / "out").exists()
    assert hidden(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"third.opset": "2"}}, r"third\.opset"),
        (
            {"precisions": {"encoder": "bf16"}},
            r"no target .* has the precision `bf16` for `encoder`",
        ),
    ],
    ids=["option", "precision"],
)
def test_what_no_target_that_may_be_used_has_is_rejected_before_any_work(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export_fastest(micro_checkpoint, tmp_path / "out", replace(OPTIONS, **changes))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="exports to four targets, and then the mix")
def test_the_targets_of_this_machine_give_a_verified_mix(
    micro_checkpoint: Any, tmp_path: Path
) -> None:
    found = export_fastest(micro_checkpoint, tmp_path / "out", OPTIONS)

    assert found.bundle.manifest.verified
    assert {one.target for one in found.timed} >= {"onnxruntime", "xnnpack", "litert", "openvino"}
    assert all(one.verified for one in found.timed)
    assert ("coarse_projection", "onnxruntime") in {(t.program, t.target) for t in found.timed}
