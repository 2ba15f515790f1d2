"""ONNX Runtime's CPU runs `encoder` and `cross_kv` on audio of any length, from files of one length."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

from whisperport.model.network.whisper import Whisper
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.runner import Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.onnx.audio_length import free_audio

from ...micro import DIMS
from .lowered_w8 import Lowered, lowered_w8

T, D = DIMS.n_audio_ctx, DIMS.n_audio_state


@pytest.fixture(scope="module")
def w8(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    return lowered_w8(micro, tmp_path_factory.mktemp("w8"), ["encoder", "cross_kv"])


@pytest.fixture(scope="module")
def fp32(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    from whisperport.model.trace.variants import whisper_programs
    from whisperport.model.trace.whisper import Parts

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
