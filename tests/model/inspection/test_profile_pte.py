"""ETDump's times and the content of the .pte give every node once, and why nodes are undelegated."""

import contextlib
import random
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whisperport.errors import ProgramError
from whisperport.model.inspection import profile_pte as module
from whisperport.model.inspection.check import rejections
from whisperport.model.inspection.cost import cost_of
from whisperport.model.inspection.profile_pte import profile_pte
from whisperport.model.inspection.read_pte import Instruction, Method, read_pte
from whisperport.program.bundle import Bundle
from whisperport.program.profiling import Profile, ProfileOptions
from whisperport.targets import get_target
from whisperport.targets.cpu.xnnpack.lowering import read_delegation

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
