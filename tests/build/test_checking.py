"""`check`, `inspect` and `compare` from Python."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save
from torch import Tensor, nn

import whisperport
from whisperport import CompareOptions, compare
from whisperport.build import compare as module
from whisperport.build import inspect as inspecting
from whisperport.build.check import Checked
from whisperport.build.inspect import InspectOptions, inspect
from whisperport.errors import LoweringError, ProgramError, UsageError
from whisperport.model.trace.program import trace
from whisperport.program.bundle.origin import record_own
from whisperport.system.progress import reporting

from ..edited_bundles import constant_of, endless_step, foreign_bundle
from ..embedded import default_bundle

# `check` from Python: a live module, and what torch.export returned.


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.table = nn.LayerNorm(8), nn.Dropout(), nn.Embedding(50, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.dropout(self.norm(x)) @ self.table.weight.t() * scale}


X = torch.zeros(1, 4, 8)


def rejected(checked: Checked) -> list[tuple[str, str, str]]:
    (program,) = checked.programs
    return [(g.rule, g.operator, g.occurrences[0].module) for g in program.rejected]


@pytest.mark.parametrize("args", [(X,), [X], {"x": X}, {"x": X, "scale": 2.0}])
def test_a_module_is_checked_without_a_file(args: Any) -> None:
    checked = whisperport.check(Head(), args, "xnnpack")

    assert not checked
    assert checked.programs[0].graph.name == "Head"
    assert rejected(checked) == [("WP301", "matmul", ""), ("WP101", "layer_norm", "norm")]
    source = checked.programs[0].rejected[0].occurrences[0].source
    assert source is not None
    assert source.file == __file__


def test_a_module_keeps_its_mode() -> None:
    module = Head().train()
    module.norm.eval()

    whisperport.check(module, (X,), "onnxruntime")

    assert [one.training for one in module.modules()] == [True, False, True, True]


def test_an_exported_program_and_a_program_are_checked_as_the_module_is() -> None:
    class Plain(Head):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return super().forward(x, scale)["logits"]

    expected = rejected(whisperport.check(Plain(), (X,), "xnnpack"))
    exported = torch.export.export(Plain().eval(), (X,), strict=False)

    assert rejected(whisperport.check(exported, "xnnpack")) == expected
    assert rejected(whisperport.check(exported, target="xnnpack")) == expected
    assert rejected(whisperport.check(trace("plain", Plain(), (X,)), "xnnpack")) == expected


@pytest.mark.parametrize("args", ["xnnpack", X])
def test_a_module_needs_its_arguments(args: Any) -> None:
    with pytest.raises(UsageError, match="cannot check the module `Head`") as error:
        whisperport.check(Head(), args, "xnnpack")

    assert "(x,)" in error.value.hint


def test_a_module_that_torch_cannot_export_is_an_error() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if bool(x.sum() > 0) else x

    with pytest.raises(LoweringError, match="could not trace `Branches`"):
        whisperport.check(Branches(), (X,), "xnnpack")


def test_importing_the_package_and_its_check_needs_no_torch() -> None:
    code = "import sys, whisperport; whisperport.check; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


# Programs of unknown origin are inspected in a child process, with the same result.


def step() -> Path:
    return default_bundle() / "onnxruntime" / "step.onnx"


ONCE = InspectOptions(repeat=1, threads=1)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_a_child_finds_what_this_process_does() -> None:
    stages: list[str] = []

    (ours,) = inspect(step(), InspectOptions(repeat=1, threads=1, trust=True)).profiles
    with reporting(stages.append):
        (theirs,) = inspect(step(), ONCE).profiles

    assert {(node.name, node.where) for node in theirs.nodes} == {
        (node.name, node.where) for node in ours.nodes
    }
    assert (theirs.program, theirs.notes, theirs.runs) == (ours.program, ours.notes, ours.runs)
    assert all(node.ms is not None for node in theirs.nodes)
    assert stages == ["running step.onnx"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_a_program_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "BASE_S", 2.0)
    monkeypatch.setattr(inspecting, "RUN_S", 0.0)
    path = tmp_path / "endless.onnx"
    onnx.save(endless_step(), path)

    with pytest.raises(ProgramError, match=r"(?s)took more than 2 seconds.*--trust"):
        inspect(path, ONCE)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_a_constant_of_80_gb_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    onnx.save(constant_of(80 * 10**9), path)

    with pytest.raises(ProgramError, match=r"(?s)cannot run large\.onnx.*--trust"):
        inspect(path, ONCE)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_errors_are_those_of_the_inspection() -> None:
    with pytest.raises(UsageError, match="no runtime option `speed`"):
        inspect(step(), InspectOptions(options={"speed": "high"}))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
@pytest.mark.parametrize(("name", "is_limited"), [("own", False), ("somebody's", True)])
def test_only_bundles_of_others_are_limited(
    name: str, is_limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: list[Any] = []
    monkeypatch.setattr(
        inspecting,
        "run_limited",
        lambda *job: limited.append(job) or {"profiles": [], "skipped": [], "plans": []},
    )
    bundle = foreign_bundle(tmp_path / "bundle", name)
    if not is_limited:
        record_own(bundle.manifest)

    inspect(bundle.folder, InspectOptions(repeat=1, programs=("cross_kv",)))

    assert bool(limited) == is_limited


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_limits_grow_with_the_weights_beside_a_program(tmp_path: Path) -> None:
    program = tmp_path / "model.onnx"
    program.write_bytes(b"graph")
    small = inspecting._limits_of(program, 5)
    with (tmp_path / "model.onnx.data").open("wb") as file:
        file.truncate(10**9)

    large = inspecting._limits_of(program, 5)

    assert small.memory_bytes < 1.5e9
    assert small.seconds < 30
    assert large.memory_bytes > 4e9
    assert large.seconds > 600


# `compare` names the layer in which two programs differ.

TRUSTED = CompareOptions(trust=True)
WIDTH = 8


def net(path, fault="", outputs=("y",), frames=WIDTH):
    """Write layers of (frames, 8): fc1, norm, fc2, and the softmax of attn; `fault` changes one of them."""
    random = np.random.default_rng(0)
    weights = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in {
            **dict.fromkeys(("w1", "w2"), (WIDTH, WIDTH)),
            **dict.fromkeys(("b1", "b2", "scale", "shift"), (WIDTH,)),
        }.items()
    }
    if fault == "weight":
        weights["w2"][0] *= 2
    elif fault == "quantized":
        weights["w2"] = np.rint(weights["w2"] * 20) / np.float32(20)
    elif fault == "NaN":
        weights["w2"][0, 0] = np.nan
    epsilon, axis = (0.1 if fault == "epsilon" else 1e-5), (-2 if fault == "axis" else -1)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["m1"], "/blocks.0/fc1/MatMul"),
        helper.make_node("Add", ["m1", "b1"], ["f1"], "/blocks.0/fc1/Add"),
        helper.make_node(
            "LayerNormalization",
            ["f1", "scale", "shift"],
            ["n"],
            "/blocks.0/norm/LN",
            epsilon=epsilon,
        ),
        helper.make_node("MatMul", ["n", "w2"], ["m2"], "/blocks.1/fc2/MatMul"),
        helper.make_node("Add", ["m2", "b2"], ["f2"], "/blocks.1/fc2/Add"),
        helper.make_node("Softmax", ["f2"], ["y"], "/blocks.1/attn/Softmax", axis=axis),
    ]
    shape = [1, frames, WIDTH]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in outputs],
        [numpy_helper.from_array(one, name) for name, one in weights.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


@pytest.fixture
def original(tmp_path):
    return net(tmp_path / "original.onnx")


def test_identical_programs_are_equal(original):
    found = compare(original, original, TRUSTED)

    assert found
    assert (found.first, found.worst) == (None, None)
    assert {one.error for one in found.values} == {0}
    assert found.kept == (6, 6)
    assert len(found.values) == 6


@pytest.mark.parametrize(
    ("fault", "layer"),
    [
        ("weight", "/blocks.1/fc2"),
        ("quantized", "/blocks.1/fc2"),
        ("epsilon", "/blocks.0/norm"),
        ("axis", "/blocks.1/attn"),
    ],
)
def test_the_layer_with_a_fault_is_named(original, tmp_path, fault, layer):
    found = compare(original, net(tmp_path / "faulty.onnx", fault), TRUSTED)

    assert not found
    assert found.values[found.first].fault == layer
    assert all(one.error == 0 for one in found.values[: found.first])
    json.dumps(found.to_json(), allow_nan=False)


def test_a_nan_fails_and_its_layer_is_named(original, tmp_path):
    found = compare(original, net(tmp_path / "nan.onnx", "NaN"), TRUSTED)

    assert not found
    assert found.values[found.first].layer == "/blocks.1/fc2"
    assert found.values[found.first].error == math.inf
    json.dumps(found.to_json(), allow_nan=False)


def test_a_missing_output_fails(tmp_path):
    a, b = net(tmp_path / "a.onnx", outputs=("y", "n")), net(tmp_path / "b.onnx")

    found = compare(a, b, TRUSTED)

    assert not found
    assert [bool(one) for one in found.outputs] == [True, False]


def test_programs_with_other_inputs_are_rejected(original, tmp_path):
    with pytest.raises(ProgramError, match="have different inputs"):
        compare(original, net(tmp_path / "longer.onnx", frames=9), TRUSTED)


def test_programs_without_a_common_value_are_rejected(original, tmp_path):
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [1, WIDTH, WIDTH]), ("z", [1, 1, WIDTH]))
    )
    node = helper.make_node("ReduceMax", ["x"], ["z"], axes=[1])
    graph = helper.make_graph([node], "other", [x], [y])
    other = tmp_path / "other.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), other)

    with pytest.raises(ProgramError, match="was matched with a value"):
        compare(original, other, TRUSTED)


@pytest.mark.parametrize("device_first", [False, True])
def test_the_arrays_of_a_device_are_compared_by_name(original, tmp_path, device_first):
    x = np.random.default_rng(1).standard_normal((1, WIDTH, WIDTH)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x)
    _, values = faulty_run(tmp_path, x)
    device = tmp_path / "device"
    device.mkdir()
    for name in ("f1", "n", "f2"):
        np.save(device / f"{name}.npy", values[name])
    values["y"].tofile(device / "y.bin")
    options = CompareOptions(trust=True, inputs=tmp_path / "inputs.npz")

    found = compare(*((device, original) if device_first else (original, device)), options)

    assert found.values[found.first].layer == "/blocks.1/fc2"
    assert [one.other for one in found.values] == ["f1.npy", "n.npy", "f2.npy", "y.bin"]
    with pytest.raises(UsageError, match="inputs of the arrays"):
        compare(original, device, TRUSTED)
    with pytest.raises(UsageError, match="no program"):
        compare(device, device, options)


def faulty_run(folder, x):
    from whisperport.verification.diagnosis.recording import opened

    with opened(str(net(folder / "faulty.onnx", "weight"))) as program:
        run = program.record([x])
    return run.outputs, run.values


def test_a_program_of_a_bundle_is_named_behind_a_colon(exported):
    bundle = exported("onnxruntime", "micro", batch=2).folder

    assert compare(f"{bundle}:step", f"{bundle}:step", TRUSTED)
    with pytest.raises(ProgramError, match="none is named"):
        compare(bundle, bundle, TRUSTED)


def test_what_a_child_process_returns_is_the_same(original, tmp_path, monkeypatch):
    faulty = net(tmp_path / "faulty.onnx", "weight")
    monkeypatch.setattr(
        module,
        "run_limited",
        lambda job, arguments, limits: json.loads(json.dumps(module.compare_in_child(**arguments))),
    )

    assert compare(original, faulty).to_json() == compare(original, faulty, TRUSTED).to_json()


def test_a_file_of_another_kind_is_rejected(original, tmp_path):
    other = tmp_path / "text.txt"
    other.write_text("no program")

    for path in (other, tmp_path / "missing.onnx"):
        with pytest.raises(ProgramError):
            compare(original, path, TRUSTED)


def test_a_torch_program_is_compared_with_its_onnx_form(tmp_path):
    import torch

    from whisperport.model.trace.onnx_file import write_onnx_file
    from whisperport.model.trace.pt2 import read_pt2

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(WIDTH, WIDTH)
            self.second = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model, x = Layers().eval(), (torch.randn(2, WIDTH),)
    torch.export.save(torch.export.export(model, x), tmp_path / "a.pt2")
    with torch.no_grad():
        model.second.weight[0] *= 2
    torch.export.save(torch.export.export(model, x), tmp_path / "b.pt2")
    write_onnx_file(read_pt2(tmp_path / "b.pt2"), tmp_path / "b.onnx")

    for other in ("b.pt2", "b.onnx"):
        found = compare(tmp_path / "a.pt2", tmp_path / other, TRUSTED)
        assert not found
        assert found.values[found.first].layer == "second"
        assert found.values[found.first].line.rpartition(":")[0].endswith("test_checking.py")
