"""LiteRT's profiler gives the times of undelegated nodes and of the delegate's nodes."""

import os
from pathlib import Path

import numpy as np
import pytest

from whisperport.errors import ProgramError, UsageError
from whisperport.model.inspection import litert_run, profile_tflite
from whisperport.model.inspection.litert_profiler import (
    Event,
    ProfilerUnavailableError,
    Run,
    _Library,
    profiled_runs,
)
from whisperport.model.inspection.litert_run import CRASHED, Measured, Op, run_litert
from whisperport.program.profiling import Profile, ProfileOptions

ONCE = ProfileOptions(repeat=2, threads=1)


@pytest.fixture(scope="module")
def cumsum(cumsum_tflite: Path) -> Profile:
    return profile_tflite.profile_tflite(cumsum_tflite, ONCE)


def test_a_node_that_the_delegate_does_not_support_is_undelegated(cumsum: Profile) -> None:
    assert cumsum.subgraphs == 2
    assert [(n.name, n.where, n.reason) for n in cumsum.undelegated] == [
        ("CUMSUM [1]", "no delegate", "not delegated to XNNPACK; LiteRT does not report why")
    ]
    assert {n.where for n in cumsum.nodes if n.delegated} == {"XNNPACK 1", "XNNPACK 2"}
    assert "2 of the file's 3 nodes run in XNNPACK: 2 FULLY_CONNECTED" in cumsum.notes


def test_every_node_is_measured(cumsum: Profile) -> None:
    assert all(node.ms is not None for node in cumsum.nodes)
    assert cumsum.overhead_ms is not None
    assert cumsum.total_ms > 0
    assert cumsum.runs == 2
    assert any("time of a run without the delegate" in note for note in cumsum.notes)


def test_nodes_and_what_is_between_them_make_up_the_whole(wide_tflite: Path) -> None:
    profile = profile_tflite.profile_tflite(wide_tflite, ProfileOptions(repeat=7, threads=1))

    shares = [profile.time_share(n) or 0.0 for n in profile.nodes if n.operator.startswith("Fully")]
    assert len(shares) == 2
    assert sum(shares) > 0.5  # two matmuls of 4 · 2048 · 2048, beside a sum of 4 · 2048


def test_a_delegate_counts_its_nodes_from_0_in_each_subgraph() -> None:
    names = [("A", 0, True), ("B", 1, True), ("A", 0, True), ("CUMSUM", 7, False), ("B", 1, True)]
    events = tuple(Event(name, index, inside, 1.0) for name, index, inside in names)

    found = profile_tflite._by_key(Run(9.0, events))

    assert list(found) == [(1, "A", 0), (1, "B", 1), (2, "A", 0), (0, "CUMSUM", 7), (3, "B", 1)]


def test_a_node_that_is_run_twice_counts_twice() -> None:
    events = (Event("CUMSUM", 7, False, 1.0), Event("CUMSUM", 7, False, 2.0))

    assert profile_tflite._by_key(Run(9.0, events)) == {(0, "CUMSUM", 7): 3.0}


