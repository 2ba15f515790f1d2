"""ONNX programs read caches of any length; a graph that may not allow it stays as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.runner import Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.onnx import runner as onnx_runner
from whisperport.targets.onnx.short_caches import cache_axes, free_cache_length

from ...embedded import default_bundle
from ...extent import core_or_all

ORT = get_target("onnxruntime")
NAMES = ["step", "prefill_4", "align", "step_8"]
N = 448
STORED = 3  # tokens in the cache
Lowered = tuple[Path, list[ProgramEntry]]


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    """The decode programs of the embedded model."""
    bundle = Bundle.open(default_bundle())
    return bundle.folder, [bundle.manifest.program(name) for name in NAMES]


@pytest.fixture(scope="module")
def runners(lowered: Lowered) -> dict[str, Runner]:
    return ORT.load(*lowered, RunOptions(threads=1))


def feed(runner: Runner, rows: int) -> dict[str, np.ndarray]:
    """Return inputs with caches for `rows` tokens, of which the mask shows the first STORED."""
    random = np.random.default_rng(0)
    found = {t.name: random.standard_normal(t.shape).astype(t.dtype) for t in runner.spec.inputs}
    found["mask"][..., :STORED], found["mask"][..., STORED:N], found["mask"][..., N:] = 0, -3e4, 0
    for name, axis in cache_axes(found).items():
        hidden = range(rows, N)  # not the new tokens at the end of the mask
        found[name] = np.ascontiguousarray(np.delete(found[name], hidden, axis))
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [STORED, 64, N - 1])
def test_a_shorter_cache_gives_the_same_results(
    runners: dict[str, Runner], name: str, rows: int
) -> None:
    runner = runners[name]

    found, expected = runner.run(feed(runner, rows)), runner.run(feed(runner, N))

    for output, array in expected.items():
        # A softmax sums the same numbers in another order, in each of three layers.
        np.testing.assert_allclose(found[output], array, atol=1e-5 * np.abs(array).max())


def test_a_longer_cache_and_a_longer_other_axis_are_rejected(runners: dict[str, Runner]) -> None:
    runner = runners["step"]
    given = feed(runner, N)
    for name, axis in (("self_k_0", 2), ("self_k_0", 1), ("cross_k_0", 2), ("x", 2)):
        longer = np.concatenate([given[name]] * 2, axis)
        shorter = np.delete(given[name], 0, axis)
        for wrong in (longer, shorter) if axis == 1 or "self" not in name else (longer,):
            with pytest.raises(ValueError, match=f"expects '{name}'"):
                runner.run({**given, name: np.ascontiguousarray(wrong)})


def test_older_versions_of_onnx_runtime_read_caches_of_the_stated_length(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_runner, "IN_PLACE_SINCE", (99, 0))

    runner = ORT.load(*lowered, RunOptions(threads=1))["step"]

    assert not runner.cache_axes
    with pytest.raises(ValueError, match=r"expects '(mask|self_k_0)'"):
        runner.run(feed(runner, 16))
    runner.run(feed(runner, N))


def node_of(model: Any, kind: str, index: int = 0) -> Any:
    return [node for node in model.graph.node if node.op_type == kind][index]


def read_twice(model: Any) -> None:
    model.graph.node.add(op_type="Identity", input=["self_k_0"], output=["copy"])


def values_read_twice(model: Any) -> None:
    model.graph.node.add(op_type="Identity", input=["self_v_1"], output=["copy"])


def probabilities_returned(model: Any) -> None:
    model.graph.output.add(name=node_of(model, "Softmax").output[0])


def mask_used_elsewhere(model: Any) -> None:
    model.graph.node.add(op_type="Identity", input=["mask"], output=["copy"])


def another_axis(model: Any) -> None:
    node_of(model, "Softmax").attribute[0].i = 1


def another_operator(model: Any) -> None:
    node_of(model, "Softmax").op_type = "LogSoftmax"


def another_slice(model: Any) -> None:
    node_of(model, "Slice").input[2] = node_of(model, "Slice").input[1]


def other_steps(model: Any) -> None:
    node_of(model, "Slice").input[4] = node_of(model, "Slice").input[2]


def keys_after_the_new_ones(model: Any) -> None:
    concat = node_of(model, "Concat")
    concat.input[:] = list(concat.input)[::-1]


def no_mask(model: Any) -> None:
    add = next(node for node in model.graph.node if "mask" in node.input)
    add.input[:] = [name if name != "mask" else "x" for name in add.input]


def a_mask_of_four_axes(model: Any) -> None:
    mask = next(value for value in model.graph.input if value.name == "mask")
    mask.type.tensor_type.shape.dim.add(dim_value=1)


def no_caches(model: Any) -> None:
    kept = [value for value in model.graph.input if not value.name.startswith("self_k")]
    copies = [type(one).FromString(one.SerializeToString()) for one in kept]
    del model.graph.input[:]
    model.graph.input.extend(copies)


@pytest.mark.parametrize("name", ["step", "step_8"])
@pytest.mark.parametrize(
    "change",
    [
        read_twice,
        values_read_twice,
        probabilities_returned,
        mask_used_elsewhere,
        another_axis,
        another_operator,
        another_slice,
        other_steps,
        keys_after_the_new_ones,
        no_mask,
        a_mask_of_four_axes,
        no_caches,
    ],
)
def test_a_graph_of_another_form_is_not_changed(
    lowered: Lowered, name: str, change: Callable[[Any], None]
) -> None:
    folder, entries = lowered
    entry = next(entry for entry in entries if entry.spec.name == name)
    model = OnnxGraph.of(folder, entry).detach()
    change(model)
    before = model.SerializeToString(deterministic=True)

    assert not free_cache_length(model)

    assert model.SerializeToString(deterministic=True) == before


def test_a_graph_with_an_inner_graph_is_not_changed(lowered: Lowered, tmp_path: Path) -> None:
    folder, entries = lowered
    entry = next(entry for entry in entries if entry.spec.name == "step")
    model = OnnxGraph.of(folder, entry).detach()
    attribute = model.graph.node.add(op_type="If").attribute.add(name="then_branch")
    attribute.g.CopyFrom(type(model.graph)())
    attribute.g.node.add(op_type="Identity", input=["self_k_0"], output=["copy"])

    assert not free_cache_length(model)


@given(data=st.data())
@settings(max_examples=core_or_all(40, 1000), deadline=None)
def test_a_damaged_graph_is_changed_or_not_but_never_an_error(
    lowered: Lowered, data: st.DataObject
) -> None:
    folder, entries = lowered
    name = data.draw(st.sampled_from(["step", "step_8"]))
    entry = next(entry for entry in entries if entry.spec.name == name)
    model = OnnxGraph.of(folder, entry).detach()
    kinds = ("MatMul", "Concat", "Reshape", "Add", "Softmax", "Slice")
    nodes = [node for node in model.graph.node if node.op_type in kinds]
    names = [name for node in nodes for name in (*node.input, *node.output)]

    for _ in range(data.draw(st.integers(1, 3))):
        node = data.draw(st.sampled_from(nodes[:16]))
        match data.draw(st.sampled_from(["input", "output", "attribute", "rename", "shape"])):
            case "rename":
                node.input[:1] = [""]
                node.input[0] = data.draw(st.sampled_from(names))  # a cycle, perhaps
            case "shape":
                value = data.draw(st.sampled_from([*model.graph.input, *model.graph.value_info]))
                del value.type.tensor_type.shape.dim[data.draw(st.integers(0, 2)) :]
            case field:
                del getattr(node, field)[data.draw(st.integers(0, 2)) :]

    assert free_cache_length(model) in (True, False)


@pytest.mark.parametrize("name", NAMES)
def test_the_changed_graph_states_no_length(lowered: Lowered, name: str) -> None:
    folder, entries = lowered
    entry = next(entry for entry in entries if entry.spec.name == name)
    model = OnnxGraph.of(folder, entry).detach()

    assert free_cache_length(model)

    changed = onnx.ModelProto.FromString(model.SerializeToString())
    values = (*changed.graph.input, *changed.graph.value_info)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
    assert not [name for name, shape in shapes.items() if N in shape]
    assert shapes["mask"][2] == 0
