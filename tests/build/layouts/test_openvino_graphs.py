"""The OpenVINO graphs compute what the model in torch computes, and have what an NPU's plug-in needs."""

import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("openvino")
import torch
from tests.build.layouts.test_onnx_graphs import N_PROMPT, SHAPES, TOKENS, random_checkpoint

from whisperport.build.layouts import layout_of
from whisperport.build.layouts.openvino_genai import folder, graphs
from whisperport.build.layouts.openvino_genai.folder import write_graphs
from whisperport.build.layouts.openvino_genai.graphs import decoder_graph
from whisperport.model.network.whisper import build_model
from whisperport.targets.cpu.openvino.ir import read_ir, stored_bytes

TOLERANCE = 5e-6  # of the largest value, as for the ONNX graphs
W8_DB = 30  # the least signal beside the noise of 8 bits


def written_logits(checkpoint: Any, precision: str, mel: Any, folder: Path) -> Any:
    """Logits (S, V) of the files: a prompt, then one token after the other with the states."""
    write_graphs(checkpoint, precision, folder)
    compute = layout_of("openvino-genai").logits
    assert compute is not None
    return compute(folder, precision, mel, TOKENS, N_PROMPT, {})


def expected_logits(checkpoint: Any, mel: Any) -> Any:
    model = build_model(checkpoint)
    cross_kv = model.cross_kv(model.encode(torch.from_numpy(mel)[None]))
    return model.logits(torch.tensor(TOKENS), cross_kv).numpy()


@pytest.mark.parametrize(
    ("shape", "precision"), [*((shape, "fp32") for shape in SHAPES), ("turbo", "fp16")]
)
def test_logits_are_the_models(shape: str, precision: str, tmp_path: Path) -> None:
    # given weights that float16 holds exactly
    checkpoint = random_checkpoint(**SHAPES[shape])
    mel = np.random.default_rng(0).normal(size=(checkpoint.dims.n_mels, checkpoint.dims.n_frames))
    mel = mel.astype(np.float32)
    expected = expected_logits(checkpoint, mel)

    error = np.abs(written_logits(checkpoint, precision, mel, tmp_path) - expected).max()

    assert error <= TOLERANCE * np.abs(expected).max()


def test_weights_in_float16_are_written_in_float32_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a checkpoint in float32, and the same in float16
    checkpoint = random_checkpoint(**SHAPES["tiny"])
    stored = replace(checkpoint, weights={n: w.half() for n, w in checkpoint.weights.items()})
    alive, most = set[int](), 0

    def counted(function: Any) -> Any:
        def result(*arguments: Any) -> Any:
            nonlocal most
            array = function(*arguments)
            alive.add(id(array))
            weakref.finalize(array, alive.discard, id(array))
            most = max(most, len(alive))
            return array

        return result

    for module in (graphs, folder):
        monkeypatch.setattr(module, "weight", counted(module.weight))
    # when both are written
    (tmp_path / "half").mkdir()
    (tmp_path / "whole").mkdir()
    write_graphs(stored, "fp32", tmp_path / "half")
    n_copies = most
    write_graphs(checkpoint, "fp32", tmp_path / "whole")
    # then they have the same constants, and hardly any weight was in memory in float32
    assert n_copies <= 2
    for name in ("openvino_encoder_model", "openvino_decoder_model"):
        whole, half = (constants(tmp_path / folder / name) for folder in ("whole", "half"))
        assert len(whole) > 20
        assert whole == half


def constants(path: Path) -> list[bytes]:
    graph = read_ir(path.with_suffix(".xml"))
    return [data.tobytes() for _, data in stored_bytes(graph, path.with_suffix(".bin"))]


def test_logits_of_8_bits_are_close(tmp_path: Path) -> None:
    # given weights that are stored in float16, of which most are rounded and biases are not
    checkpoint = random_checkpoint(**SHAPES["tiny"])
    stored = replace(checkpoint, weights={n: w.half() for n, w in checkpoint.weights.items()})
    mel = np.random.default_rng(0).normal(size=(80, checkpoint.dims.n_frames)).astype(np.float32)
    expected = expected_logits(checkpoint, mel)

    noise = written_logits(stored, "w8", mel, tmp_path) - expected

    assert noise.any()
    assert 10 * np.log10((expected**2).sum() / (noise**2).sum()) >= W8_DB


def test_the_decoder_has_the_patterns_that_are_rewritten_for_an_npu() -> None:
    # given a decoder of 3 layers
    nodes = decoder_graph(random_checkpoint(**SHAPES["English only"]), "fp32").get_ordered_ops()
    named = {node.get_friendly_name(): node for node in nodes}

    # then each self-attention state has the name of which the names of both ports follow
    states = [n.get_variable_id() for n in nodes if n.get_type_name() == "ReadValue"]
    parts = [(i, part) for i in range(3) for part in ("key", "value")]
    assert {s for s in states if "past" in s} == {
        f"past_key_values.{i}.decoder.{part}present.{i}.decoder.{part}" for i, part in parts
    }
    # and the node before each cross-attention state has its layer as the first number of its name
    for i, part in parts:
        label = f"decoder.layers.{i}.encoder_attn.{part}"
        (reader,) = named[label].output(0).get_target_inputs()
        assert reader.get_node().get_type_name() == "ReadValue"
        assert re.findall(r"\d+", label)[0] == str(i)
    # and the mask of self-attention comes from a Select, and cross-attention has one too
    attention = [n for n in nodes if n.get_type_name() == "ScaledDotProductAttention"]
    masks = {
        "encoder_attn" in n.get_friendly_name(): n.input_value(3).get_node().get_type_name()
        for n in attention
    }
    assert masks == {False: "Select", True: "Constant"}
    # and positions are Gather, Add, Range, Unsqueeze, Tile
    (tile,) = [n for n in nodes if n.get_type_name() == "Tile"]
    chain, node = [], tile
    for _ in range(4):
        node = node.input_value(1 if node.get_type_name() == "Range" else 0).get_node()
        chain.append(node.get_type_name())
    assert chain == ["Unsqueeze", "Range", "Add", "Gather"]
