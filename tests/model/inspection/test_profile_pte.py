"""The time of every node, from the profilers of ExecuTorch, LiteRT and OpenVINO."""

import builtins
import contextlib
import os
import random
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whisperport.errors import MissingPackageError, ProgramError, UsageError
from whisperport.model.inspection import litert_run, profile_tflite
from whisperport.model.inspection import profile_pte as module
from whisperport.model.inspection.cost import cost_of
from whisperport.model.inspection.litert_profiler import (
    Event,
    ProfilerUnavailableError,
    Run,
    _Library,
    profiled_runs,
)
from whisperport.model.inspection.litert_run import CRASHED, Measured, Op, run_litert
from whisperport.model.inspection.profile_pte import profile_pte
from whisperport.model.inspection.read_pte import Instruction, Method, read_pte
from whisperport.model.inspection.rejections import rejections
from whisperport.program.bundle import Bundle
from whisperport.program.profiling import Profile, ProfileOptions
from whisperport.targets import get_target
from whisperport.targets.cpu.openvino.profiler import OpenVinoProfiler, _node
from whisperport.targets.cpu.xnnpack.lowering import read_delegation

# ETDump's times and the content of the .pte give every node once, and why nodes are undelegated.

ONCE = ProfileOptions(repeat=2, threads=1)
REASONS = partial(rejections, spec=get_target("xnnpack").spec)


@pytest.fixture(scope="module")
def naive(naive_pte: Path) -> Profile:
    return profile_pte(naive_pte, ONCE, REASONS)[0]


def named(profile: Profile, start: str) -> Any:
    (node,) = [node for node in profile.nodes if node.name.startswith(start)]
    return node


def test_the_undelegated_matmul_is_named_measured_and_explained(naive: Profile) -> None:
    mm = named(naive, "native_call_mm.out")

    assert not mm.delegated
    assert mm.ms > 0
    assert mm.rule == "WP301"
    assert "(8, 64) by (64, 500)" in mm.reason
    assert "not a stored constant" in mm.reason


def test_every_undelegated_operator_is_listed_once(naive: Profile, naive_pte: Path) -> None:
    delegation = read_delegation(naive_pte.read_bytes())["forward"]

    assert Counter(node.operator for node in naive.undelegated) == Counter(delegation.undelegated)
    assert all(node.reason for node in naive.undelegated)
    assert naive.subgraphs == delegation.subgraphs
    assert len({(node.name, node.where) for node in naive.nodes}) == len(naive.nodes)


def test_the_partitioner_is_quoted_where_no_rule_speaks(naive_pte: Path) -> None:
    silent = profile_pte(naive_pte, ONCE, lambda _: [])[0]

    assert named(silent, "native_call_mm.out").reason == ""  # it looks at mm, and we were not asked
    embedding = named(silent, "native_call_embedding.out")
    assert embedding.reason == (
        "XNNPACK's partitioner has no configuration for embedding.default; "
        "write the layer with other operators"
    )


def test_shares_and_the_rest_add_up(naive: Profile) -> None:
    shares = [naive.time_share(node) for node in naive.nodes]

    assert naive.overhead_ms is not None
    assert sum(s or 0 for s in shares) + naive.overhead_ms / naive.total_ms == pytest.approx(1)
    assert list(shares) == sorted(shares, reverse=True)  # type: ignore[type-var]
    undelegated = sum(node.ms or 0 for node in naive.undelegated)
    assert naive.undelegated_time_share == pytest.approx(undelegated / naive.total_ms)


def test_a_gain_is_never_more_than_the_time_it_comes_from(naive: Profile) -> None:
    assert named(naive, "native_call_mm.out").estimated_gain_ms is not None
    for node in naive.nodes:
        assert node.estimated_gain_ms is None or 0 <= node.estimated_gain_ms <= node.ms  # type: ignore[operator]
        assert not node.delegated or node.estimated_gain_ms is None


def test_the_fixed_program_has_no_undelegated_matmul(fixed_pte: Path) -> None:
    fixed = profile_pte(fixed_pte, ONCE, REASONS)[0]

    assert not [n for n in fixed.undelegated if "mm" in n.operator]
    assert sum(node.operator.startswith("Fully Connected") for node in fixed.nodes) == 3


