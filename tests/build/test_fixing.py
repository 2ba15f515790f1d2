"""Fixing a program: verification of each rewrite, samples, remaining problems."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whisperport.build import fix as fixing
from whisperport.build.check import check
from whisperport.build.fix import Fixed, fix
from whisperport.build.lower import LowerOptions, lower
from whisperport.errors import ProgramError, UsageError
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.rewrites import REWRITES, Rewrite
from whisperport.model.rewrites.graph_edits import aten, calls, store
from whisperport.model.trace.program import Program, trace
from whisperport.system.child import memory_within
from whisperport.targets import TARGETS

from ..extent import EVERYTHING
from ..model.rewrites.third_party import FEATURES, MEL, TOKENS, small_openai, third_party_programs

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def openai(random_openai_whisper: Make) -> Any:
    return small_openai(random_openai_whisper)


@pytest.fixture(scope="module")
def decoder(openai: Any) -> Program:
    return trace("decoder", openai.decoder, (TOKENS.int(), FEATURES))


@pytest.fixture(scope="module")
def fixed(decoder: Program) -> Fixed:
    return fix(decoder, "xnnpack")


def test_a_third_party_decoder_has_no_rejected_node_that_computes(fixed: Fixed) -> None:
    assert fixed
    assert fixed.remaining == ()
    assert [rejection.node for rejection in fixed.lookups] == ["embedding"]
    assert "10.0 MB" in fixed.lookups[0].reason  # 51865 rows of 48 float32
    assert fixed.lookups[0].place.startswith("token_embedding, whisper/model.py:")


def test_every_rewrite_that_changed_something_was_verified_on_every_sample(fixed: Fixed) -> None:
    changed = [step for step in fixed.steps if step.outcome.changed]

    assert len(changed) == 7
    for step in changed:
        assert [one.sample for one in step.equality.compared] == list(fixed.samples)
        assert step.kept
        assert step.equality.max_relative <= 1e-4
        assert step.equality.sqnr_db >= 80


def test_the_fixed_program_is_called_as_the_original_is(fixed: Fixed, decoder: Program) -> None:
    assert fixed.program.spec == decoder.spec


def test_what_rewrites_add_keeps_module_and_line_of_what_they_replace(fixed: Fixed) -> None:
    nodes = read_exported("fixed", fixed.program.exported).nodes

    assert {node.source and node.source.package_path for node in nodes} == {"whisper/model.py"}
    added = {node.op for node in nodes if node.module == "blocks.0.attn_ln"}
    assert {"linear", "rsqrt"} <= added


def test_fixing_twice_changes_nothing(fixed: Fixed) -> None:
    again = fix(fixed.program, "xnnpack")

    assert again.changed == 0
    assert again.program is fixed.program


def test_an_encoder_is_verified_on_audio(openai: Any) -> None:
    fixed = fix(trace("encoder", openai.encoder, (MEL,)), "xnnpack")

    assert fixed
    assert len([name for name in fixed.samples if name.endswith((".wav", ".flac", ".mp3"))]) == 2


def test_inputs_of_a_file_are_used(decoder: Program, tmp_path: Path) -> None:
    names = [tensor.name for tensor in decoder.spec.inputs]
    arrays = [np.arange(11, dtype=np.int32)[None], np.ones((1, 50, 48), np.float32)]
    np.savez(tmp_path / "call.npz", **dict(zip(names, arrays, strict=True)))

    fixed = fix(decoder, "xnnpack", inputs=[tmp_path / "call.npz"])

    assert fixed.samples[-1] == "call.npz"
    assert fixed


def test_inputs_that_do_not_fit_are_rejected(decoder: Program, tmp_path: Path) -> None:
    np.savez(tmp_path / "call.npz", tokens=np.zeros(3))

    with pytest.raises(ProgramError, match="inputs"):
        fix(decoder, "xnnpack", inputs=[tmp_path / "call.npz"])


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + 1


def test_a_rewrite_that_computes_something_else_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(module: Any) -> tuple[list[str], list[Any]]:
        nodes = calls(module, aten.relu.default)
        for node in nodes:
            node.target = aten.sigmoid.default
        return [node.name for node in nodes], []

    target = fixing.get_target("xnnpack")
    monkeypatch.setitem(REWRITES, "wrong", Rewrite("wrong", exact=True, apply=wrong))
    monkeypatch.setattr(
        target,
        "spec",
        replace(target.spec, lowering=replace(target.spec.lowering, rewrites=("wrong",))),
    )
    program = trace("plain", Plain(), (torch.zeros(1, 8),))

    fixed = fix(program, "xnnpack")

    assert not fixed
    assert fixed.program is program
    assert fixed.changed == 0
    assert len(fixed.steps[0].equality.failed) == 3
    assert fixed.to_json()["rewrites"][0]["failed"][0]["sample"] == "noise of scale 1"


def test_a_rewrite_whose_program_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: Any) -> tuple[list[str], list[Any]]:
        (node,) = calls(module, aten.relu.default)
        with module.graph.inserting_before(node):
            rows = store(module, "rows", torch.full((8,), 9))  # of 8
        node.target, node.args = aten.index_select.default, (node.args[0], 1, rows)
        return [node.name], []

    target = fixing.get_target("xnnpack")
    monkeypatch.setitem(REWRITES, "wrong", Rewrite("wrong", exact=True, apply=wrong))
    monkeypatch.setattr(
        target,
        "spec",
        replace(target.spec, lowering=replace(target.spec.lowering, rewrites=("wrong",))),
    )
    program = trace("plain", Plain(), (torch.zeros(1, 8),))

    fixed = fix(program, "xnnpack")

    assert fixed.steps[0].left_out.startswith("torch cannot run its program: INDICES element")
    assert fixed.program is program


def test_a_program_with_state_is_rejected() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + self.count

    program = trace("counter", Counting(), (torch.zeros(1),))

    with pytest.raises(ProgramError, match="keeps state in a buffer, `count`"):
        fix(program, "xnnpack")


@pytest.mark.parametrize(("name", "what"), [("a.onnx", "an ONNX file"), ("a.tflite", "a TFLite")])
def test_a_file_without_a_torch_graph_is_rejected_with_a_hint(
    name: str, what: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"\x08")

    with pytest.raises(ProgramError) as rejected:
        fix(tmp_path / name, "xnnpack")

    assert what in rejected.value.why
    assert ".pt2" in rejected.value.hint


def test_a_target_that_is_not_there_is_rejected(decoder: Program) -> None:
    with pytest.raises(UsageError, match="abacus"):
        fix(decoder, "abacus")


def test_what_is_written_is_read_again_and_computes_the_same(
    fixed: Fixed, decoder: Program, tmp_path: Path
) -> None:
    from whisperport.model.trace.pt2 import read_pt2, weight_bytes
    from whisperport.model.trace.trial import eager_outputs, random_inputs

    out = fixed.write(tmp_path / "fixed.pt2")
    again = read_pt2(out)
    inputs = random_inputs(again, 7)

    (actual,), (expected,) = eager_outputs(again, inputs), eager_outputs(decoder, inputs)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert weight_bytes(again) <= weight_bytes(decoder)
    assert out.stat().st_size < 1.1 * weight_bytes(decoder) + 1e6  # the graph takes the rest


def test_a_file_that_is_there_is_left_alone_unless_asked(fixed: Fixed, tmp_path: Path) -> None:
    out = tmp_path / "precious.pt2"
    out.write_text("theirs")

    with pytest.raises(ProgramError, match="exists already"):
        fixed.write(out)
    assert out.read_text() == "theirs"

    fixed.write(out, overwrite=True)
    assert out.read_bytes()[:2] == b"PK"
    assert [path.name for path in tmp_path.iterdir()] == ["precious.pt2"]


def test_the_result_is_plain_json(fixed: Fixed) -> None:
    data = json.loads(json.dumps(fixed.to_json()))

    assert data["changed_nodes"] == fixed.changed > 0
    assert data["remaining"] == []
    assert [one["rewrite"] for one in data["rewrites"]] == list(
        fixing.get_target("xnnpack").spec.lowering.rewrites
    )


def test_a_program_that_writes_to_an_input_is_rejected() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            return x + cache.mul_(2)

    program = trace("writes", Writes(), (torch.zeros(2, 3), torch.zeros(2, 3)))

    with pytest.raises(ProgramError, match="`writes` writes to its input `cache`"):
        fix(program, "xnnpack")


def test_a_rewrite_that_adds_what_the_target_rejects_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = fixing.get_target("xnnpack")
    assert target.spec.supports.operators is not None
    without_cat = target.spec.supports.operators - {"cat"}
    spec = replace(
        target.spec,
        supports=replace(target.spec.supports, operators=without_cat),
        lowering=replace(target.spec.lowering, rewrites=("split-vocab-projection",)),
    )
    monkeypatch.setattr(target, "spec", spec)
    program = trace("head", nn.Linear(8, 64), (torch.zeros(1, 3, 8),))

    fixed = fix(program, "xnnpack")

    (step,) = fixed.steps
    assert step.left_out == "it adds nodes that the target rejects: 1 × cat (WP101)"
    assert not step.kept
    assert fixed.program is program
    assert fixed
    assert fixed.to_json()["rewrites"][0]["left_out"] == step.left_out


def test_a_rewrite_that_trades_many_rejected_nodes_for_one_of_another_kind_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = fixing.get_target("xnnpack")
    assert target.spec.supports.operators is not None
    without = target.spec.supports.operators - {"cat", "linear", "_softmax", "softmax"}
    spec = replace(
        target.spec,
        supports=replace(target.spec.supports, operators=without),
        lowering=replace(target.spec.lowering, rewrites=("attention-by-softmax",)),
    )
    monkeypatch.setattr(target, "spec", spec)
    program = trace("attention", Attention(), (torch.zeros(1, 2, 5, 4),))

    fixed = fix(program, "xnnpack")

    assert "1 × softmax (WP101)" in fixed.steps[0].left_out
    assert fixed.program is program


class TwoLines(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        return y + 1.0


def test_a_rewrite_that_moves_a_rejected_node_to_another_line_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def move(module: Any) -> tuple[list[str], list[Any]]:
        (relu,), (add,) = calls(module, aten.relu.default), calls(module, aten.add.Tensor)
        relu.target, relu.args = aten.clamp.default, (relu.args[0], 0)
        with module.graph.inserting_before(add):
            again = module.graph.call_function(aten.relu.default, (relu,))
        again.meta = dict(add.meta)
        add.args = (again, 1.0)
        return ["relu"], []

    target = fixing.get_target("xnnpack")
    assert target.spec.supports.operators is not None
    monkeypatch.setitem(REWRITES, "move", Rewrite("move", exact=True, apply=move))
    spec = replace(
        target.spec,
        supports=replace(target.spec.supports, operators=target.spec.supports.operators - {"relu"}),
        lowering=replace(target.spec.lowering, rewrites=("move",)),
    )
    monkeypatch.setattr(target, "spec", spec)

    fixed = fix(trace("two", TwoLines(), (torch.zeros(1, 8),)), "xnnpack")

    assert fixed.steps[0].left_out == "it adds nodes that the target rejects: 1 × relu (WP101)"
    assert [rejection.node for rejection in fixed.remaining] == ["relu"]


def test_a_concatenation_that_hailo_was_not_seen_to_compile_is_not_added() -> None:
    module = nn.Sequential(nn.Linear(8, 64), nn.Softmax(-1))  # the host cannot join these logits

    fixed = fix(trace("head", module, (torch.zeros(1, 3, 8),)), "hailo8l")

    split = next(step for step in fixed.steps if step.outcome.rewrite == "split-vocab-projection")
    assert split.left_out == (
        "it adds nodes that were not seen in programs known to compile: 1 × cat (WP104)"
    )
    assert fixed.unseen == ()


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


class Small(nn.Module):
    """What rewrites of all targets replace, in one program whose logits are not its output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(50, 8), nn.Conv1d(4, 8, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 50, bias=False)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        y = self.norm(self.table(tokens) + self.conv(x).transpose(1, 2))
        heads = y.reshape(1, 6, 2, 4).transpose(1, 2)
        heads = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        y = heads.transpose(1, 2).reshape(1, 6, 8)
        return torch.softmax(self.head(y) + y @ self.table.weight.t(), dim=-1)


