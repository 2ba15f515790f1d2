"""Keys and values of the audio in 8 bits: near float32's, the same in a batch, rounded once per window."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from whisperport.model.network.whisper import Whisper
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.runner import Array, Runner
from whisperport.targets.cpu import onnxruntime
from whisperport.targets.onnx.rounded_audio import (
    LEVELS,
    OFFSET,
    SCALE,
    RoundedState,
    Rounding,
    multiplies_exactly,
    read_in_8_bits,
)
from whisperport.targets.onnx.runner import OnnxRunner, cpu_session

from .test_free_axes import Lowered, lowered_w8, runners_of

NAMES = ["step", "prefill_4", "step_2", "align"]
ROUNDED = NAMES[:3]
# 8 bits of keys, queries, probabilities and values, each a quarter of a percent of the largest number: what
# the attention adds to the residual differs by 1 %, and this is what the sum of two layers differs by.
NEAR = 0.02

session = partial(cpu_session, 1)
pytestmark = pytest.mark.skipif(
    not multiplies_exactly(session), reason="this CPU adds 8-bit multiplications in 16 bits"
)


@pytest.fixture(scope="module")
def lowered(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lowered_w8(micro, tmp_path_factory.mktemp("lowered"), NAMES)


def in_float(lowered: Lowered, monkeypatch: pytest.MonkeyPatch) -> dict[str, Runner]:
    monkeypatch.setattr(onnxruntime, "multiplies_exactly", lambda _: False)
    return runners_of(lowered)


def feed(runner: Runner) -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {
        one.name: random.standard_normal(one.shape).astype(one.dtype) for one in runner.spec.inputs
    }


def rounded_inputs(runner: Runner) -> set[str]:
    assert isinstance(runner, OnnxRunner)
    return {one.name for one in runner._session.get_inputs() if one.type == "tensor(int8)"}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_program_computes_nearly_what_it_does_with_audio_in_float32(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    runner = runners_of(lowered)[name]
    exact = in_float(lowered, monkeypatch)[name]
    inputs = feed(runner)

    assert {f"cross_k_0{LEVELS}", f"cross_v_0{LEVELS}"} <= rounded_inputs(runner)
    assert not rounded_inputs(exact)
    outputs, expected = runner.run(inputs), exact.run(inputs)
    for one, array in outputs.items():
        largest = float(abs(expected[one]).max())
        np.testing.assert_allclose(array, expected[one], rtol=0, atol=NEAR * largest, err_msg=one)
    assert (outputs["logits"] != expected["logits"]).any()


def test_align_reads_audio_in_float32(lowered: Lowered) -> None:
    assert not rounded_inputs(runners_of(lowered)["align"])


def test_without_exact_products_all_audio_is_float32(
    lowered: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    for runner in in_float(lowered, monkeypatch).values():
        assert not rounded_inputs(runner)


@pytest.mark.parametrize("name", ["step", "step_2"])
def test_a_binding_computes_what_a_run_does_in_every_run(lowered: Lowered, name: str) -> None:
    runner = runners_of(lowered)[name]
    inputs = feed(runner)
    expected = runner.run(inputs)
    binding = runner.binding()
    bound = {one for one, role in runner.roles.items() if role != "input"}
    for one in bound:
        binding.bind(one, inputs[one])

    for _ in range(3):
        outputs = binding.run({one: inputs[one] for one in inputs.keys() - bound})
        for one, array in expected.items():
            np.testing.assert_array_equal(outputs[one], array)


def test_a_row_of_a_batch_has_the_logits_of_a_step(lowered: Lowered) -> None:
    runners = runners_of(lowered)
    single, batch = runners["step"], runners["step_2"]
    rows = [feed(single), {k: a * 0.7 for k, a in feed(single).items()}]
    joined = {k: np.concatenate([row[k] for row in rows]) for k in rows[0]}

    found = batch.run(joined)["logits"]

    for row, inputs in enumerate(rows):
        expected = single.run(inputs)["logits"][0]
        # float32 sums in another order
        np.testing.assert_allclose(found[row], expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_a_bound_batch_reads_the_part_that_was_reported_as_changed(lowered: Lowered) -> None:
    runner = runners_of(lowered)["step_2"]
    inputs = feed(runner)
    binding = runner.binding()
    bound = {one for one, role in runner.roles.items() if role == "state"}
    for one in bound:
        binding.bind(one, inputs[one])
    free = {one: inputs[one] for one in inputs.keys() - bound}
    for _ in range(2):
        before = {k: a.copy() for k, a in binding.run(free).items()}

    for one in ("cross_k_0", "cross_v_0"):
        heads = slice(len(inputs[one]) // 2, None)  # of the second row
        inputs[one][heads] *= -2
        binding.changed(one, (heads,))
    after = binding.run(free)

    np.testing.assert_array_equal(after["logits"][0], before["logits"][0])
    assert (after["logits"][1] != before["logits"][1]).any()
    np.testing.assert_array_equal(after["logits"], runner.run(inputs)["logits"])
    assert not binding.copies


# Rounding ----------------------------------------------------------------------------------------


@pytest.fixture
def counted() -> tuple[Rounding, list[int]]:
    """A rounding, and the rows of each run of its sessions."""
    rows: list[int] = []

    class Counting:
        def __init__(self, model: bytes) -> None:
            self._inner = session(model)

        def run(self, names: list[str], inputs: dict[str, Array]) -> Any:
            rows.append(len(inputs["rows"]))
            return self._inner.run(names, inputs)

    return Rounding(Counting), rows


@pytest.mark.parametrize(
    ("name", "shape", "scales"), [("k", (3, 4, 50), 4), ("k", (3, 1, 50), 1), ("v", (3, 50, 4), 1)]
)
def test_levels_and_scales_express_the_numbers_within_half_a_level(
    name: str, shape: tuple[int, ...], scales: int
) -> None:
    spread = np.logspace(-3, 3, shape[0])[:, None, None]  # each head has scales of its own
    array = (np.random.default_rng(0).standard_normal(shape) * spread).astype(np.float32)

    found = Rounding(session)(f"cross_{name}_0", array)
    levels, scale = found[f"cross_{name}_0{LEVELS}"], found[f"cross_{name}_0{SCALE}"]

    assert (levels.dtype, levels.shape, scale.shape) == (np.int8, shape, (3, 1, scales))
    assert abs(levels.astype(int)).max() == 127
    steps = scale if name == "v" else scale.transpose(0, 2, 1)
    assert (abs(levels * steps - array) <= 0.501 * steps).all()
    if name == "k":
        sums = 128 * levels.sum(1, np.int32, keepdims=True)
        np.testing.assert_array_equal(found[f"cross_k_0{OFFSET}"], sums)


def test_a_step_multiplies_by_keys_without_a_zero_point(lowered: Lowered) -> None:
    """With one, ONNX Runtime copies all keys for each token."""
    folder, entries = lowered
    entry = next(one for one in entries if one.spec.name == "step")
    model = OnnxGraph.of(folder, entry).detach()

    assert read_in_8_bits(model, entry.spec)

    products = [node for node in model.graph.node if node.op_type == "MatMulInteger"]
    assert {len(node.input) for node in products} == {2}


def test_arrays_of_a_window_are_rounded_once_and_then_forgotten(
    counted: tuple[Rounding, list[int]],
) -> None:
    rounding, runs = counted
    array = np.ones((2, 3, 8), np.float32)

    first, second = rounding("cross_k_0", array), rounding("cross_k_0", array)
    assert first is second
    assert runs == [6]

    again = array.view()  # another window in the same memory
    again *= 2
    assert rounding("cross_k_0", again)[f"cross_k_0{SCALE}"][0, 0, 0] == np.float32(2 / 127)
    assert len(rounding._known) == 2
    del array, again
    gc.collect()
    assert not rounding._known


def test_only_the_changed_heads_of_a_batch_are_rounded_again(
    counted: tuple[Rounding, list[int]],
) -> None:
    rounding, runs = counted
    array = np.ones((4, 8, 3), np.float32)
    state = RoundedState(rounding, "cross_v_0", array)
    levels = state.arrays[f"cross_v_0{LEVELS}"]

    array[2:] = [-3, 1, 0]
    state.changed((slice(2, 4), slice(None)))

    assert runs == [4, 2]
    assert levels[:2].tolist() == np.full((2, 8, 3), 127).tolist()
    assert (levels[2:] == [-127, 42, 0]).all()


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e30])
def test_any_audio_gives_finite_logits(lowered: Lowered, value: float) -> None:
    runner = runners_of(lowered)["step"]
    inputs = feed(runner)
    inputs |= {one: np.full_like(a, value) for one, a in inputs.items() if "cross_v" in one}
    inputs |= {one: np.zeros_like(a) for one, a in inputs.items() if "cross_k" in one}

    assert np.isfinite(runner.run(inputs)["logits"]).all()


def test_a_nan_is_not_hidden(lowered: Lowered) -> None:
    runner = runners_of(lowered)["step"]
    inputs = feed(runner)
    inputs["x"][0, 0, 3] = np.nan

    assert np.isnan(runner.run(inputs)["logits"]).any()


# What is not changed -----------------------------------------------------------------------------


def test_a_cpu_that_loses_large_sums_is_found() -> None:
    class Saturating:
        """Adds pairs of products in 16 bits, as some CPUs without an instruction for it do."""

        def run(self, _: Any, inputs: dict[str, Array]) -> list[Array]:
            a, b = inputs["a"].astype(int), inputs["b"].astype(int)
            products = a[..., None] * b[:, None]
            pairs = products[:, :, 0::2] + products[:, :, 1::2]
            return [pairs.clip(-(2**15), 2**15 - 1).sum(2)]

    assert not multiplies_exactly(lambda _: Saturating())


def second_reader(graph: Any) -> None:
    graph.node.add(op_type="Identity", input=["cross_k_0"], output=["further"])


def another_operator(graph: Any) -> None:
    next(one for one in graph.node if "cross_v_0" in one.input).op_type = "Gemm"


def another_order(graph: Any) -> None:
    node = next(one for one in graph.node if "cross_k_1" in one.input)
    node.input[:] = reversed(node.input)


def another_shape(graph: Any) -> None:
    value = next(one for one in graph.input if one.name == "cross_v_1")
    value.type.tensor_type.shape.dim[1].dim_value += 1


@pytest.mark.parametrize("change", [second_reader, another_operator, another_order, another_shape])
def test_a_graph_of_another_form_stays_as_it_is(
    lowered: Lowered, change: Callable[[Any], None]
) -> None:
    folder, entries = lowered
    entry = next(one for one in entries if one.spec.name == "step")
    model = OnnxGraph.of(folder, entry).detach()
    change(model.graph)
    before = model.SerializeToString()

    assert read_in_8_bits(model, entry.spec) == ()
    assert model.SerializeToString() == before


def test_an_older_opset_stays_as_it_is(lowered: Lowered) -> None:
    folder, entries = lowered
    entry = next(one for one in entries if one.spec.name == "step")
    model = OnnxGraph.of(folder, entry).detach()
    model.opset_import[0].version = 17

    assert read_in_8_bits(model, entry.spec) == ()
