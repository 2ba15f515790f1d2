"""The ONNX graphs that are written node by node compute what the model in eager torch computes."""

import json
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
import onnx
import torch

from whisperport.build.layouts.onnx_graph.file import open_session
from whisperport.model.checkpoint.checkpoint import Checkpoint, Source
from whisperport.model.network.whisper import Whisper, build_model

APPS = ("transformers.js", "sherpa-onnx", "onnxruntime-genai")
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
    for app in APPS:
        # when the written graphs decode a prompt at once, and the other tokens one by one
        folder = written(checkpoint, app, "fp32", tmp_path)
        # then the logits are the same
        assert is_close(logits(checkpoint, app, "fp32", folder), expected), app


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
