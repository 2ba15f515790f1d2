"""Graphs that are written node by node, ONNX and OpenVINO, compute what the model in eager torch computes.

Those for OpenVINO also have what an NPU's plug-in needs.
"""

import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.micro import DIMS, GENERATION, tokenizer_json

from whisperport.build.layouts import layout_of
from whisperport.build.layouts.onnx_graph import file as onnx_files

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("openvino")
import onnx
import torch

from whisperport.build.layouts.onnx_graph.file import open_session
from whisperport.build.layouts.openvino_genai import folder as openvino_folder
from whisperport.build.layouts.openvino_genai import graphs
from whisperport.build.layouts.openvino_genai.folder import write_graphs
from whisperport.build.layouts.openvino_genai.graphs import decoder_graph
from whisperport.model.checkpoint.checkpoint import Checkpoint, Source
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.targets.cpu.openvino.ir import read_ir, stored_bytes

APPS = ("transformers.js", "sherpa-onnx", "onnxruntime-genai")
# One token at a time, and float32 in the graphs; those for 8 bits have other operators.
ON_NPUS = ("sherpa-onnx-qnn", "sherpa-onnx-rknn", "qualcomm-ai-hub")
TOKENS = (50, 51, 53, 57, 3, 7, 20, 58, 1)
N_PROMPT = 4
# Of the largest value. float32 with additions in another order: 4e-7 was seen.
TOLERANCE = 5e-6
W8_DB = 34  # the least signal beside the noise of 8 bits: 38 to 40 dB were seen

SHAPES = {
    "tiny": {"n_mels": 80, "n_audio_layer": 4, "n_text_layer": 4, "n_vocab": 51865},
    "English only": {"n_mels": 80, "n_audio_layer": 2, "n_text_layer": 3, "n_vocab": 51864},
    "turbo": {"n_mels": 128, "n_audio_layer": 4, "n_text_layer": 1, "n_vocab": 51866},
    "distil": {"n_mels": 80, "n_audio_layer": 3, "n_text_layer": 2, "n_vocab": 51865},
    "odd": {"n_text_head": 4, "n_text_layer": 1, "n_vocab": 51870, "n_text_ffn": 40},
}


def random_checkpoint(**sizes: int) -> Checkpoint:
    """A checkpoint of random weights that float16 holds exactly."""
    torch.manual_seed(0)
    width = {"n_audio_state": 32, "n_text_state": 32, "n_audio_ctx": 20}
    model = Whisper(replace(DIMS, **{**width, **sizes}))
    for table in (model.encoder.positional_embedding, model.decoder.positional_embedding):
        torch.nn.init.normal_(table, std=0.1)
    return Checkpoint(
        dims=model.dims,
        generation=GENERATION,
        weights={name: w.detach().half().float() for name, w in model.state_dict().items()},
        tokenizer_json=tokenizer_json().replace(b'"W"', b'"\\u0120"'),  # a space, as a token
        source=Source(kind="openai", name="random", sha256={}),
    )


def spectrogram(checkpoint: Checkpoint) -> Any:
    shape = checkpoint.dims.n_mels, checkpoint.dims.n_frames
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def written(checkpoint: Checkpoint, app: str, precision: str, folder: Path) -> Path:
    out = folder / f"{app}-{precision}"
    out.mkdir()
    layout_of(app).write(checkpoint, precision, out)
    return out


def logits(checkpoint: Checkpoint, app: str, precision: str, folder: Path) -> Any:
    """Those of the graphs that are written to a folder."""
    compute = layout_of(app).logits
    assert compute is not None
    return compute(folder, precision, spectrogram(checkpoint), TOKENS, N_PROMPT, {})


def eager(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The model's logits (S, V), and the attention (S, T) of the first head of the last layer."""
    model, tokens = build_model(checkpoint), torch.tensor(TOKENS)
    cross_kv = model.cross_kv(model.encode(torch.from_numpy(spectrogram(checkpoint))[None]))
    scores = model.cross_scores(tokens, cross_kv, [(checkpoint.dims.n_text_layer - 1, 0)])
    return model.logits(tokens, cross_kv).numpy(), scores[0].softmax(-1).numpy()


def is_close(actual: Any, expected: Any) -> bool:
    return bool(np.abs(actual - expected).max() < TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_graphs_compute_the_logits_of_the_model(shape: str, tmp_path: Path) -> None:
    # given a checkpoint of a published shape in miniature, and its logits in one pass without a cache
    checkpoint = random_checkpoint(**SHAPES[shape])
    expected, _ = eager(checkpoint)
    cases = [(app, "fp32") for app in (*APPS, *ON_NPUS)]
    for app, precision in (*cases, ("sherpa-onnx-qnn", "w8a16")):
        # when the written graphs decode a prompt at once, and the other tokens one by one
        folder = written(checkpoint, app, precision, tmp_path)
        # then the logits are the same
        assert is_close(logits(checkpoint, app, precision, folder), expected), app


@pytest.mark.parametrize("app", APPS)
def test_fewer_bits_are_stored_once(app: str, tmp_path: Path) -> None:
    # given weights that float16 holds exactly
    checkpoint = random_checkpoint(**SHAPES["distil"])
    expected = logits(checkpoint, app, "fp32", written(checkpoint, app, "fp32", tmp_path))
    # when they are stored in fewer bits
    half = logits(checkpoint, app, "fp16", written(checkpoint, app, "fp16", tmp_path))
    rounded = logits(checkpoint, app, "w8", written(checkpoint, app, "w8", tmp_path))
    # then float16 changes nothing, and 8 bits leave most of the signal
    assert np.array_equal(half, expected)
    noise = np.linalg.norm(rounded - expected)
    assert W8_DB < 20 * np.log10(np.linalg.norm(expected) / noise) < 60


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "w8"])
def test_every_weight_is_stored_once_under_its_own_name(
    app: str, precision: str, tmp_path: Path
) -> None:
    # given a written checkpoint
    checkpoint = random_checkpoint(**SHAPES["distil"])
    folder = written(checkpoint, app, precision, tmp_path)
    # when the tensors of its files are listed
    files = [onnx.load(path).graph for path in folder.rglob("*.onnx")]
    stored = [tensor for graph in files for tensor in graph.initializer]
    # then each weight is there, once, and nothing else takes space
    ends = (".half", ".uint8", ".int8", ".T")
    names = []
    for tensor in stored:
        name = tensor.name
        for end in ends:
            name = name.removesuffix(end)
        names.append(name)
    weights = sorted(name for name in names if name in checkpoint.weights)
    assert weights == sorted(checkpoint.weights)
    n_values = sum(weight.numel() for weight in checkpoint.weights.values())
    small = sum(len(tensor.raw_data) for tensor in stored if len(tensor.raw_data) < 200)
    size = {"fp32": 4, "fp16": 2, "w8": 1}[precision]
    n_bytes = sum(len(tensor.raw_data) for tensor in stored) - small
    if (
        precision == "w8"
    ):  # a scale for each row; convolutions and tables of positions stay in float32
        assert n_bytes < 1.35 * size * n_values
    else:
        assert n_bytes <= size * n_values