@pytest.mark.parametrize("target", ["xnnpack", "litert", "hailo8l", "ethos-u85"])
def test_no_rejected_node_is_added(target: str) -> None:
    tokens = torch.arange(6)[None]
    program = trace("small", Small(), (tokens, torch.zeros(1, 4, 6)))

    _assert_none_is_added(program, fix(program, target))


@pytest.mark.skipif(
    not EVERYTHING, reason="make test-all: fixes 7 programs for each target's rewrites"
)
def test_no_target_adds_a_rejected_node_to_whisper(
    random_hf_whisper: Make, random_openai_whisper: Make
) -> None:
    specs = {
        one.spec.lowering.rewrites + one.spec.lowering.host_rewrites: one.spec.name
        for one in TARGETS
    }
    programs = third_party_programs(random_hf_whisper, random_openai_whisper)

    assert len(specs) >= 6
    for target in specs.values():
        for program in programs.values():
            _assert_none_is_added(program, fix(program, target))


def _assert_none_is_added(program: Program, fixed: Fixed) -> None:
    checked = [check(one, fixed.target).programs[0] for one in (program, fixed.program)]
    before, after = (
        Counter(
            (kind.rule, kind.operator, found.cost.node.place if found.cost else "")
            for kind in one.rejected
            for found in kind.occurrences
        )
        for one in checked
    )
    assert not after - before
    assert checked[1].not_seen_nodes <= checked[0].not_seen_nodes or before.total() > after.total()


