"""`export_best` with the target "auto": what is tried, what is chosen, and what is left behind."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from whisperport import targets
from whisperport.apps.cli.export import _print_timed, _timed_json
from whisperport.apps.cli.model_option import bundle_of_model
from whisperport.build.export import bundle_cache
from whisperport.build.export.bundle_cache import BATCH, bundle_of, cached_bundle
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.exported import Candidate, Exported, Timed
from whisperport.build.search import fastest, timing
from whisperport.build.search.fastest import candidates, choose
from whisperport.build.search.search import export_best
from whisperport.errors import LoweringError, UsageError, VerificationError, WhisperportError
from whisperport.model import checkpoint as model_checkpoint
from whisperport.program.bundle import Bundle
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import Package, Software
from whisperport.program.window import WindowOptions
from whisperport.system.machine import instruction_sets
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions, preflight
from whisperport.targets.cpu.openvino.target import BF16
from whisperport.verification.clips import Clip

from ...extent import EVERYTHING
from ...fake_target import FakeTarget, fake

HISS = (0.1 * np.random.default_rng(0).standard_normal(3200)).astype(np.float32)
OPTIONS = ExportOptions(clips=[Clip("hiss", "", HISS)], run=RunOptions(threads=1))


def table(**rows: dict[str, float]) -> list[Timed]:
    """The times of programs: program -> candidate -> milliseconds."""
    return [
        Timed(program, candidate(name), ms)
        for program, on in rows.items()
        for name, ms in on.items()
    ]


def candidate(name: str) -> Candidate:
    """`a8` is the target a in w8, and `a` is in float32."""
    return Candidate(name.removesuffix("8"), "w8" if name.endswith("8") else "fp32")


def chosen(timed: list[Timed], *arguments: Any) -> tuple[Candidate | None, Candidate | None]:
    """The choice for the encoder and for `step`; `cross_kv` takes no time anywhere, if it has no times."""
    if not any(one.program == "cross_kv" for one in timed):
        of_step = [one for one in timed if one.program == "step"]
        timed = [*timed, *(replace(one, program="cross_kv", ms=0) for one in of_step)]
    found = choose(timed, *arguments).of
    return found.get("encoder"), found.get("step")


# The choice --------------------------------------------------------------------------------------


def test_the_step_counts_as_often_as_it_runs_in_a_window() -> None:
    timed = table(encoder={"a": 100, "b": 104}, step={"a": 10.2, "b": 10})

    assert chosen(timed) == (candidate("b"), candidate("b"))


@pytest.mark.parametrize(
    ("encoder", "expected"),
    [({"a": 100, "b": 90}, "a"), ({"a": 100, "b": 20}, "b"), ({"a": 100, "a8": 90}, "a")],
    ids=["a second target", "a much faster second target", "fewer bits"],
)
def test_what_costs_memory_or_accuracy_saves_5_percent_of_a_window(
    encoder: dict[str, float], expected: str
) -> None:
    timed = table(encoder=encoder, step={"a": 10, "b": 20, "a8": 20})

    assert chosen(timed) == (candidate(expected), candidate("a"))


def test_an_encoder_of_windows_as_short_as_the_audio_is_faster_for_a_command() -> None:
    timed = table(encoder={"a": 50, "b8": 30}, cross_kv={"a": 5, "b8": 5}, step={"a": 1})

    assert chosen(timed) == (candidate("b8"), candidate("a"))
    assert chosen(timed, (), (), {"a": 0.1}) == (candidate("a"), candidate("a"))
    assert chosen(timed, (), (), {"a": 0.1, "b": 0.15}) == (candidate("b8"), candidate("a"))


def test_a_step_and_its_coarse_logits_are_one_time() -> None:
    timed = table(encoder={"a": 9, "b": 9}, step={"a": 2, "b": 3}, coarse_projection={"a": 2})

    assert chosen(timed) == (candidate("b"), candidate("b"))


def test_cross_kv_is_where_it_is_fastest_among_the_targets_of_the_others() -> None:
    of_cross_kv = {"a": 50, "a8": 30, "b": 30, "b8": 9, "c8": 1}
    timed = table(encoder={"b8": 100}, cross_kv=of_cross_kv, step={"a8": 10})

    assert choose(timed).of["cross_kv"] == candidate("b8")


def test_fewer_bits_of_cross_kv_alone_save_5_percent_of_a_window() -> None:
    timed = table(encoder={"a": 100}, cross_kv={"a": 50, "a8": 40}, step={"a": 10})

    assert choose(timed).of["cross_kv"] == candidate("a")


def test_a_banned_candidate_is_not_chosen_for_its_group_however_fast_it_is() -> None:
    timed = table(encoder={"a": 100, "b8": 1}, step={"a": 10, "b8": 5})

    assert chosen(timed, {("encoder", candidate("b8"))}) == (candidate("a"), candidate("b8"))


def test_a_group_that_the_user_placed_is_not_chosen() -> None:
    timed = table(step={"a": 10, "b": 20})

    assert chosen(timed, (), {"encoder"}) == (None, candidate("a"))
    with pytest.raises(UsageError, match="no program to place"):
        choose(timed, (), {"encoder", "cross_kv", "step"})


def test_a_group_without_a_candidate_is_an_error_that_names_it() -> None:
    with pytest.raises(LoweringError, match="`step` could be measured on no target"):
        choose(table(encoder={"a": 1}, cross_kv={"a": 1}))


# The candidates ----------------------------------------------------------------------------------


@pytest.mark.needs("torch")
def test_targets_that_are_installed_and_run_here_are_candidates() -> None:
    found = [str(one) for one in candidates(OPTIONS)]
    names = {one.partition(" ")[0] for one in found}

    assert {"onnxruntime", "litert", "openvino"} <= names
    assert {"onnxruntime fp32", "onnxruntime w8", "litert w8", "openvino w8"} <= set(found)
    assert ("openvino bf16" in found) == bool(BF16.intersection(instruction_sets()))
    assert "onnxruntime w8a8" not in found  # its ranges need a calibration set
    assert not names & {"hailo8", "sm8650", "genio720", "aws-neuron"}


@pytest.mark.needs("torch")
def test_a_target_without_its_runtime_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = fastest.is_installed
    monkeypatch.setattr(fastest, "is_installed", lambda x: x != "openvino" and installed(x))

    names = {one.target for one in candidates(OPTIONS)}

    assert "openvino" not in names
    assert "onnxruntime" in names


@pytest.mark.needs("torch")
def test_a_precision_of_all_programs_leaves_one_candidate_per_target() -> None:
    found = candidates(replace(OPTIONS, precision="fp32"))

    assert {one.precision for one in found} == {"fp32"}
    assert {"onnxruntime", "xnnpack", "litert", "openvino"} <= {one.target for one in found}
    assert len(found) == len({one.target for one in found})


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
    fake_targets: Any, quick_tracing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[FakeTarget, FakeTarget]:
    """Two targets that need 1 ms for a program. The encoder of the first needs 200 ms, and the step of the
    second 20 ms."""
    clock = Clock()
    slow = {"first": {"encoder": 200}, "second": {"step": 20}}
    found = tuple(fake(name, fake_targets["fake"].runners) for name in slow)

    def ticking(target: FakeTarget) -> Any:
        load = target.load

        def loaded(*arguments: Any) -> dict[str, Runner]:
            return {
                name: Ticking(runner, clock, slow[target.spec.name].get(name, 1))
                for name, runner in load(*arguments).items()
            }

        return loaded

    for target in found:
        monkeypatch.setattr(target, "load", ticking(target))
    monkeypatch.setattr(targets, "TARGETS", found)
    monkeypatch.setattr(fastest, "is_installed", lambda _: True)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "partial" in path.name]


def placed(found: Exported) -> dict[str, str]:
    return {entry.spec.name: entry.target for entry in found.manifest.programs}


def test_every_group_is_on_the_target_that_is_fastest(
    micro_checkpoint: Any,
    rivals: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages: list[str] = []

    with reporting(stages.append):
        found = export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)

    on = placed(found)
    assert on.pop("encoder") == "second"
    assert set(on.values()) == {"first"}
    assert Bundle.open(tmp_path / "out").manifest.verified
    measured = {(one.program, one.candidate.target): one.ms for one in found.timed}
    assert measured == pytest.approx(
        {
            ("encoder", "first"): 200,
            ("encoder", "second"): 1,
            ("cross_kv", "first"): 1,
            ("cross_kv", "second"): 1,
            ("step", "first"): 1,
            ("step", "second"): 20,
        }
    )
    assert hidden(tmp_path) == []

    _print_timed(found)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["first", "fp32", "200.00", "ms", *("1.00", "ms") * 2, "cross_kv,", "step"] in rows
    assert json.loads(json.dumps(_timed_json(found)))["programs"][0]["target"] == "first"


@pytest.mark.parametrize(
    ("options", "expected"),
    [(OPTIONS, "first"), (replace(OPTIONS, window=WindowOptions(seconds=0.2)), "second")],
    ids=["any length", "one length"],
)
def test_a_target_of_windows_as_short_as_the_audio_is_fast_for_a_command(
    options: ExportOptions,
    expected: str,
    micro_checkpoint: Any,
    rivals: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    encoder, rest = {"first": 50.0, "second": 40.0}, {"first": 5.0, "second": 5.0}
    timed = table(encoder=encoder, cross_kv=rest, step={"first": 1, "second": 9})
    monkeypatch.setattr(fastest, "_measured", lambda *_: (tuple(timed), {}))
    runs = replace(rivals[0].spec.runs, any_audio=True)
    monkeypatch.setattr(rivals[0], "spec", replace(rivals[0].spec, runs=runs))

    found = export_best(micro_checkpoint, "auto", tmp_path / "out", options)

    assert placed(found)["encoder"] == expected


@pytest.mark.parametrize(
    ("windows", "expected"),
    [((), fastest.LENGTHS_S), ((15.0,), (15.0,))],
    ids=["none", "asked for"],
)
def test_an_encoder_of_one_length_gets_programs_for_short_windows(
    windows: tuple[float, ...],
    expected: tuple[float, ...],
    micro_checkpoint: Any,
    rivals: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    timed = table(encoder={"second": 40.0}, cross_kv={"second": 5.0}, step={"first": 1})
    monkeypatch.setattr(fastest, "_measured", lambda *_: (tuple(timed), {}))
    asked: list[ExportOptions] = []

    def stop(*arguments: Any) -> None:
        asked.append(arguments[-1])
        raise LoweringError("stopped", hint="here")

    monkeypatch.setattr(fastest, "export", stop)
    usual = replace(micro_checkpoint, dims=replace(micro_checkpoint.dims, n_audio_ctx=1500))

    with pytest.raises(LoweringError, match="stopped"):
        export_best(usual, "auto", tmp_path / "out", replace(OPTIONS, windows=windows))

    assert [each.windows for each in asked] == [expected]


def test_times_are_measured_once_for_models_of_the_same_sizes(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    stages: list[str] = []
    first = export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)

    with reporting(stages.append):
        second = export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)
    with reporting(stages.append):
        export_best(
            micro_checkpoint,
            "auto",
            tmp_path / "out",
            replace(OPTIONS, run=RunOptions(threads=2)),
        )

    assert second.timed == first.timed
    assert placed(second) == placed(first)
    assert sum(stage.startswith("timing step") for stage in stages) == 1  # with 2 threads


def test_a_choice_that_is_not_verified_is_replaced_by_the_next_one(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    rivals[1].wrong["encoder"] = {"features": lambda rows: rows + 1}

    found = export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)

    assert set(placed(found).values()) == {"first"}
    assert found.manifest.verified
    assert [one.name for one in found.attempts] == ["second fp32, first fp32", "first fp32"]
    assert "encoder" in found.attempts[0].rejected
    assert found.attempts[1].rejected == ""


def test_where_no_candidate_is_verified_the_last_rejection_is_raised(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    for target in rivals:
        target.wrong["encoder"] = {"features": lambda rows: rows + 1}

    with pytest.raises(VerificationError, match="does not agree"):
        export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)

    assert not (tmp_path / "out").exists()


def test_a_program_that_the_user_places_stays_there(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    options = replace(OPTIONS, placement={"encoder": "first"})

    found = export_best(micro_checkpoint, "auto", tmp_path / "out", options)

    assert placed(found)["encoder"] == "first"
    assert {one.program for one in found.timed} == {"cross_kv", "step"}


def test_a_target_that_cannot_lower_is_named_with_its_reason(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    rivals[1].failure = LoweringError("the compiler is broken", why="of a reason")

    found = export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)

    assert _timed_json(found)["not_used"] == {"second fp32": "the compiler is broken: of a reason"}
    assert {entry.target for entry in found.manifest.programs} == {"first"}


def test_a_program_with_a_precision_is_measured_on_the_targets_that_have_it(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    rivals[0].spec = replace(
        rivals[0].spec, runs=replace(rivals[0].spec.runs, precisions=("fp32", "fp16"))
    )
    options = replace(OPTIONS, precisions={"encoder": "fp16"})

    found = export_best(micro_checkpoint, "auto", tmp_path / "out", options)

    encoder = found.manifest.program("encoder")
    assert (encoder.target, encoder.precision) == ("first", "fp16")
    assert found.manifest.program("step").precision == "fp32"
    measured = {(one.program, str(one.candidate)) for one in found.timed}
    assert {name for program, name in measured if program == "encoder"} == {"first fp16"}
    assert {n for program, n in measured if program == "step"} == {"first fp32", "second fp32"}
    assert not any(one.rejected for one in found.attempts)


def test_too_little_memory_is_an_error_before_anything_is_measured(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 1000)

    with pytest.raises(WhisperportError, match="memory"):
        export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)

    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_no_hidden_folder_and_no_bundle(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path
) -> None:
    rivals[1].failure = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)

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
        ({"precision": "w9"}, r"no target .* has the precision `w9` for `all programs`"),
        ({"precision": "w8a8"}, r"no target .* has the precision `w8a8`"),
    ],
    ids=["option", "precision of a program", "precision", "a calibrated one"],
)
def test_what_no_target_that_may_be_used_has_is_rejected_before_any_work(
    micro_checkpoint: Any, rivals: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    rivals[0].spec = replace(
        rivals[0].spec, runs=replace(rivals[0].spec.runs, precisions=("fp32", "w8a8"))
    )

    with pytest.raises(UsageError, match=message):
        export_best(micro_checkpoint, "auto", tmp_path / "out", replace(OPTIONS, **changes))

    assert list(tmp_path.iterdir()) == []


# Kept in the user's cache, for whatever is given the model's name -----------------------------------


KEPT = replace(OPTIONS, batch=1)  # a program fewer is exported


@pytest.fixture
def micro_pt(micro_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The path of a model, which is read as the micro checkpoint."""
    monkeypatch.setattr(model_checkpoint, "load_checkpoint", lambda _: micro_checkpoint)
    (tmp_path / "micro.pt").write_bytes(b"weights")
    return str(tmp_path / "micro.pt")


