"""ONNX files that store weights once, and sessions that use the given options."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from whisperport.build.export.export import ExportOptions, export
from whisperport.errors import LoweringError
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.program import Program
from whisperport.model.trace.trial import eager_outputs, random_inputs
from whisperport.model.trace.whisper import Parts
from whisperport.model.trace.whisper import step as step_program
from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.onnxruntime import OPSETS, LowerOptions

from ..conftest import noise_clips
from ..extent import EVERYTHING, core_or_all

ORT = get_target("onnxruntime")


@pytest.fixture(scope="module")
def step(micro_checkpoint: Any) -> Program:
    return step_program(Parts(build_model(micro_checkpoint), [(0, 0)]))


@pytest.fixture(scope="module")
def bundle(exported: Callable[[str], Bundle]) -> Bundle:
    return exported("onnxruntime")


def test_every_weight_is_stored_once_for_all_programs(bundle: Bundle, tiny_checkpoint: Any) -> None:
    weights = tiny_checkpoint.weights.values()
    large = [w for w in weights if w.numel() * w.element_size() >= 1024]
    # The embedding is once the projection to the vocabulary; token lookup is the host's.
    total = sum(w.numel() * w.element_size() for w in large)

    size = (bundle.folder / "onnxruntime/weights.bin").stat().st_size

    assert size < 1.02 * total + 4096 * len(large)


def test_graphs_hold_no_weights_and_no_paths_of_the_build_machine(bundle: Bundle) -> None:
    for entry in bundle.manifest.programs:
        file = bundle.folder / entry.files[0]
        data = file.read_bytes()

        assert len(data) < 200_000
        for trace in (b"site-packages", b"/src/", b"whisperport", str(Path.home()).encode()):
            assert trace not in data


def test_graphs_are_valid_and_of_the_opset_that_is_stated(bundle: Bundle) -> None:
    for entry in bundle.manifest.programs:
        file = bundle.folder / entry.files[0]

        onnx.checker.check_model(str(file), full_check=True)

        model = onnx.load(str(file), load_external_data=False)
        opsets = {o.domain: o.version for o in model.opset_import}
        assert opsets[""] == entry.facts.others["opset"]
        assert [i.name for i in model.graph.input] == [t.name for t in entry.spec.inputs]
        assert [o.name for o in model.graph.output] == [t.name for t in entry.spec.outputs]


@pytest.mark.skipif(not EVERYTHING, reason="an export; run make test-all")
def test_a_bundle_of_another_opset_is_verified_and_of_that_opset_throughout(
    micro_checkpoint: Any, quick_tracing: None, tmp_path: Path
) -> None:
    clips = tuple(replace(clip, samples=clip.samples[:3200]) for clip in noise_clips())  # a window
    how = ExportOptions(options={"onnxruntime.opset": "13"}, clips=clips, run=RunOptions(threads=1))

    older = export(micro_checkpoint, "onnxruntime", tmp_path / "13", how)

    assert older.manifest.verified
    for entry in older.manifest.programs:
        model = onnx.load(str(older.folder / entry.files[0]), load_external_data=False)
        assert {o.domain: o.version for o in model.opset_import} == {"": 13}
        assert entry.facts.others["opset"] == 13


@pytest.mark.parametrize("opset", core_or_all(OPSETS[:1], OPSETS))
def test_every_opset_computes_what_torch_does(opset: int, step: Program, tmp_path: Path) -> None:
    target = ORT.configured(LowerOptions(opset=opset))
    (entry,) = target.lower([step], tmp_path, lambda _: None)
    inputs = random_inputs(step, 0)

    runner = target.load(tmp_path, [entry], RunOptions(threads=1))["step"]
    found = runner.run({t.name: x.numpy() for t, x in zip(step.spec.inputs, inputs, strict=True)})

    model = onnx.load(str(tmp_path / entry.files[0]), load_external_data=False)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    for array, expected in zip(found.values(), eager_outputs(step, inputs), strict=True):
        np.testing.assert_allclose(array, expected.numpy(), atol=1e-4, rtol=0)


def test_the_opsets_are_those_that_are_written() -> None:
    from whisperport.model.trace.onnx_opset import NEWEST, OLDEST

    assert (OPSETS[0], OPSETS[-1]) == (OLDEST, NEWEST)


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_asked_for(bundle: Bundle, threads: int) -> None:
    runners = ORT.load(bundle.folder, bundle.manifest.programs, RunOptions(threads=threads))

    sessions = [runner._session.get_session_options() for runner in runners.values()]  # type: ignore[attr-defined]
    assert {options.intra_op_num_threads for options in sessions} == {threads}


def test_a_provider_that_is_not_installed_lists_those_that_are(bundle: Bundle) -> None:
    options = RunOptions(options={"onnxruntime.provider": "NeuronExecutionProvider"})

    with pytest.raises(LoweringError, match="NeuronExecutionProvider") as refused:
        ORT.load(bundle.folder, bundle.manifest.programs, options)

    assert "CPUExecutionProvider" in refused.value.why


def test_inputs_may_be_read_only(bundle: Bundle) -> None:
    """Read-only, as arrays that are mapped from disk."""
    entry = bundle.manifest.program("cross_kv")
    features = np.ones(entry.spec.inputs[0].shape, np.float32)
    features.setflags(write=False)

    outputs = ORT.load(bundle.folder, [entry], RunOptions(threads=1))["cross_kv"].run(
        {"features": features}
    )

    assert len(outputs) == len(entry.spec.outputs)


def test_outputs_are_written_to_given_arrays(bundle: Bundle) -> None:
    """Parts of larger arrays, as the rows of a batch."""
    entry = bundle.manifest.program("cross_kv")
    runner = ORT.load(bundle.folder, [entry], RunOptions(threads=1))["cross_kv"]
    random = np.random.default_rng(0)
    features = random.standard_normal(entry.spec.inputs[0].shape).astype(np.float32)
    whole = {t.name: np.full((3, *t.shape), 7, np.float32) for t in entry.spec.outputs}

    runner.run_into({"features": features}, {name: array[1] for name, array in whole.items()})

    assert runner.writes_in_place
    for name, expected in runner.run({"features": features}).items():
        np.testing.assert_array_equal(whole[name][1], expected)
        assert (whole[name][[0, 2]] == 7).all()


def test_arrays_that_are_not_contiguous_are_rejected_as_outputs(bundle: Bundle) -> None:
    entry = bundle.manifest.program("cross_kv")
    runner = ORT.load(bundle.folder, [entry], RunOptions(threads=1))["cross_kv"]
    features = np.zeros(entry.spec.inputs[0].shape, np.float32)
    apart = {t.name: np.zeros((*t.shape, 2), np.float32)[..., 0] for t in entry.spec.outputs}

    with pytest.raises(ValueError, match="another form"):
        runner.run_into({"features": features}, apart)
