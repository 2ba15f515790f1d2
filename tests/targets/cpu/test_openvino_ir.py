"""OpenVINO files as inputs: read without OpenVINO, checked, inspected and compared, whoever wrote them."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("openvino")
pytest.importorskip("torch")
import openvino as ov
from openvino import opset13 as opset

from whisperport.build.check import check
from whisperport.build.compare import CompareOptions, compare
from whisperport.errors import LoweringError, ProgramError
from whisperport.targets.cpu.openvino import ir, partitioner, runtime
from whisperport.targets.cpu.openvino.ir import constants, read_ir
from whisperport.targets.cpu.openvino.partitioner import AUDIO, ask
from whisperport.targets.cpu.openvino.runtime import NPU, Device, start

CONSTANT = (
    "<net><layers><layer id='0' name='w' type='Const'><data element_type='f32' offset='{}' size='{}'/>"
    "<output><port id='0'><dim>2</dim></port></output></layer></layers></net>"
)


@pytest.mark.parametrize(
    ("start", "size", "reason"),
    [
        *[(start, size, r"model\.bin is cut off") for start, size in ((0, 12), (8, 8), (2**63, 8))],
        *[
            (*place, r"`w` in model\.bin is damaged")
            for place in ((-8, 8), (4, -4), (0, "9" * 5000))
        ],
    ],
)
def test_a_constant_outside_of_the_file_of_weights_is_an_error(
    start: int, size: int, reason: str, tmp_path: Path
) -> None:
    # given a file of weights of 8 bytes
    (tmp_path / "model.bin").write_bytes(b"\0\0\x80\x3f\0\0\0\x40")
    path = tmp_path / "model.xml"
    path.write_text(CONSTANT.format(0, 8))
    assert [values.tolist() for _, values in constants(path)] == [[1, 2]]
    # when a constant is at another place
    path.write_text(CONSTANT.format(start, size))
    # then reading it is an error of the file
    with pytest.raises(ProgramError, match=reason):
        list(constants(path))


def test_a_constant_of_more_axes_than_an_array_can_have_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(8))
    path = tmp_path / "model.xml"
    axes = "<dim>2</dim>" + "<dim>1</dim>" * 64
    path.write_text(CONSTANT.format(0, 8).replace("<dim>2</dim>", axes))
    assert not list(constants(path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.xml")
    with pytest.raises(ProgramError, match="cannot read"):
        read_ir(tmp_path / "model.xml")


def test_the_time_to_read_a_node_grows_with_its_inputs_only(tmp_path: Path) -> None:
    # given a node of 20,000 inputs
    ports = "".join(f"<port id='{i}'/>" for i in range(20_000))
    path = tmp_path / "model.xml"
    path.write_text(
        f"<net><layers><layer id='0' name='a' type='Concat'><input>{ports}</input></layer></layers></net>"
    )
    # when it is read
    started = time.process_time()
    read_ir(path)
    # then this takes 0.05 s; a search through all ports for each took 11 s
    assert time.process_time() - started < 2


def test_a_file_of_many_elements_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ir, "MAX_ELEMENTS", 5)
    path = tmp_path / "model.xml"
    path.write_text(CONSTANT.format(0, 8))
    with pytest.raises(ProgramError, match="damaged") as caught:
        read_ir(path)
    assert "more than 5 elements" in caught.value.why


def write_model(path: Path, factor: float = 1, name: str = "x") -> Path:
    """Write a model of two layers with a state, whose first axis is dynamic.

    Args:
        name: of the input.
        factor: that a weight of the second layer is multiplied by.
    """
    random = np.random.default_rng(0)
    x = opset.parameter([-1, 8], np.float32, name="x")
    x.output(0).set_names({name})
    first, second = (opset.constant(random.standard_normal((8, 8)), np.float32) for _ in range(2))
    weights = second.data.copy()
    weights[0, 0] *= factor
    hidden = opset.gelu(opset.matmul(x, first, False, True), "tanh")
    info = ov.op.util.VariableInfo()
    info.variable_id, info.data_shape, info.data_type = "sum", ov.PartialShape([-1, 8]), ov.Type.f32
    state = ov.op.util.Variable(info)
    before = opset.read_value(opset.multiply(x, opset.constant(np.float32(0))), state)
    after = opset.add(before, hidden)
    y = opset.matmul(after, opset.constant(weights), False, True)
    y.output(0).set_names({"y"})
    ov.save_model(
        ov.Model([y.output(0)], [opset.assign(after, state)], [x]), path, compress_to_fp16=False
    )
    return path


def test_a_model_with_states_is_checked(tmp_path: Path) -> None:
    # given a model with a state and a dynamic axis
    path = write_model(tmp_path / "model.xml")
    # when it is checked for its own target and for another
    own, other = (check(path, target) for target in ("openvino", "rk3588"))
    # then its operators have the names of all formats, and only the other target rejects any
    graph = own.programs[0].graph
    assert (graph.format, graph.inputs[0].shape, graph.outputs[0].name) == ("ir", ("?", 8), "y")
    operators = {"matmul", "gelu", "mul", "add", "state.ReadValue", "state.Assign"}
    assert {node.op for node in graph.nodes} == operators
    assert next(n for n in graph.nodes if n.op == "gelu").attributes == {"approximate": "tanh"}
    assert own
    assert {"WP402", "WP102"} <= {group.rule for group in other.programs[0].findings}


def test_the_layer_at_which_two_models_diverge_is_named(tmp_path: Path) -> None:
    # given two models of which one weight differs, and inputs for their dynamic axis
    right = write_model(tmp_path / "right.xml")
    wrong = write_model(tmp_path / "wrong.xml", factor=3)
    np.savez(
        tmp_path / "inputs.npz", x=np.random.default_rng(1).standard_normal((3, 8)).astype("f4")
    )
    options = CompareOptions(inputs=tmp_path / "inputs.npz", trust=True)
    # when they are compared
    compared = compare(right, wrong, options)
    # then the layer is named, and a model is equal to itself
    assert not compared
    assert compared.first is not None
    assert compared.values[compared.first].operator == "matmul"
    assert [value.name for value in compared.values if value.error > 1e-5] == ["y"]
    assert compare(right, right, options)


def test_a_model_of_dynamic_shape_needs_inputs(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.xml")
    with pytest.raises(ProgramError, match="no static shape") as caught:
        compare(path, path, CompareOptions(trust=True))
    assert "--inputs" in caught.value.hint


def test_nodes_that_are_computed_from_themselves_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.xml"
    layer = (
        "<layer id='{0}' name='n{0}' type='Relu' version='opset1'><input><port id='0'/></input>"
        "<output><port id='1' precision='FP32'/></output></layer>"
    )
    edge = "<edge from-layer='{}' from-port='1' to-layer='{}' to-port='0'/>"
    path.write_text(
        f"<net><layers>{layer.format(0)}{layer.format(1)}</layers>"
        f"<edges>{edge.format(0, 1)}{edge.format(1, 0)}</edges></net>"
    )
    with pytest.raises(ProgramError, match="damaged") as caught:
        check(path, "openvino")
    assert "computed from itself" in caught.value.why


def test_an_axis_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.xml")
    path.write_text(
        path.read_text()
        .replace('type="Gelu"', 'type="Softmax"')
        .replace("approximation_mode", "axis")
    )
    with pytest.raises(ProgramError, match="damaged") as caught:
        check(path, "openvino")
    assert "axis" in caught.value.why


def write_relu(path: Path) -> Path:
    x = opset.parameter([1, 8], np.float32)
    y = opset.relu(opset.matmul(x, opset.constant(np.eye(8, dtype=np.float32)), False, False))
    ov.save_model(ov.Model([y.output(0)], [x]), path, compress_to_fp16=False)
    return path


def test_a_check_says_what_the_npus_plugin_rewrites_and_runs_on_the_cpu(tmp_path: Path) -> None:
    # given a model, and one that is a decoder by its input and state, without the nodes that NPUW looks for
    paths = write_relu(tmp_path / "a.xml"), write_model(tmp_path / "decoder.xml", name=AUDIO)
    # when both are checked
    right, wrong = (check(path, "openvino-npu").partitions[0].partition for path in paths)
    # then the plugin accepts the first only
    assert right
    assert wrong is not None
    assert not wrong
    assert (right.accepted, right.rejection, wrong.accepted) == (2, "", 0)
    assert "no compiler" in right.scope
    assert wrong.rejection


@pytest.mark.parametrize("dtype", [ov.Type.string, ov.Type.i4, ov.Type.f8e4m3])
def test_an_input_of_a_dtype_that_numpy_lacks_is_no_reason_for_a_rejection(
    dtype: ov.Type, tmp_path: Path
) -> None:
    # given a model that reads the shape of such an input
    x = opset.parameter([1, 8], dtype)
    y = opset.relu(opset.convert(opset.shape_of(x), "f32"))
    path = tmp_path / "a.xml"
    ov.save_model(ov.Model([y.output(0)], [x]), path)
    # when the plugin is asked
    answer = ask(model=str(path), weights=str(path.with_suffix(".bin")))
    # then it accepts the model
    assert answer["rejection"] == ""


def test_a_compiler_is_asked_for_each_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given OpenVINO with a compiler, which rejects a model for one kind of NPU
    core = partitioner.shared_core()

    class WithCompiler:
        available_devices = ("CPU",)
        read_model = core.read_model

        def get_property(self, device: str, name: str) -> object:
            return {**core.get_property(device, name), partitioner.PLATFORM: "RW"}

        def compile_model(self, model: object, device: str, options: dict[str, object]) -> object:
            if partitioner.PLATFORM not in options:
                return core.compile_model(model, device, options)
            if options[partitioner.PLATFORM] == "4000":
                raise RuntimeError("Exception from a.cpp:1:\nToo large")
            return None

    monkeypatch.setattr(partitioner, "shared_core", WithCompiler)
    path = write_relu(tmp_path / "a.xml")
    # when the plugin is asked
    answer = ask(model=str(path), weights=str(path.with_suffix(".bin")))
    # then its reason names the NPU
    assert answer["rejection"] == "NPU 4000: Too large"


def test_without_the_npus_plugin_nothing_is_asked_or_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given OpenVINO of a system for which it has no plugin for NPUs
    class WithoutPlugin:
        available_devices = ("CPU",)

        def get_versions(self, device: str) -> dict[str, object]:
            return {}

    for module in (partitioner, runtime):
        monkeypatch.setattr(module, "shared_core", WithoutPlugin)
    # when a model is checked, and a device is emulated
    answer = check(write_relu(tmp_path / "a.xml"), "openvino-npu").partitions[0]
    # then both say what is missing
    assert answer.partition is None
    assert "plugin for NPUs" in answer.reason
    with pytest.raises(LoweringError, match="plugin for NPUs"):
        start(Device(name=NPU, emulated=True))