def test_all_programs_of_a_bundle_run_inside_of_their_delegate(exported: Any) -> None:
    bundle: Bundle = exported("xnnpack")
    entry = bundle.manifest.program("step")
    names = {entry.method: tuple(tensor.name for tensor in entry.spec.inputs)}
    given = {t.name: np.zeros(t.shape, t.dtype) for t in entry.spec.inputs}
    options = ProfileOptions(repeat=1, threads=1, programs=(entry.method,), inputs=given)

    (profile,) = profile_pte(bundle.folder / entry.files[0], options, REASONS, names)

    assert profile.undelegated == ()
    assert profile.subgraphs == 1
    assert profile.target == "XnnpackBackend"
    assert profile.runs == 1


def test_what_a_matmul_costs_is_read_from_the_file(naive_pte: Path) -> None:
    method = read_pte(naive_pte.read_bytes(), "naive")["forward"]
    costs = cost_of(method.graph).nodes

    matmuls = [cost.flops for cost in costs if cost.node.op in ("mm", "linear")]
    inner = [node.op for call in method.instructions.values() for node in call.inner]

    assert sorted(matmuls) == [
        2 * 8 * 64 * 256 + 8 * 64,
        2 * 8 * 64 * 256 + 8 * 256,
        2 * 8 * 64 * 500,
    ]
    assert inner.count("linear") == 2


def event(name: str | None, start: int, end: int, place: int = 0, inner: str | None = None) -> Any:
    return SimpleNamespace(
        profile_event=SimpleNamespace(
            name=name,
            chain_index=0,
            instruction_id=place,
            delegate_debug_id_str=inner,
            delegate_debug_id_int=-1,
            start_time=start * 1_000_000,
            end_time=end * 1_000_000,
        )
    )


def test_a_delegate_that_names_no_nodes_is_one_node_itself() -> None:
    run = SimpleNamespace(
        events=[
            event("DELEGATE_CALL", 0, 4, place=0),
            event(None, 5, 6, place=1, inner="Add #1"),
            event("DELEGATE_CALL", 4, 9, place=1),
            event("native_call_mm.out", 10, 12, place=2),
            event("OPERATOR_CALL", 9, 12, place=2),
            event("Method::execute", 0, 13),
        ]
    )

    assert module._times(run) == {
        (0, 0, ""): 4.0,
        (0, 1, "Add #1"): 1.0,
        (0, 2, ""): 3.0,  # the call, not only the kernel in it
        module.WHOLE_RUN: 13.0,
    }


def test_for_another_backend_no_reason_of_xnnpack_is_given() -> None:
    calls = {(0, 0): Instruction("", backend="VulkanBackend"), (0, 1): Instruction("aten::mm.out")}
    method = Method("forward", (), calls, None)  # type: ignore[arg-type]
    run = SimpleNamespace(
        events=[
            event("DELEGATE_CALL", 0, 4),
            event("OPERATOR_CALL", 4, 6, place=1),
            event("Method::execute", 0, 7),
        ]
    )

    def never(_: Any) -> Any:
        raise AssertionError("asked")

    profile = module._profile(method, [run], never)

    assert [node.where for node in profile.nodes] == ["VulkanBackend 1", "no delegate"]
    assert profile.notes == (module.OTHER_BACKEND,)
    assert profile.overhead_ms == pytest.approx(1)