def test_what_one_rewrite_adds_and_a_later_one_replaces_is_kept(fixed: Fixed) -> None:
    kept = {step.outcome.rewrite for step in fixed.steps if step.kept}

    assert {"attention-by-softmax", "matmul-by-bmm"} <= kept  # the first adds products that copy
    assert not any(step.left_out for step in fixed.steps)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")

MB = 10**6


class Large(nn.Module):
    """Fills 80 GB of constants, of which a file holds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.full((20 * 10**9,), 1.0).sum()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "large.pt2"
    torch.export.save(torch.export.export(Large(), (torch.ones(2),), strict=False), path)
    return path


@on_linux
def test_a_constant_of_80_gb_is_not_fixed(large: Path) -> None:
    with pytest.raises(ProgramError, match=r"(?s)torch cannot run the program `large`.*--trust"):
        fix(large, "xnnpack")


@on_linux
def test_a_constant_of_80_gb_is_not_lowered(large: Path, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="torch cannot run the program `large`"):
        lower(large, "onnxruntime", tmp_path / "large.onnx", LowerOptions(preflight=False))

    assert not list(tmp_path.iterdir())


@on_linux
def test_memory_is_limited_within_the_block_only() -> None:
    with memory_within(300 * MB):
        assert len(bytearray(100 * MB)) == 100 * MB
        with pytest.raises(MemoryError):
            bytearray(500 * MB)

    assert len(bytearray(500 * MB)) == 500 * MB


@on_linux
def test_a_limit_is_lowered_by_another_and_never_raised() -> None:
    with memory_within(300 * MB), memory_within(3000 * MB), pytest.raises(MemoryError):
        bytearray(500 * MB)
