"""OpenVINO files as inputs, whoever wrote them, and programs whose keys and values are bfloat16."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("openvino")
pytest.importorskip("torch")
from dataclasses import replace
from typing import Any

import openvino as ov
import pytest
import torch
from openvino import opset13 as opset
from torch import Tensor, nn

from whisperport.build.check import check
from whisperport.build.compare import CompareOptions, compare
from whisperport.errors import LoweringError, ProgramError
from whisperport.model.trace.program import trace
from whisperport.program.bundle import ProgramEntry
from whisperport.program.placement import Placement
from whisperport.program.runner import Array, Binding, Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.openvino import bfloat16, ir, partitioner, runtime
from whisperport.targets.cpu.openvino import target as openvino_target
from whisperport.targets.cpu.openvino.bfloat16 import inputs_in_bf16, rounded
from whisperport.targets.cpu.openvino.ir import constants, read_ir
from whisperport.targets.cpu.openvino.partitioner import AUDIO, ask
from whisperport.targets.cpu.openvino.runtime import NPU, Device, has_bf16, start
from whisperport.verification.array_comparison import compare as compare_arrays
from whisperport.verification.tolerances import GATES

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


# Programs that run for every token

OPENVINO = get_target("openvino")
HEADS, WIDTH, POSITIONS, TOKENS = 2, 16, 24, 8
LAST = (slice(None), slice(TOKENS - 1, TOKENS))  # the row of a token in `self_v_0`

needs_bf16 = pytest.mark.usefixtures("bf16")


class Attention(nn.Module):
    """Attention to the audio, and after it to the tokens, whose keys are their values."""

    def forward(
        self, x: Tensor, cross_k: list[Tensor], cross_v: list[Tensor], self_v: list[Tensor]
    ) -> Any:
        y = torch.softmax(x @ cross_k[0], -1) @ cross_v[0]
        return torch.softmax(y @ self_v[0].transpose(1, 2), -1) @ self_v[0]


Inputs = dict[str, Array]
Lowered = dict[str, tuple[Path, ProgramEntry]]


def inputs(batch: int = 1, seed: int = 0) -> Inputs:
    random, heads = np.random.default_rng(seed), batch * HEADS
    shapes = {
        "x": (heads, 1, WIDTH),
        "cross_k_0": (heads, WIDTH, POSITIONS),
        "cross_v_0": (heads, POSITIONS, WIDTH),
        "self_v_0": (heads, TOKENS, WIDTH),
    }
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def bf16() -> None:
    if not has_bf16(start(Device()), Device()):
        pytest.skip("OpenVINO computes in bfloat16 only on CPUs with AVX-512 BF16 or AMX")


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """Name of a program -> its folder and its entry, in bf16; do not write to the folders."""
    found = {}
    for name, batch in (("step", 1), ("step_2", 2), ("prefill_4", 1)):
        folder = tmp_path_factory.mktemp(name)
        x, *caches = (torch.from_numpy(array) for array in inputs(batch).values())
        program = trace(name, Attention(), (x, *([cache] for cache in caches)), ["y"])
        (entry,) = OPENVINO.with_precisions({name: "bf16"}).lower([program], folder)
        found[name] = folder, entry
    return found


def load(lowered: Lowered, name: str = "step", precision: str = "bf16") -> Runner:
    folder, entry = lowered[name]
    entry = replace(entry, placement=Placement("openvino", precision))
    return OPENVINO.load(folder, [entry], RunOptions(threads=1))[name]


def bound(runner: Runner, given: Inputs) -> Binding:
    binding = runner.binding()
    for name, role in runner.roles.items():
        if role != "input":
            binding.bind(name, given[name])
    return binding


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of numbers of each conversion."""
    found: list[int] = []

    def noted(bits: Any) -> Any:
        found.append(bits.size)
        return rounded(bits)

    monkeypatch.setattr(bfloat16, "rounded", noted)
    return found


@needs_bf16
@pytest.mark.parametrize(("name", "batch"), [("step", 1), ("step_2", 2)])
def test_copies_give_the_results_of_float32_inputs(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch, name: str, batch: int
) -> None:
    runner, given = load(lowered, name), inputs(batch)
    monkeypatch.setattr(runtime, "inputs_in_bf16", lambda _: ())
    plain = load(lowered, name)

    found = [bound(runner, given).run(given)["y"], runner.run(given)["y"]]

    assert plain.in_bf16 == () != runner.in_bf16
    np.testing.assert_array_equal(found[0], found[1])
    assert compare_arrays("y", found[0], plain.run(given)["y"], GATES["bf16"])