def test_a_runtime_without_etdump_says_so(naive_pte: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = SimpleNamespace(
        _load_program=lambda *_, **__: SimpleNamespace(has_etdump=lambda: False),
        _unsafe_reset_threadpool=lambda _: None,
    )
    monkeypatch.setattr(module, "_portable_lib", lambda: blind)

    with pytest.raises(ProgramError, match="cannot measure a program") as raised:
        profile_pte(naive_pte, ONCE, REASONS)

    assert "without ETDump" in raised.value.why


def test_a_method_that_is_not_there_is_rejected(naive_pte: Path) -> None:
    options = ProfileOptions(programs=("backward",))

    with pytest.raises(ProgramError, match="no method `backward`"):
        profile_pte(naive_pte, options, REASONS)


def test_token_ids_beyond_the_table_are_an_error_with_a_hint(naive_pte: Path) -> None:
    given = {"input_0": np.full((1, 8), 500, np.int64)}

    with pytest.raises(ProgramError, match="cannot run method `forward`") as raised:
        profile_pte(naive_pte, ProfileOptions(inputs=given), REASONS)

    assert "--inputs" in raised.value.hint


def test_a_file_cut_short_or_damaged_is_rejected(naive_pte: Path, tmp_path: Path) -> None:
    whole, noise = naive_pte.read_bytes(), random.Random(0)
    file = tmp_path / "damaged.pte"

    for length in (8, 12, 100, len(whole) // 2, len(whole) - 200_000):
        file.write_bytes(whole[: max(length, 0)])
        with pytest.raises(ProgramError, match=r"damaged\.pte is damaged"):
            profile_pte(file, ONCE, REASONS)
    for length in (50, 5000):
        file.write_bytes(whole[:8] + noise.randbytes(length))
        with pytest.raises(ProgramError):
            profile_pte(file, ONCE, REASONS)


def test_a_byte_changed_anywhere_is_run_or_rejected_and_nothing_else(
    naive_pte: Path, tmp_path: Path
) -> None:
    whole, file = naive_pte.read_bytes(), tmp_path / "changed.pte"

    for seed in range(12):
        noise, changed = random.Random(seed), bytearray(whole)
        changed[noise.randrange(4000 if seed % 2 else len(whole))] = noise.randrange(256)
        file.write_bytes(changed)
        with contextlib.suppress(ProgramError):
            profile_pte(file, ProfileOptions(repeat=1, threads=1), REASONS)


def test_a_method_that_is_a_constant_is_no_program(tmp_path: Path) -> None:
    import torch
    from executorch.exir import to_edge

    from whisperport.model.inspection.quiet import quiet

    exported = torch.export.export(torch.nn.ReLU(), (torch.zeros(2, 3),))
    with quiet():
        edge = to_edge({"forward": exported}, constant_methods={"rows": 2})
        (tmp_path / "two.pte").write_bytes(edge.to_executorch().buffer)

    profiles = profile_pte(tmp_path / "two.pte", ProfileOptions(repeat=1), lambda _: [])

    assert [profile.program for profile in profiles] == ["forward"]


# LiteRT's profiler gives the times of undelegated nodes and of the delegate's nodes.


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


# OpenVINO's counters give the kernel and time of every node that ran.

PROFILER = OpenVinoProfiler()


def test_every_node_that_ran_is_measured_with_its_kernel(step_xml: Path) -> None:
    profile = PROFILER.profile([step_xml], ONCE)

    assert profile.program == "step"
    assert profile.target == "CPU"
    assert any(node.operator == "FullyConnected" for node in profile.nodes)
    assert all(node.where.startswith("CPU ") for node in profile.nodes)
    assert all((node.ms or 0) >= 0 for node in profile.nodes)
    assert "were fused into others" in profile.notes[0]
    times = [node.ms or 0 for node in profile.nodes]
    assert times == sorted(times, reverse=True)


def test_a_property_of_openvino_is_passed_on(step_xml: Path) -> None:
    options = ProfileOptions(repeat=1, threads=1, options={"INFERENCE_PRECISION_HINT": "f32"})

    profile = PROFILER.profile([step_xml], options)

    assert not [node for node in profile.nodes if node.where.endswith("bf16")]
    assert not [note for note in profile.notes if "bfloat16" in note]


def test_an_unknown_device_or_property_is_rejected(step_xml: Path) -> None:
    for options in ({"device": "NOSUCH"}, {"NO_SUCH_PROPERTY": "1"}):
        with pytest.raises(ProgramError, match=r"cannot run step\.xml") as raised:
            PROFILER.profile([step_xml], ProfileOptions(options=options))
        assert raised.value.why


def test_a_model_cut_short_or_without_its_weights_is_rejected(
    step_xml: Path, tmp_path: Path
) -> None:
    whole = step_xml.read_bytes()
    short, alone, named = (tmp_path / f"{name}.xml" for name in ("short", "alone", "named"))
    short.write_bytes(whole[: len(whole) // 2])
    alone.write_bytes(whole)
    named.write_bytes(whole.replace(b'name="x"', b'name="\xcc"'))
    named.with_suffix(".bin").write_bytes(step_xml.with_suffix(".bin").read_bytes())

    for path in (short, alone, named):
        with pytest.raises(ProgramError, match=path.name):
            PROFILER.profile([path], ONCE)


def test_a_reference_kernel_is_pointed_out() -> None:
    info = SimpleNamespace(node_name="n", node_type="CumSum", exec_type="ref_any_f32")

    node = _node(info, "CPU", [3.0, 1.0, 2.0])

    assert node.ms == 2.0
    assert node.reason.startswith("a slow reference kernel")


def test_without_openvino_it_says_what_to_install(
    step_xml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "openvino":
            raise ImportError("No module named 'openvino'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(MissingPackageError) as raised:
        PROFILER.profile([step_xml], ONCE)

    assert raised.value.hint == 'pip install "whisperport[openvino]"'