def test_without_a_folder_the_fastest_mix_takes_the_place_of_float32_for_the_models_name(
    micro_pt: str, rivals: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cached_bundle(micro_pt) is None

    kept = export_best(micro_pt, "auto", None, KEPT)

    assert bundle_of_model(micro_pt).folder == kept.folder
    said = capsys.readouterr().err
    assert f"{micro_pt}: second fp32, first fp32, verified" in said
    assert placed(kept)["encoder"] == "second"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), VerificationError("it does not agree")])
def test_a_search_that_ends_early_leaves_the_older_mix(
    micro_pt: str, rivals: Any, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = export_best(micro_pt, "auto", None, KEPT)
    before = sorted(path.name for path in kept.folder.parent.iterdir())
    monkeypatch.setattr(fastest, "export", failing := Mock(side_effect=failure))

    with pytest.raises(type(failure)):
        export_best(micro_pt, "auto", None, OPTIONS)

    assert failing.call_args.args[3].batch == BATCH  # as in the bundle that it takes the place of
    assert bundle_of(micro_pt).manifest == kept.manifest
    assert sorted(path.name for path in kept.folder.parent.iterdir()) == before


def test_a_mix_of_another_kind_of_cpu_or_without_its_runtime_is_not_used(
    micro_pt: str, rivals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_best(micro_pt, "auto", None, KEPT)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(bundle_cache, "instruction_sets", lambda: ("avx2",))
        assert cached_bundle(micro_pt) is None
    with monkeypatch.context() as elsewhere:
        software = Software(run_extra="fast", packages={"fast": (Package("not_here", "not-here"),)})
        elsewhere.setattr(rivals[1], "spec", replace(rivals[1].spec, software=software))
        assert cached_bundle(micro_pt) is None
    with monkeypatch.context() as elsewhere:  # of an extra whose packages no target describes
        software = Software(run_extra="xnnpack")
        elsewhere.setattr(rivals[1], "spec", replace(rivals[1].spec, software=software))
        elsewhere.setattr(bundle_cache, "find_spec", lambda module: module != "executorch")
        assert cached_bundle(micro_pt) is None

    assert cached_bundle(micro_pt) is not None


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        ("first", {}),
        ("auto", {"allow_unverified": True}),
        ("auto", {"window": WindowOptions(seconds=10)}),
    ],
    ids=["another target", "unverified", "a short window"],
)
def test_nothing_but_the_verified_choice_of_auto_goes_to_the_cache(
    micro_pt: str, rivals: Any, target: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="no folder") as caught:
        export_best(micro_pt, target, None, replace(OPTIONS, **changes))

    assert "--out" in caught.value.hint


def test_two_autos_are_an_error_without_a_folder_too(micro_pt: str, rivals: Any) -> None:
    options = replace(OPTIONS, precisions={"encoder": "auto"})

    with pytest.raises(UsageError, match="cannot both be `auto`"):
        export_best(micro_pt, "auto", None, options)


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="exports to four targets, and then the mix")
def test_the_targets_of_this_machine_give_a_verified_mix(
    micro_checkpoint: Any, tmp_path: Path
) -> None:
    found = export_best(micro_checkpoint, "auto", tmp_path / "out", OPTIONS)

    assert found.manifest.verified
    assert {one.candidate.target for one in found.timed} >= {"onnxruntime", "litert", "openvino"}
    assert "coarse_projection" in {one.program for one in found.timed}
