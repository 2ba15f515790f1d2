"""`step` and the prefills of 8 bits run in one session, which computes what their own sessions do."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from whisperport.errors import BundleError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.program_kind import PREFILL, STEP
from whisperport.program.runner import Array, Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu import onnxruntime
from whisperport.targets.cpu.onnxruntime import OPSETS, LowerOptions
from whisperport.targets.onnx.any_tokens import same_but_for_tokens
from whisperport.targets.onnx.runner import OnnxRunner

NAMES = ["step", "prefill_4", "prefill_64", "align", "step_2"]
JOINED = ["step", "prefill_4", "prefill_64"]
# Of the largest value: 16 times the precision of float32. Graphs of known sizes are optimized otherwise, so
# that sums differ. A value that crosses the border between two levels of 8 bits would differ by more.
ROUNDING = 2e-6
Lowered = tuple[Path, list[ProgramEntry]]


def lowered_w8(
    micro: Whisper, folder: Path, names: Sequence[str], opset: int = OPSETS[-1]
) -> Lowered:
    """Lower programs of the micro model in the precision `w8` of the target `onnxruntime`."""
    target = get_target("onnxruntime").configured(LowerOptions(opset=opset))
    target = target.with_precisions(dict.fromkeys(names, "w8"))
    programs = list(whisper_programs(Parts(micro, [(0, 0)]), names))
    return folder, target.lower(programs, folder)


def loaded(lowered: Lowered) -> dict[str, Runner]:
    return get_target("onnxruntime").load(*lowered, RunOptions(threads=1))


@pytest.fixture(scope="module")
def original(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lowered_w8(micro, tmp_path_factory.mktemp("lowered"), NAMES)


def sessions(runners: dict[str, Runner], names: Sequence[str]) -> set[int]:
    found = [runners[name] for name in names]
    return {id(one._session) for one in found if isinstance(one, OnnxRunner)}


def feed(runner: Runner, cached: int | None = None) -> dict[str, Array]:
    """Return inputs with room for `cached` tokens in the caches; None: for all."""
    random = np.random.default_rng(0)
    room = next(one.shape[2] for one in runner.spec.inputs if one.name.startswith("self_k_"))
    missing = room - (room if cached is None else cached)
    found = {}
    for one in runner.spec.inputs:
        shape = list(one.shape)
        if one.name in runner.free_axes:
            shape[runner.free_axes[one.name]] -= missing
        found[one.name] = random.standard_normal(shape).astype(one.dtype)
    return found


@pytest.mark.parametrize("cached", [1, None])
@pytest.mark.parametrize("bound", [False, True])
def test_one_session_computes_what_three_do(
    original: Lowered, monkeypatch: pytest.MonkeyPatch, cached: int | None, bound: bool
) -> None:
    joined = loaded(original)
    monkeypatch.setattr(onnxruntime, "same_but_for_tokens", lambda _: ())
    alone = loaded(original)
    assert len(sessions(joined, JOINED)) == 1
    assert len(sessions(alone, JOINED)) == 3

    for name in JOINED:
        inputs = feed(joined[name], cached)
        found, expected = joined[name].run(inputs), alone[name].run(inputs)
        if bound:
            found = bound_run(joined[name], inputs)
        assert found.keys() == expected.keys()
        for one in found:
            np.testing.assert_allclose(
                found[one],
                expected[one],
                rtol=0,
                atol=ROUNDING * float(abs(expected[one]).max()),
                err_msg=one,
            )


def bound_run(runner: Runner, inputs: dict[str, Array]) -> dict[str, Array]:
    """Run twice with bound caches: the second run wraps their memory."""
    binding = runner.binding()
    caches = {name for name in runner.free_axes if name != "mask"}
    for name in caches:
        binding.bind(name, inputs[name])
    rest = {name: inputs[name] for name in inputs if name not in caches}
    binding.run(rest)
    return dict(binding.run(rest))


def test_programs_of_one_size_are_not_joined(original: Lowered) -> None:
    folder, entries = original
    runners = loaded((folder, [one for one in entries if one.spec.name in ("step", "align")]))
    assert len(sessions(runners, ["step", "align"])) == 2


def test_programs_of_an_opset_that_measures_no_axis_are_not_joined(
    micro: Whisper, tmp_path: Path
) -> None:
    runners = loaded(lowered_w8(micro, tmp_path, ["step", "prefill_4"], opset=14))
    assert len(sessions(runners, ["step", "prefill_4"])) == 2


def changed(folder: Path, name: str, change: str) -> None:
    """Change a copied program so that it computes something else, or states another signature."""
    path = folder / "onnxruntime" / f"{name}.onnx"
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    if change == "constant":
        scale = next(one for one in graph.initializer if one.name == "val_4")
        scale.raw_data = np.array(0.5, np.float32).tobytes()
    elif change == "order":
        node = next(one for one in graph.node if one.op_type == "Add" and one.input[0] != "x")
        node.input[:] = reversed(node.input)
    elif change == "operator":
        next(one for one in graph.node if one.op_type == "Gelu").op_type = "Erf"
    elif change == "output":
        swapped = {"new_k_0": "new_k_1", "new_k_1": "new_k_0"}
        for node in graph.node:
            node.output[:] = [swapped.get(one, one) for one in node.output]
    else:
        graph.input[0].type.tensor_type.shape.dim[2].dim_value += 1
    onnx.save(model, path)


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("change", ["constant", "order", "operator", "output", "shape"])
def test_a_program_that_computes_something_else_is_not_joined(
    original: Lowered, tmp_path: Path, name: str, change: str
) -> None:
    folder, entries = original
    for source in (folder / "onnxruntime").iterdir():
        (tmp_path / "onnxruntime").mkdir(exist_ok=True)
        (tmp_path / "onnxruntime" / source.name).write_bytes(source.read_bytes())
    changed(tmp_path, name, change)

    programs = [(one.spec, OnnxGraph.of(tmp_path, one)) for one in entries]
    assert same_but_for_tokens(programs) == ()


def test_a_signature_that_states_another_output_is_an_error(original: Lowered) -> None:
    folder, entries = original
    step = next(one for one in entries if one.spec.kind.name == STEP)
    other = replace(step.spec, outputs=(replace(step.spec.outputs[0], name="scores"),))
    rest = [one for one in entries if one.spec.kind.name == PREFILL]
    with pytest.raises(BundleError, match="signature"):
        loaded((folder, [replace(step, spec=other), *rest]))
