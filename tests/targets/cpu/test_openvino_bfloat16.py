"""Programs of `openvino` that run for every token: their keys and values are converted to bfloat16 once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whisperport.model.trace.program import trace
from whisperport.program.bundle import ProgramEntry
from whisperport.program.placement import Placement
from whisperport.program.runner import Array, Binding, Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.openvino import bfloat16, runtime
from whisperport.targets.cpu.openvino import target as openvino_target
from whisperport.targets.cpu.openvino.bfloat16 import inputs_in_bf16, rounded
from whisperport.targets.cpu.openvino.runtime import Device, has_bf16, start
from whisperport.verification.array_comparison import compare
from whisperport.verification.tolerances import GATES

OPENVINO = get_target("openvino")
HEADS, WIDTH, AUDIO, TOKENS = 2, 16, 24, 8
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
        "cross_k_0": (heads, WIDTH, AUDIO),
        "cross_v_0": (heads, AUDIO, WIDTH),
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
    assert compare("y", found[0], plain.run(given)["y"], GATES["bf16"])


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