def test_the_attention_of_all_layers_is_returned(tmp_path: Path) -> None:
    # given the attention of one head in torch
    checkpoint = random_checkpoint(**SHAPES["distil"])
    heads = ((checkpoint.dims.n_text_layer - 1, 0), (0, 1))
    generation = replace(GENERATION, alignment_heads=heads)
    checkpoint = replace(checkpoint, generation=generation)
    _, expected = eager(checkpoint)
    mel, ids = spectrogram(checkpoint)[None], np.array([TOKENS], np.int64)
    # when the tokens are decoded at once
    sherpa = written(checkpoint, "sherpa-onnx", "fp32", tmp_path)
    cross = open_session(sherpa / "encoder.onnx").run(None, {"mel": mel})
    decoder = open_session(sherpa / "decoder.onnx")
    names = [value.name for value in decoder.get_inputs()]
    caches = [np.zeros(value.shape, np.float32) for value in decoder.get_inputs()[1:3]]
    values = (ids, *caches, *cross, np.array([0], np.int64))
    *_, attention = decoder.run(None, dict(zip(names, values, strict=True)))
    # then the attention of the alignment heads is there, and that of every layer in the merged decoder
    assert attention.shape == (1, 2, len(TOKENS), checkpoint.dims.n_audio_ctx)
    assert is_close(attention[0, 0], expected)
    merged = written(checkpoint, "transformers.js", "fp32", tmp_path)
    decoder = open_session(merged / "onnx" / "decoder_model_merged.onnx")
    names = [value.name for value in decoder.get_outputs()]
    assert names[-2:] == ["cross_attentions.0", "cross_attentions.1"]


@pytest.mark.parametrize("app", APPS)
def test_a_large_models_tensors_are_in_a_second_file(
    app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a checkpoint, and a limit that its files exceed
    checkpoint = random_checkpoint(**SHAPES["turbo"])
    expected = logits(checkpoint, app, "w8", written(checkpoint, app, "w8", tmp_path))
    monkeypatch.setattr(onnx_files, "LONGEST", 10_000)
    # when it is written
    (tmp_path / "large").mkdir()
    folder = written(checkpoint, app, "w8", tmp_path / "large")
    # then each ONNX file is small, and its tensors are beside it
    for path in folder.rglob("*.onnx"):
        assert path.stat().st_size < 200_000
        assert path.with_name(f"{path.name}_data").stat().st_size > 10_000
    # and the logits are the same
    assert np.array_equal(logits(checkpoint, app, "w8", folder), expected)
    if app == "transformers.js":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        outside = config["transformers.js_config"]["use_external_data_format"]
        assert outside == {
            "encoder_model_quantized.onnx": 1,
            "decoder_model_merged_quantized.onnx": 1,
        }


OPENVINO_W8_DB = 30  # as W8_DB


def openvino_logits(checkpoint: Any, precision: str, folder: Path) -> Any:
    """Logits (S, V) of the files: a prompt, then one token after the other with the states."""
    write_graphs(checkpoint, precision, folder)
    compute = layout_of("openvino-genai").logits
    assert compute is not None
    return compute(folder, precision, spectrogram(checkpoint), TOKENS, N_PROMPT, {})


@pytest.mark.parametrize(
    ("shape", "precision"), [*((shape, "fp32") for shape in SHAPES), ("turbo", "fp16")]
)
def test_the_logits_of_openvino_are_the_models(shape: str, precision: str, tmp_path: Path) -> None:
    # given weights that float16 holds exactly
    checkpoint = random_checkpoint(**SHAPES[shape])
    expected, _ = eager(checkpoint)

    assert is_close(openvino_logits(checkpoint, precision, tmp_path), expected)


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

    for module in (graphs, openvino_folder):
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


def test_the_logits_of_openvino_in_8_bits_are_close(tmp_path: Path) -> None:
    # given weights that are stored in float16, of which most are rounded and biases are not
    checkpoint = random_checkpoint(**SHAPES["tiny"])
    stored = replace(checkpoint, weights={n: w.half() for n, w in checkpoint.weights.items()})
    expected, _ = eager(checkpoint)

    noise = openvino_logits(stored, "w8", tmp_path) - expected

    assert noise.any()
    assert 10 * np.log10((expected**2).sum() / (noise**2).sum()) >= OPENVINO_W8_DB


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
