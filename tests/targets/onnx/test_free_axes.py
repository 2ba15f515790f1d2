"""ONNX Runtime's CPU runs programs on audio, caches and tokens of any number, from files that state one."""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from whisperport.errors import BundleError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.program_kind import PREFILL, STEP
from whisperport.program.runner import Array, Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu import onnxruntime
from whisperport.targets.cpu.onnxruntime import OPSETS, LowerOptions
from whisperport.targets.onnx import runner as onnx_runner
from whisperport.targets.onnx.any_tokens import same_but_for_tokens
from whisperport.targets.onnx.audio_length import free_audio
from whisperport.targets.onnx.graph import free_caches
from whisperport.targets.onnx.runner import OnnxRunner

from ...embedded import default_bundle
from ...micro import DIMS

T, D = DIMS.n_audio_ctx, DIMS.n_audio_state
Lowered = tuple[Path, list[ProgramEntry]]


def lowered_w8(
    micro: Whisper, folder: Path, names: Sequence[str], opset: int = OPSETS[-1]
) -> Lowered:
    """Lower programs of the micro model in the precision `w8` of the target `onnxruntime`."""
    target = get_target("onnxruntime").configured(LowerOptions(opset=opset))
    target = target.with_precisions(dict.fromkeys(names, "w8"))
    programs = list(whisper_programs(Parts(micro, [(0, 0)]), names))
    return folder, target.lower(programs, folder)


def runners_of(lowered: Lowered) -> dict[str, Runner]:
    return get_target("onnxruntime").load(*lowered, RunOptions(threads=1))


@pytest.fixture(scope="module")
def w8(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lowered_w8(micro, tmp_path_factory.mktemp("w8"), ["encoder", "cross_kv"])


@pytest.fixture(scope="module")
def fp32(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("fp32")
    programs = list(whisper_programs(Parts(micro, [(0, 0)]), ["encoder", "cross_kv"]))
    return folder, get_target("onnxruntime").lower(programs, folder)


def loaded(lowered: Lowered, *, short: bool = True) -> dict[str, Runner]:
    options = RunOptions(threads=1, short_windows=short)
    return get_target("onnxruntime").load(*lowered, options)


def mel(positions: int) -> np.ndarray:
    random = np.random.default_rng(positions)
    return random.standard_normal((1, DIMS.n_mels, 2 * positions)).astype(np.float32)


@pytest.mark.parametrize("positions", [1, 3, T - 1, T])
def test_a_short_window_gives_what_torch_computes_with_as_many_positions(
    fp32: Lowered, short_features: Callable[..., np.ndarray], positions: int
) -> None:
    runners, spectrogram = loaded(fp32), mel(positions)

    features = runners["encoder"].run({"mel": spectrogram})["features"]

    np.testing.assert_allclose(features, short_features(spectrogram), atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "w8"])
def test_keys_and_values_of_fewer_rows_are_the_first_ones(
    request: pytest.FixtureRequest, precision: str
) -> None:
    runners = loaded(request.getfixturevalue(precision))
    features = np.random.default_rng(0).standard_normal((1, T, D)).astype(np.float32)

    whole = runners["cross_kv"].run({"features": features})
    first = runners["cross_kv"].run({"features": np.ascontiguousarray(features[:, :4])})

    for name, array in first.items():
        axis = runners["cross_kv"].free_axes[name]
        np.testing.assert_allclose(array, np.take(whole[name], range(4), axis), atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "w8"])
def test_audio_behind_a_short_window_has_no_effect_and_all_of_it_has(
    request: pytest.FixtureRequest, precision: str
) -> None:
    encoder = loaded(request.getfixturevalue(precision))["encoder"]
    spectrogram = mel(T)

    short = encoder.run({"mel": np.ascontiguousarray(spectrogram[..., :8])})["features"]
    whole = encoder.run({"mel": spectrogram})["features"]

    assert short.shape == (1, 4, D)
    assert not np.allclose(short, whole[:, :4], atol=1e-3)


def test_without_short_windows_the_programs_have_one_length(fp32: Lowered) -> None:
    for runner in loaded(fp32, short=False).values():
        assert not runner.free_axes
        name = runner.spec.inputs[0].name
        with pytest.raises(ValueError, match=f"expects '{name}'"):
            runner.run({name: np.zeros((1, 4, D), np.float32)})


