"""`compare` names the layer in which two programs differ."""

import json
import math

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from whisperport import CompareOptions, compare
from whisperport.build import compare as module
from whisperport.errors import ProgramError, UsageError

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
    bundle = exported("onnxruntime", "micro").folder

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
        assert found.values[found.first].line.rpartition(":")[0].endswith("test_comparing.py")