def test_nodes_that_cannot_be_measured_are_reported_as_not_measured(
    cumsum_tflite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = run_litert(cumsum_tflite, ONCE)
    unmeasured = Measured(
        measured.ops, 2.0, 3.0, (), "the LiteRT library has no function LiteRtStartProfiler"
    )
    monkeypatch.setattr(profile_tflite, "run_litert", lambda *_: unmeasured)

    profile = profile_tflite.profile_tflite(cumsum_tflite, ONCE)

    assert [(n.name, n.where) for n in profile.nodes] == [
        ("CUMSUM [1]", "no delegate"),
        ("FULLY_CONNECTED [0]", "XNNPACK 1"),
        ("FULLY_CONNECTED [2]", "XNNPACK 2"),
    ]
    assert (profile.undelegated_time_share, profile.overhead_ms, profile.total_ms) == (
        None,
        None,
        2.0,
    )
    assert (
        "not measured: the LiteRT library has no function LiteRtStartProfiler" in profile.notes[0]
    )


def test_a_library_without_a_profiler_is_not_asked(cumsum_tflite: Path) -> None:
    import numpy.linalg

    other = Path(numpy.linalg._umath_linalg.__file__)

    with pytest.raises(
        ProfilerUnavailableError, match="library has no function LiteRtCreateEnvironment"
    ):
        profiled_runs(other, cumsum_tflite, {}, 1, 1)
    with pytest.raises(ProfilerUnavailableError):
        _Library(cumsum_tflite)


def test_an_error_of_the_profiler_does_not_prevent_the_measurement_of_complete_runs(
    cumsum_tflite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litert_run, "profiled_runs", lambda *_: _reject())

    measured = litert_run._measure(cumsum_tflite, ONCE, profiled=True)

    assert (measured.runs, measured.profiler_error) == ((), "no signature")


def _reject() -> None:
    raise ProfilerUnavailableError("no signature")


def _crash(*_: object) -> None:
    os._exit(9)


def test_a_crash_of_the_profiler_costs_its_times_only(
    cumsum_tflite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = litert_run._in_child

    def crashing(path: Path, options: ProfileOptions, *, profiled: bool) -> Measured:
        if not profiled:
            return real(path, options, profiled=False)
        monkeypatch.setattr(litert_run, "_measure", _crash)
        try:
            return real(path, options, profiled=True)
        finally:
            monkeypatch.undo()

    monkeypatch.setattr(litert_run, "_in_child", crashing)

    measured = litert_run.run_litert(cumsum_tflite, ONCE)

    assert (measured.runs, measured.profiler_error) == ((), CRASHED)


def test_a_crash_of_the_interpreter_is_an_error(
    cumsum_tflite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litert_run, "_measure", _crash)

    with pytest.raises(ProgramError, match=r"LiteRT crashed on cumsum\.tflite"):
        run_litert(cumsum_tflite, ONCE)


def test_inputs_of_the_wrong_shape_are_rejected(cumsum_tflite: Path) -> None:
    given = {"x": np.zeros((4, 63), np.float32)}

    with pytest.raises(ProgramError, match="input `x` has the wrong shape"):
        profile_tflite.profile_tflite(cumsum_tflite, ProfileOptions(inputs=given))


def test_a_file_cut_short_is_rejected(cumsum_tflite: Path, tmp_path: Path) -> None:
    whole, short = cumsum_tflite.read_bytes(), tmp_path / "short.tflite"

    for length in (8, 100, len(whole) // 2, len(whole) - 100):
        short.write_bytes(whole[:length])
        with pytest.raises(ProgramError, match=r"cannot run short\.tflite"):
            litert_run._measure(short, ONCE, profiled=True)


def test_what_litert_prints_is_not_seen(
    cumsum_tflite: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile_tflite.profile_tflite(cumsum_tflite, ONCE)

    assert capfd.readouterr() == ("", "")


def test_options_are_rejected(cumsum_tflite: Path) -> None:
    with pytest.raises(UsageError, match="no runtime option `provider`"):
        profile_tflite.profile_tflite(cumsum_tflite, ProfileOptions(options={"provider": "x"}))


def test_a_delegate_stands_for_the_nodes_between_its_tensors() -> None:
    def op(index: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
        return Op(index, "ADD", inputs, outputs)

    # 0 ─ a ─ 1 ─ b ─ 2 ─ c ─ 3, and d beside it: 1, 4 ─ 5
    file = [op(0, (0,), (1,)), op(1, (1,), (2,)), op(2, (2,), (3,)), op(3, (1, 4), (5,))]

    assert profile_tflite.replaced(op(9, (1,), (3,)), file) == {1, 2}
    assert profile_tflite.replaced(op(9, (0, 4), (3, 5)), file) == {0, 1, 2, 3}
    assert profile_tflite.replaced(op(9, (4, 1), (5,)), file) == {3}
