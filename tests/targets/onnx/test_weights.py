"""The decoder's weights are in memory once, and `step_B` has packed ones; hostile graphs are rejected."""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from whisperport.errors import BundleError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import trace
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle, ListedFiles, ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.json_records import to_json
from whisperport.program.runner import Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu import onnxruntime as ort_target
from whisperport.targets.onnx import runner as onnx_runner
from whisperport.targets.onnx.runner import OnnxRunner
from whisperport.targets.onnx.weights import OnnxWeights, OwnWeights

ORT = get_target("onnxruntime")
ONE_THREAD = RunOptions(threads=1)
DECODER = {"prefill_4", "prefill_64", "step", "align"}
Large = tuple[Path, list[ProgramEntry]]
WIDTH, LAYERS = 1024, 16  # weights of 64 MiB: large against all else in a process
BATCH = "step_2"


@pytest.fixture(scope="module")
def bundle(exported: Callable[[str], Bundle]) -> Bundle:
    return exported("onnxruntime")


class Stack(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module", params=["float16", "float32"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Large:
    """Make four programs of 1, 4, 4 and 64 tokens with the same weights, stored in this dtype."""
    folder = tmp_path_factory.mktemp("large")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    if request.param == "float16":
        layers.half().float()
    rows = {"a": 1, "b": 4, "c": 4, "d": 64}
    programs = [
        trace(name, Stack(layers), (torch.zeros(1, count, WIDTH),), ["y"])
        for name, count in rows.items()
    ]
    return folder, ORT.lower(programs, folder)


def as_before(
    folder: Path, entries: list[ProgramEntry], options: RunOptions = ONE_THREAD
) -> dict[str, Runner]:
    """Load each program separately, so that no weights are shared."""
    loaded: dict[str, Runner] = {}
    for entry in entries:
        loaded |= ORT.load(folder, [entry], options)
    return loaded


def noise(runner: Runner, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        tensor.name: random.standard_normal(tensor.shape).astype(tensor.dtype)
        for tensor in runner.spec.inputs
    }


# What is shared ----------------------------------------------------------------------------------


def test_the_decoder_s_programs_share_and_the_encoder_keeps_its_own(bundle: Bundle) -> None:
    graphs = {e.spec.name: OnnxGraph.of(bundle.folder, e) for e in bundle.manifest.programs}

    weights = OnnxWeights(list(graphs.values()))

    assert {name for name, graph in graphs.items() if graph in weights} == DECODER


def test_a_program_by_itself_shares_with_nobody(bundle: Bundle) -> None:
    graph = OnnxGraph.of(bundle.folder, bundle.manifest.program("step"))

    assert graph not in OnnxWeights([graph])


def test_a_step_of_several_texts_stores_no_weights_of_its_own(
    micro: Whisper, tmp_path: Path
) -> None:
    programs = list(whisper_programs(Parts(micro, [(0, 0)]), ["step", "step_2"]))

    entries = ORT.lower(programs, tmp_path)

    step, batch = (
        {
            entry.value
            for t in graph.external_tensors()
            for entry in t.external_data
            if entry.key == "offset"
        }
        for graph in (OnnxGraph.of(tmp_path, entry) for entry in entries)
    )
    assert batch
    assert batch == step


def test_shared_programs_compute_what_they_compute_alone(
    large: Large,
) -> None:
    folder, entries = large
    alone = as_before(folder, entries)

    for name, runner in ORT.load(folder, entries, ONE_THREAD).items():
        inputs = noise(runner)
        # Sums of 1024 products of about 1, in another order.
        expected = alone[name].run(inputs)["y"]
        np.testing.assert_allclose(runner.run(inputs)["y"], expected, rtol=1e-4, atol=1e-5)


MEMORY = """
import json, sys
from pathlib import Path
import google.protobuf.message, onnxruntime
from whisperport.program.bundle import ProgramEntry
from whisperport.program.json_records import from_json
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec
from whisperport.program.strict_json import plain
from whisperport.targets import RunOptions, get_target

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

folder, *programs = sys.argv[1:]
entries = [
    ProgramEntry(
        spec=from_json(ProgramSpec, plain(json.loads(spec), "spec")),
        placement=Placement(""),
        method="",
        files=tuple(files),
    )
    for spec, *files in map(json.loads, programs)
]
target, before = get_target("onnxruntime"), resident("VmRSS")
runners = target.load(Path(folder), entries, RunOptions(threads=1))
loaded, peak = resident("VmRSS") - before, resident("VmHWM") - before
runners.clear()
print(loaded, peak, resident("VmRSS") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read as Linux has it")
def test_four_programs_take_the_memory_of_one_and_give_it_back(large: Large) -> None:
    folder, entries = large
    weights = LAYERS * WIDTH * WIDTH * 4 / 2**20  # MiB in float32
    programs = [json.dumps([json.dumps(to_json(e.spec)), *e.files]) for e in entries]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, folder, *programs],
        capture_output=True,
        text=True,
        check=True,
    )

    loaded, peak, closed = map(float, done.stdout.split())

    assert loaded < 1.4 * weights  # 4.2 when each session has its own
    assert peak < 1.7 * weights  # besides, one tensor in both precisions
    assert closed < 0.4 * weights  # what ONNX Runtime itself took, and keeps


def test_weights_outlive_what_they_were_loaded_with(large: Large) -> None:
    folder, entries = large
    runners = ORT.load(folder, entries, ONE_THREAD)
    runner = runners["a"]
    inputs = noise(runner)
    expected = runner.run(inputs)["y"]

    del runners
    gc.collect()
    _ = [np.full((WIDTH, WIDTH), np.nan, np.float32) for _ in range(2 * LAYERS)]

    np.testing.assert_array_equal(runner.run(inputs)["y"], expected)


# What is not -------------------------------------------------------------------------------------


def test_an_older_onnxruntime_loads_in_its_own_way(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would copy the arrays for every session, without packing and without saving memory."""
    monkeypatch.setattr(onnxruntime, "__version__", "1.30.0")
    monkeypatch.setattr(OnnxWeights, "session_model", lambda *_: pytest.fail("weights are shared"))

    runners = ORT.load(bundle.folder, bundle.manifest.programs, ONE_THREAD)

    assert set(runners) > DECODER


def changed(
    folder: Path, change: Callable[[onnx.ModelProto], None], bundle: Bundle
) -> list[ProgramEntry]:
    """Write the bundle's `step` after `change`, and an unchanged `prefill`, to `folder`."""
    entries = [bundle.manifest.program(name) for name in ("step", "prefill_4")]
    entries = [replace(e, files=tuple(Path(file).name for file in e.files)) for e in entries]
    source = (bundle.folder / bundle.manifest.program("step").files[0]).parent
    for name in ("weights.bin", "prefill_4.onnx"):
        shutil.copyfile(source / name, folder / name)
    model = onnx.load(str(source / "step.onnx"), load_external_data=False)
    change(model)
    (folder / "step.onnx").write_bytes(model.SerializeToString())
    return entries


def largest(model: onnx.ModelProto) -> onnx.TensorProto:
    return max(model.graph.initializer, key=lambda tensor: np.prod(tensor.dims))


def set_external(key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        entry = next(e for e in largest(model).external_data if e.key == key)
        entry.value = value

    return change


def use_half_itself(model: onnx.ModelProto) -> None:
    """Use a float16 tensor both directly and after conversion to float32."""
    cast = onnx.helper.make_node("Cast", [largest(model).name], ["wide"], to=onnx.TensorProto.FLOAT)
    model.graph.node.insert(0, cast)
    largest(model).data_type = onnx.TensorProto.FLOAT16


def compute_in_half(model: onnx.ModelProto) -> None:
    largest(model).data_type = onnx.TensorProto.FLOAT16


def store_integers(model: onnx.ModelProto) -> None:
    largest(model).data_type = onnx.TensorProto.INT8


def leave_out_the_length(model: onnx.ModelProto) -> None:
    kept = [entry for entry in largest(model).external_data if entry.key != "length"]
    del largest(model).external_data[:]
    largest(model).external_data.extend(kept)


@pytest.mark.parametrize(
    "change",
    [compute_in_half, store_integers, use_half_itself, leave_out_the_length],
    ids=["float16", "int8", "half twice", "no length"],
)
def test_what_is_not_plain_float32_is_left_to_the_session(
    bundle: Bundle, tmp_path: Path, change: Callable[[onnx.ModelProto], None]
) -> None:
    graphs = [OnnxGraph.of(tmp_path, entry) for entry in changed(tmp_path, change, bundle)]

    weights = OnnxWeights(graphs)

    assert not any(graph in weights for graph in graphs)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (set_external("offset", "9" * 17), "beyond the end"),
        (set_external("length", "9" * 17), "beyond the end"),
        (set_external("length", "4"), "cannot load"),
        (set_external("offset", "-1"), "expected numbers of bytes"),
        (set_external("offset", "9" * 5000), "expected numbers of bytes"),
        (set_external("length", "many"), "expected numbers of bytes"),
    ],
    ids=["beyond its end", "longer than the file", "too short", "negative", "far", "no number"],
)
def test_weights_that_do_not_exist_are_rejected(
    bundle: Bundle, tmp_path: Path, change: Callable[[onnx.ModelProto], None], why: str
) -> None:
    entries = changed(tmp_path, change, bundle)

    with pytest.raises(BundleError, match=why):
        ORT.load(tmp_path, entries, ONE_THREAD)


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_graph_raises_nothing_but_what_the_runner_expects(
    folder: Path, intact: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.none() | st.integers(0, len(damaged)))
    (folder / "step.onnx").write_bytes(damaged[:end])
    listed = ListedFiles(folder, frozenset(os.listdir(folder)))
    graphs = [OnnxGraph(listed, name) for name in ("step.onnx", "prefill_4.onnx")]

    with contextlib.suppress(BundleError):
        weights = OnnxWeights(graphs)
        for graph in graphs:
            if graph in weights:
                with contextlib.suppress(ValueError, OSError):
                    weights.session_model(graph, onnxruntime.SessionOptions())