@pytest.mark.parametrize(
    "shape", [(1, DIMS.n_mels, 2 * T + 2), (1, DIMS.n_mels, 0), (1, DIMS.n_mels - 1, 8)]
)
def test_no_other_axis_and_no_longer_audio_are_accepted(
    fp32: Lowered, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="expects 'mel'"):
        loaded(fp32)["encoder"].run({"mel": np.zeros(shape, np.float32)})


# Graphs that may depend on the length in another way stay as they are.


def model_of(lowered: Lowered, name: str) -> Any:
    folder, entries = lowered
    entry: ProgramEntry = next(entry for entry in entries if entry.spec.name == name)
    return OnnxGraph.of(folder, entry).detach()


def with_node(model: Any, operator: str, index: int = -1, **attributes: Any) -> None:
    """Put an operator of one input behind the tensor that a node computes."""
    graph = model.graph
    node = next(node for node in graph.node if node.op_type == "LayerNormalization")
    added = helper.make_node(operator, [node.input[0]], ["added"], **attributes)
    node.input[0] = "added"
    at = list(graph.node).index(node)
    nodes = list(graph.node)
    nodes.insert(at, type(node).FromString(added.SerializeToString()))
    copies = [type(node).FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def unknown_operator(model: Any) -> None:
    with_node(model, "CumSum")


def softmax_over_time(model: Any) -> None:
    with_node(model, "Softmax", axis=1)


def padded_convolution(model: Any) -> None:
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    next(a for a in conv.attribute if a.name == "pads").ints[:] = [2, 2]


def another_stride(model: Any) -> None:
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    next(a for a in conv.attribute if a.name == "strides").ints[:] = [4]


def stated_length(model: Any) -> None:
    table = next(t for t in model.graph.initializer if list(t.dims) == [T, D])
    table.dims[:] = [T + 1, D]


def table_in_channels(model: Any) -> None:
    table = next(t for t in model.graph.initializer if list(t.dims) == [T, D])
    table.dims[:] = [1, T, D]


def two_inputs(model: Any) -> None:
    model.graph.input.append(copy.deepcopy(model.graph.input[0]))
    model.graph.input[1].name = "further"


def old_opset(model: Any) -> None:
    model.opset_import[0].version = 14


@pytest.mark.parametrize(
    "change",
    [
        unknown_operator,
        softmax_over_time,
        padded_convolution,
        another_stride,
        stated_length,
        table_in_channels,
        two_inputs,
        old_opset,
    ],
)
def test_a_graph_of_another_form_stays_as_it_is(
    fp32: Lowered, change: Callable[[Any], None]
) -> None:
    model = model_of(fp32, "encoder")
    change(model)
    before = model.SerializeToString()

    assert free_audio(model) == {}

    assert model.SerializeToString() == before


# Caches: the decode programs, if their files denote the axes.

ORT = get_target("onnxruntime")
NAMES = ["step", "prefill_4", "align", "step_8"]
N = 448
STORED = 3  # tokens in the cache


@pytest.fixture(scope="module")
def embedded() -> Lowered:
    """The decode programs of the embedded model."""
    bundle = Bundle.open(default_bundle())
    return bundle.folder, [bundle.manifest.program(name) for name in NAMES]


@pytest.fixture(scope="module")
def runners(embedded: Lowered) -> dict[str, Runner]:
    return ORT.load(*embedded, RunOptions(threads=1))


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
    embedded: Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_runner, "IN_PLACE_SINCE", (99, 0))

    runner = ORT.load(*embedded, RunOptions(threads=1))["step"]

    assert not runner.free_axes
    with pytest.raises(ValueError, match=r"expects '(mask|self_k_0)'"):
        runner.run(feed(runner, 16))
    runner.run(feed(runner, N))


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_static_and_the_loaded_graph_states_no_length(
    embedded: Lowered, name: str
) -> None:
    folder, entries = embedded
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
    embedded: Lowered, tmp_path: Path
) -> None:
    folder, entries = embedded
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


# Tokens: `step` and the prefills of 8 bits run in one session, which computes what their own sessions do.

