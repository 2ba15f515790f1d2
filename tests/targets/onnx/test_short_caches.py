"""ONNX programs read caches of any length, if their files denote the axes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.runner import Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.onnx import runner as onnx_runner
from whisperport.targets.onnx.graph import free_caches

from ...embedded import default_bundle

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
    starts = {"self_k_": 2, "self_v_": 1, "mask": 2}
    random = np.random.default_rng(0)
    found = {t.name: random.standard_normal(t.shape).astype(t.dtype) for t in runner.spec.inputs}
    found["mask"][..., :STORED], found["mask"][..., STORED:N], found["mask"][..., N:] = 0, -3e4, 0
    for name in found:
        for axis in (axis for start, axis in starts.items() if name.startswith(start)):
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

    assert not runner.free_axes
    with pytest.raises(ValueError, match=r"expects '(mask|self_k_0)'"):
        runner.run(feed(runner, 16))
    runner.run(feed(runner, N))


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_static_and_the_loaded_graph_states_no_length(
    lowered: Lowered, name: str
) -> None:
    folder, entries = lowered
    entry = next(entry for entry in entries if entry.spec.name == name)
    model = OnnxGraph.of(folder, entry).detach()
    assert {value.name: shape for value, shape in stated(model)}.items() >= {
        (tensor.name, tensor.shape) for tensor in entry.spec.inputs
    }

    assert free_caches(model)

    shapes = {value.name: shape for value, shape in stated(model)}
    assert not [value for value, shape in shapes.items() if N in shape]
    assert shapes["mask"][2] == 0


def stated(model: Any) -> list[tuple[Any, tuple[int, ...]]]:
    return [
        (value, tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim))
        for value in (*model.graph.input, *model.graph.value_info)
    ]


def test_a_file_without_denotations_reads_caches_of_the_stated_length(
    lowered: Lowered, tmp_path: Path
) -> None:
    folder, entries = lowered
    shutil.copytree(folder / "onnxruntime", tmp_path / "onnxruntime")
    step = next(entry for entry in entries if entry.spec.name == "step")
    model = onnx.load(tmp_path / step.files[0], load_external_data=False)
    for value in (*model.graph.input, *model.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            axis.ClearField("denotation")
    onnx.save(model, tmp_path / step.files[0])

    runner = ORT.load(tmp_path, [step], RunOptions(threads=1))["step"]

    assert not runner.free_axes
    expected = ORT.load(folder, [step], RunOptions(threads=1))["step"].run(feed(runner, N))
    for output, array in runner.run(feed(runner, N)).items():
        np.testing.assert_array_equal(array, expected[output])