def test_a_node_without_an_output_is_not_changed(folder: Path, intact: bytes) -> None:
    # given a damaged graph: the nodes that multiply by a weight have no output
    model = onnx.ModelProto.FromString(intact)
    stored = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in stored:
            del node.output[:]
    (folder / "step.onnx").write_bytes(model.SerializeToString())
    listed = ListedFiles(folder, frozenset(os.listdir(folder)))
    graphs = [OnnxGraph(listed, name) for name in ("step.onnx", "prefill_4.onnx")]
    # when it is prepared for a session, then nothing but what the runner expects is raised
    with contextlib.suppress(BundleError, ValueError, OSError):
        weights = OnnxWeights(graphs)
        for graph in graphs:
            if graph in weights:
                weights.session_model(graph, onnxruntime.SessionOptions())


@pytest.fixture(scope="module")
def folder(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    changed(folder, lambda _: None, bundle)
    return folder


@pytest.fixture(scope="module")
def intact(folder: Path) -> bytes:
    return (folder / "step.onnx").read_bytes()


@pytest.fixture(scope="module")
def original_batch(
    micro: Whisper, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[ProgramEntry]]:
    folder = tmp_path_factory.mktemp("lowered")
    programs = list(whisper_programs(Parts(micro, [(0, 0)]), ["step", BATCH, "align"]))
    return folder, ORT.lower(programs, folder)


@pytest.fixture
def lowered_batch(
    original_batch: tuple[Path, list[ProgramEntry]], tmp_path: Path
) -> tuple[Path, list[ProgramEntry]]:
    """A copy of the files, for a test that changes them."""
    folder, entries = original_batch
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path, entries


def loaded_batch(folder: Path, entries: list[ProgramEntry], name: str = BATCH) -> OnnxRunner:
    runner = ORT.load(folder, entries, RunOptions(threads=1))[name]
    assert isinstance(runner, OnnxRunner)
    return runner


def results(runner: Runner) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    feed = {t.name: random.standard_normal(t.shape).astype(t.dtype) for t in runner.spec.inputs}
    return list(runner.run(feed).values())


def test_step_b_is_loaded_when_it_is_first_used_and_computes_the_same(
    lowered_batch: tuple[Path, list[ProgramEntry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = loaded_batch(*lowered_batch)
    assert own._made is None
    monkeypatch.setattr(ort_target, "LARGEST", 0)  # the copy of a large model takes too much memory
    shared = loaded_batch(*lowered_batch)
    assert shared._made is not None

    for found, expected in zip(results(own), results(shared), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert own._made is not None


@pytest.mark.parametrize("name", [BATCH, "align"])
def test_files_that_are_replaced_before_the_first_use_do_not_matter(
    lowered_batch: tuple[Path, list[ProgramEntry]], name: str
) -> None:
    expected = results(loaded_batch(*lowered_batch, name))
    runner = loaded_batch(*lowered_batch, name)
    assert runner._made is None

    shutil.rmtree(lowered_batch[0] / "onnxruntime")

    for found, before in zip(results(runner), expected, strict=True):
        np.testing.assert_array_equal(found, before)
    assert runner._made is not None


def test_programs_that_few_transcriptions_use_are_loaded_when_they_are_first_used(
    bundle: Bundle,
) -> None:
    runners = ORT.load(bundle.folder, bundle.manifest.programs, ONE_THREAD)

    assert {name for name in runners if runners[name]._made is None} == {"prefill_64", "align"}


def test_threads_that_use_a_program_first_at_the_same_time_make_one_session(
    lowered_batch: tuple[Path, list[ProgramEntry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, models = onnx_runner._session, []

    def slowly(*arguments: Any) -> Any:
        models.append(arguments[-1])
        time.sleep(0.05)
        return make(*arguments)

    monkeypatch.setattr(onnx_runner, "_session", slowly)
    runner = loaded_batch(*lowered_batch, "align")
    models.clear()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(results, [runner, runner]))

    assert len(models) == 1


def test_a_program_whose_file_is_read_by_its_session_is_loaded_at_once(
    lowered_batch: tuple[Path, list[ProgramEntry]],
) -> None:
    folder, entries = lowered_batch

    runner = loaded_batch(
        folder, [entry for entry in entries if entry.spec.name == "align"], "align"
    )

    assert runner._made is not None


@pytest.mark.parametrize("size", [0, 100])
def test_missing_weights_of_step_b_are_an_error_when_it_is_loaded(
    lowered_batch: tuple[Path, list[ProgramEntry]], size: int
) -> None:
    folder, entries = lowered_batch
    with (folder / "onnxruntime" / "weights.bin").open("r+b") as file:
        file.truncate(size)

    with pytest.raises(BundleError, match=r"beyond the end of weights\.bin"):
        loaded_batch(folder, [entry for entry in entries if entry.spec.name == BATCH])


def test_an_empty_file_of_weights_is_an_error(
    lowered_batch: tuple[Path, list[ProgramEntry]],
) -> None:
    folder, entries = lowered_batch
    entry = next(entry for entry in entries if entry.spec.name == BATCH)
    path = folder / entry.files[0]
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for stored in tensor.external_data:
            if stored.key in ("offset", "length"):
                stored.value = "0"
    path.write_bytes(model.SerializeToString())
    (folder / "onnxruntime" / "weights.bin").write_bytes(b"")

    with pytest.raises(BundleError, match="cannot read the weights"):
        OwnWeights(OnnxGraph.of(folder, entry), entry.spec)


def test_another_signature_of_step_b_is_an_error_at_the_first_run(
    lowered_batch: tuple[Path, list[ProgramEntry]],
) -> None:
    folder, entries = lowered_batch
    step, batch = (
        folder / next(e for e in entries if e.spec.name == name).files[0]
        for name in ("step", BATCH)
    )
    shutil.copyfile(step, batch)
    runner = loaded_batch(folder, entries)

    with pytest.raises(BundleError, match="signature"):
        results(runner)