W8_NAMES = ["step", "prefill_4", "prefill_64", "align", "step_2"]
JOINED = ["step", "prefill_4", "prefill_64"]
# Of the largest value: 16 times the precision of float32. Graphs of known sizes are optimized otherwise, so
# that sums differ. A value that crosses the border between two levels of 8 bits would differ by more.
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def original(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lowered_w8(micro, tmp_path_factory.mktemp("lowered"), W8_NAMES)


def sessions(runners: dict[str, Runner], names: Sequence[str]) -> set[int]:
    found = [runners[name] for name in names]
    return {id(runner._session) for runner in found if isinstance(runner, OnnxRunner)}


def inputs_with_room(runner: Runner, cached: int | None = None) -> dict[str, Array]:
    """Return inputs with room for `cached` tokens in the caches; None: for all."""
    random = np.random.default_rng(0)
    room = next(
        tensor.shape[2] for tensor in runner.spec.inputs if tensor.name.startswith("self_k_")
    )
    missing = room - (room if cached is None else cached)
    found = {}
    for tensor in runner.spec.inputs:
        shape = list(tensor.shape)
        if tensor.name in runner.free_axes:
            shape[runner.free_axes[tensor.name]] -= missing
        found[tensor.name] = random.standard_normal(shape).astype(tensor.dtype)
    return found


@pytest.mark.parametrize("cached", [1, None])
@pytest.mark.parametrize("bound", [False, True])
def test_one_session_computes_what_three_do(
    original: Lowered, monkeypatch: pytest.MonkeyPatch, cached: int | None, bound: bool
) -> None:
    joined = runners_of(original)
    monkeypatch.setattr(onnxruntime, "same_but_for_tokens", lambda _: ())
    alone = runners_of(original)
    assert len(sessions(joined, JOINED)) == 1
    assert len(sessions(alone, JOINED)) == 3

    for name in JOINED:
        inputs = inputs_with_room(joined[name], cached)
        found, expected = joined[name].run(inputs), alone[name].run(inputs)
        if bound:
            found = bound_run(joined[name], inputs)
        assert found.keys() == expected.keys()
        for output in found:
            np.testing.assert_allclose(
                found[output],
                expected[output],
                rtol=0,
                atol=ROUNDING * float(abs(expected[output]).max()),
                err_msg=output,
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
    runners = runners_of(
        (folder, [entry for entry in entries if entry.spec.name in ("step", "align")])
    )
    assert len(sessions(runners, ["step", "align"])) == 2


def test_programs_of_an_opset_that_measures_no_axis_are_not_joined(
    micro: Whisper, tmp_path: Path
) -> None:
    runners = runners_of(lowered_w8(micro, tmp_path, ["step", "prefill_4"], opset=14))
    assert len(sessions(runners, ["step", "prefill_4"])) == 2


def change_program(folder: Path, name: str, change: str) -> None:
    """Change a copied program so that it computes something else, or states another signature."""
    path = folder / "onnxruntime" / f"{name}.onnx"
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    if change == "constant":
        scale = next(constant for constant in graph.initializer if constant.name == "val_4")
        scale.raw_data = np.array(0.5, np.float32).tobytes()
    elif change == "order":
        node = next(node for node in graph.node if node.op_type == "Add" and node.input[0] != "x")
        node.input[:] = reversed(node.input)
    elif change == "operator":
        next(node for node in graph.node if node.op_type == "Gelu").op_type = "Erf"
    elif change == "output":
        swapped = {"new_k_0": "new_k_1", "new_k_1": "new_k_0"}
        for node in graph.node:
            node.output[:] = [swapped.get(output, output) for output in node.output]
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
    change_program(tmp_path, name, change)

    programs = [(entry.spec, OnnxGraph.of(tmp_path, entry)) for entry in entries]
    assert same_but_for_tokens(programs) == ()


def test_a_signature_that_states_another_output_is_an_error(original: Lowered) -> None:
    folder, entries = original
    step = next(entry for entry in entries if entry.spec.kind.name == STEP)
    other = replace(step.spec, outputs=(replace(step.spec.outputs[0], name="scores"),))
    rest = [entry for entry in entries if entry.spec.kind.name == PREFILL]
    with pytest.raises(BundleError, match="signature"):
        runners_of((folder, [replace(step, spec=other), *rest]))
