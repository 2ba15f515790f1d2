"""Lowering one program: the file is written if it is equal; otherwise nothing is written."""

import errno
import inspect
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from whisperport.build import lower as lowering
from whisperport.build.lower import Lowered, LowerOptions, lower
from whisperport.errors import (
    LoweringError,
    ProgramError,
    UsageError,
    VerificationError,
    WhisperportError,
)
from whisperport.model.trace.program import Program, as_program, trace
from whisperport.program.bundle import replacing_files
from whisperport.program.runner import Runner
from whisperport.system.atomic import rename_if_free
from whisperport.system.locking import lock_path, locked
from whisperport.system.progress import reporting
from whisperport.targets import TARGETS, RunOptions, get_target, preflight
from whisperport.verification.tolerances import LOWERED

from ..extent import core_or_all

ONE_THREAD = RunOptions(threads=1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.linear(x))
        return y, nn.functional.gelu(y)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return trace("normed", Normed(), (torch.zeros(1, 3, 6),), ["y", "z"])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Whoever uses it finds an old file there, which must stay or be replaced whole."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    return path


def untouched(out: Path) -> bool:
    return out.read_bytes() == b"old" and os.listdir(out.parent) == [out.name]


def test_what_is_written_is_of_the_opset_asked_for_and_alone(program: Program, out: Path) -> None:
    stages: list[str] = []

    with reporting(stages.append):
        lowered = lower(program, "onnxruntime", out, LowerOptions(opset=13))

    model = onnx.load(str(out))
    assert [o.version for o in model.opset_import] == [13]
    assert [o.name for o in model.graph.output] == ["y", "z"]
    assert lowered.equal
    assert lowered.equality.cosine > 0.99999
    assert lowered.equality.sqnr_db > 100
    assert 0 < lowered.equality.max_relative < 1e-5
    assert lowered.facts["opset"] == 13
    assert lowered.files == (out,)
    assert os.listdir(out.parent) == [out.name]
    assert "writing normed as ONNX opset 13 for onnxruntime" in stages


class Queries(nn.Module):
    """Five axes on the way, as a product for queries, keys and values makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).reshape(2, 4, 3, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
        return q @ k.transpose(-1, -2) @ v


class FiveOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).reshape(2, 2, 2, 3, 2)


def test_axes_above_four_are_folded_in_onnx(out: Path) -> None:
    program = trace("queries", Queries(), (torch.zeros(2, 4, 6),))

    lowered = lower(program, "onnxruntime", out)

    assert lowered.facts["max_rank"] == 4
    assert lowered.rewrites["fold-axes=4"] > 0
    assert lowered.equal


def test_more_axes_may_be_allowed(out: Path) -> None:
    program = trace("queries", Queries(), (torch.zeros(2, 4, 6),))

    lowered = lower(program, "onnxruntime", out, LowerOptions(max_rank=5))

    assert lowered.facts["max_rank"] == 5
    assert lowered.rewrites == {}


def test_an_axis_that_cannot_be_folded_is_rejected_by_node_value_and_limit(out: Path) -> None:
    program = trace("five", FiveOut(), (torch.zeros(4, 12),))

    with pytest.raises(LoweringError) as rejected:
        lower(program, "onnxruntime", out)

    assert rejected.value.what == "`five` has tensors of more than 4 axes"
    assert rejected.value.why.endswith(": rank 5 is above the limit of 4; fold axes")
    assert "--max-rank" in rejected.value.hint
    assert untouched(out)
    assert lower(program, "onnxruntime", out, LowerOptions(max_rank=5)).equal


def test_a_limit_may_be_asked_of_any_target(tmp_path: Path) -> None:
    program = trace("five", FiveOut(), (torch.zeros(4, 12),))
    options = LowerOptions(max_rank=4, run=ONE_THREAD)

    with pytest.raises(LoweringError, match="`five` has tensors of more than 4 axes"):
        lower(program, "xnnpack", tmp_path / "four.pte", options)


class Constant(nn.Module):
    def forward(self) -> Tensor:
        return torch.arange(3).float()


def test_a_program_that_computes_nothing_is_a_file_of_no_nodes(out: Path) -> None:
    lowered = lower(trace("constant", Constant(), ()), "onnxruntime", out)

    assert lowered.equal
    assert lowered.facts["nodes"] == 0


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x - 100.0)


def test_a_program_that_torch_has_no_numbers_for_is_not_equal(out: Path) -> None:
    with pytest.raises(VerificationError) as rejected:
        lower(trace("logarithm", Logarithm(), (torch.zeros(3),)), "onnxruntime", out)

    assert "the reference holds 3 NaN of 3 values" in rejected.value.why
    assert untouched(out)


class Logarithms(nn.Module):
    """Minus infinity for about half of its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(x))