@needs_bf16
@pytest.mark.parametrize(("name", "batch"), [("step", 1), ("step_2", 2)])
def test_a_part_that_was_written_between_runs_is_read(
    lowered: Lowered, name: str, batch: int
) -> None:
    runner, given = load(lowered, name), inputs(batch)
    binding = bound(runner, given)
    before = binding.run(given)["y"]

    given["self_v_0"][LAST] = 3
    binding.changed("self_v_0", LAST)

    found = binding.run(given)["y"]
    np.testing.assert_array_equal(found, runner.run(given)["y"])
    assert not np.array_equal(found, before)


@needs_bf16
def test_the_audio_of_one_row_of_a_batch_can_change(lowered: Lowered) -> None:
    runner, given = load(lowered, "step_2"), inputs(2)
    binding = bound(runner, given)
    before = binding.run(given)["y"]

    for name in ("cross_k_0", "cross_v_0"):
        given[name][HEADS:] = inputs(seed=1)[name]
        binding.changed(name, (slice(HEADS, 2 * HEADS),))

    found = binding.run(given)["y"]
    np.testing.assert_array_equal(found, runner.run(given)["y"])
    np.testing.assert_array_equal(found[:HEADS], before[:HEADS])
    assert not np.array_equal(found[HEADS:], before[HEADS:])


@needs_bf16
def test_only_what_was_written_is_converted_again(lowered: Lowered, converted: list[int]) -> None:
    given = inputs()
    binding = bound(load(lowered), given)
    binding.changed("self_v_0", LAST)
    assert converted == []  # a binding that never runs needs no copy

    for _ in range(3):
        binding.run(given)
    assert sum(converted) == sum(array.size for name, array in given.items() if name != "x")

    converted.clear()
    binding.changed("self_v_0", LAST)
    binding.run(given)
    assert converted == [HEADS * WIDTH]


@needs_bf16
def test_the_next_window_may_be_written_to_the_arrays_of_the_last(lowered: Lowered) -> None:
    runner, given = load(lowered), inputs()
    last = bound(runner, given)  # exists still, as that of an error's traceback does
    before = last.run(given)["y"]

    for name, array in inputs(seed=1).items():
        given[name][...] = array
    found = bound(runner, given).run(given)["y"]

    np.testing.assert_array_equal(found, runner.run(given)["y"])
    assert not np.array_equal(found, before)


@needs_bf16
def test_an_array_that_is_bound_later_replaces_the_one_before(
    lowered: Lowered, converted: list[int]
) -> None:
    runner, given = load(lowered), inputs()
    binding = bound(runner, given)
    binding.run(given)
    converted.clear()

    given["self_v_0"] = inputs(seed=1)["self_v_0"]
    binding.bind("self_v_0", given["self_v_0"])
    given["self_v_0"][LAST] = 3
    binding.changed("self_v_0", LAST)
    assert converted == []  # until the next run
    found = binding.run(given)["y"]

    assert sum(converted) == given["self_v_0"].size
    np.testing.assert_array_equal(found, runner.run(given)["y"])


@pytest.mark.parametrize(
    ("name", "precision"),
    [("step", "fp32"), ("step", "fp16"), ("step", "w8"), ("prefill_4", "bf16")],
)
def test_nothing_is_converted_in_float32_nor_for_programs_that_run_rarely(
    lowered: Lowered, converted: list[int], name: str, precision: str
) -> None:
    runner, given = load(lowered, name, precision), inputs()

    bound(runner, given).run(given)
    runner.run(given)

    assert converted == []


def test_nothing_is_converted_on_a_processor_without_bfloat16(
    lowered: Lowered, converted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino_target, "has_bf16", lambda *_: False)
    given = inputs()

    bound(load(lowered), given).run(given)

    assert converted == []


def test_float16_arrays_are_read_as_they_are(lowered: Lowered) -> None:
    spec = lowered["step"][1].spec
    half = tuple(replace(tensor, dtype="float16") for tensor in spec.inputs)

    assert inputs_in_bf16(spec) == ("cross_k_0", "cross_v_0", "self_v_0")
    assert inputs_in_bf16(replace(spec, inputs=half)) == ()


def test_rounding_is_that_of_torch() -> None:
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) + 0x8000
    numbers = np.concatenate([random, ties, ties - 1, ties + 1, ties - 0x8000]).view(np.float32)

    found = rounded(numbers.view(np.uint32)).astype(np.uint32) << 16

    right = torch.from_numpy(numbers).to(torch.bfloat16).float().numpy()
    numeric = ~np.isnan(numbers)
    np.testing.assert_array_equal(found.view(np.float32)[numeric], right[numeric])


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFF7FFF])
def test_a_nan_stays_visible(bits: int) -> None:
    found = rounded(np.array([bits], np.uint32)).astype(np.uint32) << 16

    assert not np.isfinite(found.view(np.float32)).any()