def test_infinities_are_equal_to_themselves(out: Path) -> None:
    lowered = lower(trace("logarithms", Logarithms(), (torch.zeros(64),)), "onnxruntime", out)

    assert lowered.equal


class WritesInput(nn.Module):
    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[0].mul_(2)
        return x + cache


class WritesItsOwn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[0].relu_()
        return y.add_(1)


@pytest.mark.parametrize("decompositions", [False, True])
def test_a_program_that_writes_to_an_input_is_rejected(out: Path, decompositions: bool) -> None:
    program = trace("writes", WritesInput(), (torch.zeros(2, 3), torch.zeros(2, 3)))
    if decompositions:
        program = as_program("writes", program.exported.run_decompositions())

    with pytest.raises(ProgramError, match="`writes` writes to its input `cache`"):
        lower(program, "onnxruntime", out)

    assert untouched(out)


class WritesACast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y.mul_(2)
        return y


@pytest.mark.parametrize(
    ("module", "given"),
    [(WritesItsOwn(), torch.zeros(2, 3)), (WritesACast(), torch.zeros(2, 3, dtype=torch.int64))],
)
def test_what_is_written_in_place_and_is_its_own_may_be(
    out: Path, module: nn.Module, given: Tensor
) -> None:
    assert lower(trace("own", module, (given,)), "onnxruntime", out).equal


def test_a_cast_to_the_dtype_that_an_input_has_is_that_input(out: Path) -> None:
    with pytest.raises(ProgramError, match="writes to its input `x`"):
        lower(trace("same", WritesACast(), (torch.zeros(2, 3),)), "onnxruntime", out)


def test_float16_is_held_to_what_float16_can_do(out: Path) -> None:
    torch.manual_seed(0)
    program = trace("half", nn.Linear(64, 64).half(), (torch.zeros(2, 64).half(),))

    lowered = lower(program, "onnxruntime", out)

    assert lowered.equal
    assert lowered.gate is LOWERED["float16"]


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("qcm6490", "float32"), ("hailo8", "float32"), ("openvino-npu", "float16")],
)
def test_a_file_is_held_to_what_its_own_weights_can_do_and_not_to_the_chips_precision(
    program: Program, tmp_path: Path, target: str, dtype: str
) -> None:
    out = tmp_path / f"normed{get_target(target).spec.lowering.lowered_suffix}"

    lowered = lower(program, target, out, LowerOptions(run=ONE_THREAD))

    assert lowered.equal
    assert lowered.gate is LOWERED[dtype]


def test_bfloat16_at_the_border_is_rejected(out: Path) -> None:
    program = trace("brain", nn.Linear(4, 4).bfloat16(), (torch.zeros(2, 4).bfloat16(),))

    with pytest.raises(ProgramError, match="`input` of program `brain` is bfloat16"):
        lower(program, "onnxruntime", out)

    assert untouched(out)


def test_a_pt2_file_for_xnnpack_goes_through_its_rewrites(program: Program, tmp_path: Path) -> None:
    torch.export.save(program.exported, tmp_path / "normed.pt2")
    out = tmp_path / "normed.pte"

    lowered = lower(tmp_path / "normed.pt2", "xnnpack", out, LowerOptions(run=ONE_THREAD))

    assert out.read_bytes()[4:6] == b"ET"
    assert lowered.equal
    assert lowered.rewrites["layer-norm-by-linear"] == 1
    assert lowered.facts["undelegated"] == []
    assert sorted(os.listdir(tmp_path)) == ["normed.pt2", "normed.pte"]


class _Wrong(Runner):
    """Another runner, with the first output changed."""

    def __init__(self, runner: Runner, change: Any) -> None:
        super().__init__(runner.spec)
        self._runner, self._change = runner, change

    def _run(self, inputs: Any) -> Any:
        outputs = list(self._runner._run(inputs))
        return [self._change(outputs[0]), *outputs[1:]]


def wrong(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    chosen = type(lowering.get_target("onnxruntime"))
    load = chosen.load

    def load_wrong(self: Any, *arguments: Any) -> dict[str, Runner]:
        return {name: _Wrong(r, change) for name, r in load(self, *arguments).items()}

    monkeypatch.setattr(chosen, "load", load_wrong)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda y: y + 0.01,
            "SQNR 40.0 dB is below 60 dB; the largest error divided by the reference's",
        ),
        (lambda y: np.where(y > 0, y, np.nan), "NaN of 15 values"),
        (lambda y: y[:, :2], "returned 'y' as (1, 2, 5) float32: its signature states (1, 3, 5)"),
        (lambda y: y.astype(np.float64), "returned 'y' as (1, 3, 5) float64: its signature states"),
        (lambda y: np.full_like(y, np.inf), "infinite values"),
    ],
    ids=["wrong", "nan", "shape", "dtype", "infinite"],
)
def test_what_computes_something_else_is_not_written(
    program: Program, out: Path, monkeypatch: pytest.MonkeyPatch, change: Any, says: str
) -> None:
    wrong(monkeypatch, change)

    with pytest.raises(VerificationError, match="was not written") as rejected:
        lower(program, "onnxruntime", out)

    assert says in rejected.value.why
    assert untouched(out)


def test_what_computes_something_else_is_written_on_request(
    program: Program, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch, lambda y: y * np.nan)

    lowered = lower(program, "onnxruntime", out, LowerOptions(allow_unequal=True))

    assert not lowered.equal
    assert lowered.to_json()["max_relative"] is None  # JSON has no NaN
    assert lowered.to_json()["comparisons"][0]["passed"] is False
    onnx.checker.check_model(str(out), full_check=True)


def test_a_program_that_keeps_state_is_rejected(out: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x + self.count

    with pytest.raises(ProgramError, match="keeps state in a buffer, `count`"):
        lower(trace("counter", Counter(), (torch.zeros(1),)), "onnxruntime", out)

    assert untouched(out)


def test_an_operator_that_the_opset_lacks_is_named(out: Path) -> None:
    class Flipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ~x

    program = trace("flipped", Flipped(), (torch.zeros(3, dtype=torch.int64),))

    with pytest.raises(LoweringError) as rejected:
        lower(program, "onnxruntime", out, LowerOptions(opset=13))

    assert rejected.value.why == "`BitwiseNot` is new in opset 18"
    assert untouched(out)
    assert lower(program, "onnxruntime", out, LowerOptions(opset=18)).facts["opset"] == 18


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("xnnpack", {"opset": 13}),
        ("xnnpack", {"simplify": True}),
        ("onnxruntime", {"opset": 12}),
        ("onnxruntime", {"opset": 21}),
        ("toaster", {}),
        ("hailo8l", {"opset": 20}),
    ],
)
def test_options_that_do_not_fit_are_rejected_before_any_work(
    program: Program, out: Path, target: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        lower(program, target, out, LowerOptions(**options))

    assert untouched(out)


def test_a_path_that_cannot_be_written_is_rejected_before_any_work(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "no" / "folder.onnx", tmp_path / "a\0b"):
        with pytest.raises(WhisperportError, match="cannot write"):
            lower("no such program.pt2", "onnxruntime", out)


def test_two_that_write_one_file_do_not_share_a_folder(program: Program, out: Path) -> None:
    with (
        locked(lock_path(out)),
        pytest.raises(WhisperportError, match="another process") as rejected,
    ):
        lower(program, "onnxruntime", out)

    assert str(out) in rejected.value.what
    assert untouched(out)


def test_a_machine_that_is_too_small_is_reported(
    program: Program, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 10**8)

    with pytest.raises(WhisperportError, match="too little memory"):
        lower(program, "onnxruntime", out)

    assert untouched(out)
    assert lower(program, "onnxruntime", out, LowerOptions(preflight=False)).equal


@pytest.mark.parametrize("interrupt", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_full_disk_and_an_interrupt_leave_nothing(
    program: Program, out: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    def write(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise interrupt

    monkeypatch.setattr("whisperport.model.trace.onnx_file.write_onnx_file", write)

    with pytest.raises((WhisperportError, KeyboardInterrupt)) as failed:
        lower(program, "onnxruntime", out)

    assert untouched(out)
    if isinstance(interrupt, OSError):
        assert "No space left" in failed.value.why  # type: ignore[attr-defined]


def test_what_a_file_of_inputs_holds_is_compared_too(
    program: Program, out: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "call.npz", x=np.ones((1, 3, 6), np.float32))

    lowered = lower(program, "onnxruntime", out, LowerOptions(inputs=(tmp_path / "call.npz",)))

    samples = {one.sample for one in lowered.equality.compared}
    assert samples == {"noise of scale 1", "noise of scale 0.1", "noise of scale 10", "call.npz"}


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.argmax(-1), x > 0


def test_integers_and_booleans_must_be_identical(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = trace("argmax", Argmax(), (torch.zeros(2, 8),), ["best", "positive"])
    assert lower(program, "onnxruntime", out).equal

    wrong(monkeypatch, lambda best: best + np.array([0, 1]))
    out.write_bytes(b"old")
    with pytest.raises(VerificationError) as rejected:
        lower(program, "onnxruntime", out)

    assert "`best` on noise of scale 1: 1 of 2 values of int64 differ" in rejected.value.why
    assert untouched(out)


def test_the_report_is_json(program: Program, out: Path) -> None:
    import json

    lowered: Lowered = lower(program, "onnxruntime", out)

    data = json.loads(json.dumps(lowered.to_json(), allow_nan=False))
    assert data["equal"] is True
    assert data["opset"] == 20
    assert data["program"]["inputs"] == [{"name": "x", "shape": [1, 3, 6], "dtype": "float32"}]


class UsesTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * tokens[..., None]


def test_the_place_of_a_rejected_node_is_named(tmp_path: Path) -> None:
    program = trace("gathers", Gathers(), (torch.zeros(1, 4, 8),))

    with pytest.raises(LoweringError) as rejected:
        lower(program, "hailo8l", tmp_path / "gathers.onnx")

    line = inspect.getsourcelines(Gathers.forward)[1] + 2
    assert f"`gather`, in {__file__}:{line}: gather is not in the list" in rejected.value.why


class Gathers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        index = (x > 0).long()
        return torch.gather(x, 1, index)


@pytest.mark.parametrize("target", ["hailo8l", "genio700"])
def test_a_program_that_is_rejected_points_to_check_and_fix(target: str, tmp_path: Path) -> None:
    path = tmp_path / "a decoder.pt2"
    program = trace("decoder", UsesTokens(), (torch.zeros(1, 4, dtype=torch.long),))
    torch.export.save(program.exported, path)
    suffix = get_target(target).spec.lowering.lowered_suffix

    with pytest.raises(LoweringError, match="does not support the program") as rejected:
        lower(path, target, tmp_path / f"decoder{suffix}")

    assert "input of dtype int64" in rejected.value.why
    check = f"whisperport check '{path}' --target {target}"
    fixed = tmp_path / "a decoder.fixed.pt2"
    assert f"`{check}` lists" in rejected.value.hint
    assert f"`{check.replace('check', 'fix', 1)} --out '{fixed}'`" in rejected.value.hint
    assert os.listdir(tmp_path) == [path.name]


# Chips of one vendor are lowered by the same code.
ONE_OF_EACH_VENDOR = [t.spec.name for t in {type(one): one for one in TARGETS}.values()]
ALL = [target.spec.name for target in TARGETS]


@pytest.mark.parametrize("target", core_or_all(ONE_OF_EACH_VENDOR, ALL))
def test_every_target_states_the_suffix_of_what_is_lowered(
    program: Program, target: str, tmp_path: Path
) -> None:
    suffix = next(t for t in TARGETS if t.spec.name == target).spec.lowering.lowered_suffix
    out = tmp_path / f"normed{suffix}"

    lowered = lower(program, target, out, LowerOptions(run=ONE_THREAD))

    assert lowered.equal
    content = out.read_bytes()
    if suffix == ".json":
        assert list(json.loads(content)["programs"]) == ["normed"]
    elif suffix == ".onnx":
        assert onnx.load_from_string(content).graph.node
    else:
        offset, magic = {
            ".pte": (4, b"ET"),
            ".tflite": (4, b"TFL3"),
            ".xml": (0, b"<?xml"),
            ".pt2": (0, b"PK"),
        }[suffix]
        assert content[offset:].startswith(magic)


def openvino_output(path: Path, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Run a model as its users do: OpenVINO finds the weights by the name of the .xml file."""
    openvino = pytest.importorskip("openvino")
    compiled = openvino.Core().compile_model(path, "CPU")
    found: np.ndarray[Any, Any] = compiled([x])[0]
    return found


def test_weights_are_named_after_the_file_and_not_after_the_program(tmp_path: Path) -> None:
    # given: two programs of one name, and a user's file of that name
    x = torch.randn(1, 3, 6)
    modules = [nn.Linear(6, 5), nn.Linear(6, 5)]
    programs = [trace("net", module, (torch.zeros(1, 3, 6),), ["y"]) for module in modules]
    (tmp_path / "net.bin").write_bytes(b"mine")

    outs = [tmp_path / "first.xml", tmp_path / "second.xml"]
    options = LowerOptions(run=ONE_THREAD)
    for program, out in zip(programs, outs, strict=True):
        lowered = lower(program, "openvino", out, options)
        assert lowered.files == (out, out.with_suffix(".bin"))

    assert (tmp_path / "net.bin").read_bytes() == b"mine"
    for module, out in zip(modules, outs, strict=True):
        np.testing.assert_allclose(
            openvino_output(out, x.numpy()), module(x).detach(), atol=0.02
        )  # bf16
    assert len(os.listdir(tmp_path)) == 5


def test_a_file_beside_is_replaced_only_with_the_program_that_it_belongs_to(
    program: Program, tmp_path: Path
) -> None:
    out, weights = tmp_path / "first.xml", tmp_path / "first.bin"
    weights.write_bytes(b"mine")
    options = LowerOptions(run=ONE_THREAD)

    with pytest.raises(WhisperportError, match=r"first\.bin exists already"):
        lower(program, "openvino", out, options)
    unchanged = weights.read_bytes(), os.listdir(tmp_path)
    out.write_bytes(b"an older model")
    lower(program, "openvino", out, options)

    assert unchanged == (b"mine", ["first.bin"])
    assert openvino_output(out, np.zeros((1, 3, 6), np.float32)).shape == (1, 3, 5)
    assert sorted(os.listdir(tmp_path)) == ["first.bin", "first.xml"]


def test_a_failed_move_leaves_the_old_program_with_its_old_weights(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, weights = tmp_path / "first.xml", tmp_path / "first.bin"
    out.write_bytes(b"old model")
    weights.write_bytes(b"old weights")

    def fail_at_the_program(source: Path, place: Path) -> bool:
        if place == out and source.parent.name != "old":
            raise OSError(errno.EIO, "Input/output error")
        return rename_if_free(source, place)

    monkeypatch.setattr(replacing_files, "rename_if_free", fail_at_the_program)
    with pytest.raises(WhisperportError, match="cannot write"):
        lower(program, "openvino", out, LowerOptions(run=ONE_THREAD))

    assert (out.read_bytes(), weights.read_bytes()) == (b"old model", b"old weights")
    assert sorted(os.listdir(tmp_path)) == ["first.bin", "first.xml"]


@pytest.mark.parametrize("link", [False, True])
def test_the_input_is_never_the_output(program: Program, tmp_path: Path, link: bool) -> None:
    path = out = tmp_path / "p.pt2"
    torch.export.save(program.exported, path)
    before = path.read_bytes()
    if link:
        out = tmp_path / "link.pt2"
        out.symlink_to(path)

    with pytest.raises(UsageError, match="cannot write"):
        lower(path, "ethos-u85", out)

    assert path.read_bytes() == before


def test_a_suffix_of_another_format_is_rejected(program: Program, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`onnxruntime` writes \.onnx files") as rejected:
        lower(program, "onnxruntime", tmp_path / "r.pte")

    assert rejected.value.hint == f"use `--out {tmp_path / 'r.onnx'}`"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("given", ["program", "inputs"])
def test_a_file_beside_is_no_input(program: Program, tmp_path: Path, given: str) -> None:
    out, weights = tmp_path / "v.xml", tmp_path / "v.bin"
    out.write_bytes(b"an older program")
    torch.export.save(program.exported, tmp_path / "p.pt2")
    (tmp_path / "p.pt2").rename(weights)
    link = tmp_path / "link.pt2"
    link.symlink_to(weights)
    before = weights.read_bytes()
    options = LowerOptions(inputs=(weights,) if given == "inputs" else (), run=ONE_THREAD)

    with pytest.raises(UsageError, match="cannot write"):
        lower(link if given == "program" else program, "openvino", out, options)

    assert (out.read_bytes(), weights.read_bytes()) == (b"an older program", before)
