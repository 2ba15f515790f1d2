"""The files of an app hold the weights and settings of the checkpoint that they were written from."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.extent import EVERYTHING
from tests.micro import DIMS, GENERATION, SPECIAL, TURBO

from whisperport.build.layouts import layout_of

pytest.importorskip("torch")
from whisperport.build.layouts.arrays import quantized_rows
from whisperport.build.layouts.huggingface_files import (
    added_tokens,
    config,
    generation_config,
    vocab,
    write_json,
)
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.huggingface import CONFIG_KEYS
from whisperport.model.checkpoint.names import to_huggingface
from whisperport.model.checkpoint.tensor_check import expected_shapes
from whisperport.model.network.whisper import build_model
from whisperport.runtime import Decoder
from whisperport.verification.eager import eager_engine


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return load_checkpoint("default")


def written(checkpoint: Any, app: str, precision: str, folder: Path) -> Path:
    layout = layout_of(app)
    out = folder / f"written{layout.suffix}"
    if not layout.suffix:
        out.mkdir()
    layout.write(checkpoint, precision, out)
    return out


@pytest.mark.parametrize(
    ("app", "precision"),
    [("faster-whisper", "fp32"), ("faster-whisper", "fp16"), ("whisper.cpp", "fp16")],
)
def test_exact_weights_are_read_back_to_the_bit(
    checkpoint: Any, app: str, precision: str, tmp_path: Path
) -> None:
    # given a checkpoint whose weights float16 holds exactly
    # when it is written and read
    read = load_checkpoint(str(written(checkpoint, app, precision, tmp_path)))
    # then every weight is the same
    assert read.dims == checkpoint.dims
    assert read.weights.keys() == checkpoint.weights.keys()
    for name, weight in checkpoint.weights.items():
        assert np.array_equal(read.weights[name].float().numpy(), weight.float().numpy()), name


@pytest.mark.parametrize(("app", "part"), [("faster-whisper", 1.0), ("whisper.cpp", 1.13)])
def test_weights_of_8_bits_are_within_half_a_step(
    checkpoint: Any, app: str, part: float, tmp_path: Path
) -> None:
    # given a matrix, whose rows or blocks of 32 values have a step of their own
    name = "decoder.blocks.0.mlp.0.weight"
    weight = checkpoint.weights[name].float().numpy()
    # when it is written in 8 bits and read
    read = load_checkpoint(str(written(checkpoint, app, "w8", tmp_path)))
    # then no value differs by more than half a step; a scale in float16 adds 127 * 2**-11 steps
    groups = weight if app == "faster-whisper" else weight.reshape(-1, 32)
    error = np.abs(read.weights[name].numpy().reshape(groups.shape) - groups)
    half_step = np.abs(groups).max(axis=1, keepdims=True) / 254
    assert error.max() > 0
    assert (error <= part * half_step + 1e-7).all()
    # and what has no rows is not rounded
    vector = "encoder.positional_embedding"
    assert read.weights[vector].float().equal(checkpoint.weights[vector].float())
    assert read.source.quantized


def test_the_folder_of_faster_whisper_has_the_settings(checkpoint: Any, tmp_path: Path) -> None:
    # given merges as pairs, as current versions of `tokenizers` write them
    data = json.loads(checkpoint.tokenizer_json)
    data["model"]["merges"] = [
        m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]
    ]
    pairs = replace(checkpoint, tokenizer_json=json.dumps(data).encode())
    # when the folder is written
    folder = written(pairs, "faster-whisper", "fp32", tmp_path)
    # then its merges are strings, which every version reads, and the settings are the checkpoint's
    merges = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    assert merges
    assert all(isinstance(merge, str) for merge in merges)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generation = checkpoint.generation
    assert settings["alignment_heads"] == [list(head) for head in generation.alignment_heads]
    assert settings["suppress_ids"] == sorted(generation.suppressed)
    vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    assert len(vocabulary) == checkpoint.dims.n_vocab
    assert vocabulary[generation.timestamp_begin + 1] == "<|0.02|>"


def test_a_row_of_zeros_is_rounded_to_zeros() -> None:
    integers, factor = quantized_rows(np.array([[0, 0], [1, -2]], np.float32))
    assert integers.tolist() == [[0, 0], [64, -127]]
    assert factor.tolist() == [1, 63.5]


def test_whisper_cpp_takes_no_other_vocabulary(micro_checkpoint: Any) -> None:
    # given a checkpoint of 70 tokens; whisper.cpp computes ids of special tokens from their number
    # then it is refused with that reason
    why = layout_of("whisper.cpp").unsupported(micro_checkpoint, "fp16")
    assert "70 tokens" in why


def test_an_eager_engine_computes_the_models_logits(micro_checkpoint: Any) -> None:
    # given the model, and an engine over it
    import torch

    model = build_model(micro_checkpoint)
    engine = eager_engine(model, micro_checkpoint.generation)
    mel = np.random.default_rng(0).normal(size=(8, 20)).astype(np.float32)
    # when three tokens are decoded
    decoder = Decoder(engine)
    decoder.start_window(engine.encode(mel))
    decoder.prefill([50, 51])
    logits = decoder.step(53)
    # then the logits are those of a pass without a cache
    cross_kv = model.cross_kv(model.encode(torch.from_numpy(mel)[None]))
    expected = model.logits(torch.tensor([50, 51, 53]), cross_kv, first=2)[0].numpy()
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


LARGE = replace(TURBO, n_text_layer=32)  # large-v3
MEASURED = """
import sys
from pathlib import Path
from whisperport.build.layouts import layout_of
from whisperport.build.layouts.openvino_genai.folder import write_graphs
from whisperport.model.checkpoint import load_checkpoint
import onnx, openvino

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

app, precision, source, out = sys.argv[1:]
before = kib("VmRSS")
# GenAI's tokenizer is converted by the app, which needs no weights.
write = write_graphs if app == "openvino-genai" else layout_of(app).write
write(load_checkpoint(source), precision, Path(out))
print((kib("VmHWM") - before) * 1024)
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with large-v3's sizes and random weights in float16: 3.1 GB."""
    folder = tmp_path_factory.mktemp("large")
    shapes = {to_huggingface(name): shape for name, shape in expected_shapes(LARGE).items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    described = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(described)) + described)
        for shape in shapes.values():
            file.write(random.standard_normal(shape, np.float32).astype(np.float16).data)
    settings = {
        "model_type": "whisper",
        **{key: getattr(LARGE, field) for field, key in CONFIG_KEYS.items()},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(not EVERYTHING, reason="writes up to 9 GB; run make test-all")
@pytest.mark.parametrize(
    ("app", "precision"),
    [
        ("transformers.js", "fp32"),
        ("faster-whisper", "fp16"),
        ("whisper.cpp", "fp16"),
        ("openvino-genai", "fp16"),
    ],
)
def test_a_large_checkpoint_is_written_piece_by_piece(
    app: str, precision: str, large_folder: Path, tmp_path: Path
) -> None:
    # given a checkpoint of 3.1 GB, and a process of its own
    out = tmp_path / f"out{layout_of(app).suffix}"
    if not layout_of(app).suffix:
        out.mkdir()
    # when it is read and written; pages of the file that are in memory count as well
    command = [sys.executable, "-c", MEASURED, app, precision, large_folder, out]
    child = subprocess.run(command, check=True, capture_output=True, text=True)
    # then the memory that was used at most is little more than the weights
    weights = (large_folder / "model.safetensors").stat().st_size
    assert int(child.stdout) < 1.3 * weights
    (shutil.rmtree if out.is_dir() else Path.unlink)(out)


def test_transformers_reads_the_same_sizes_and_settings(micro_checkpoint: Any) -> None:
    # given a checkpoint with a head that follows the audio
    generation = replace(GENERATION, alignment_heads=((1, 1),))
    checkpoint = replace(micro_checkpoint, generation=generation)
    # when its settings are written
    sizes, settings = config(checkpoint), generation_config(checkpoint)
    # then they are the checkpoint's
    assert (sizes["d_model"], sizes["num_mel_bins"]) == (DIMS.n_text_state, DIMS.n_mels)
    assert (sizes["encoder_layers"], sizes["decoder_layers"]) == (1, 2)
    assert settings["lang_to_id"] == {"<|en|>": 51, "<|de|>": 52}
    assert settings["suppress_tokens"] == list(GENERATION.suppressed)
    assert settings["begin_suppress_tokens"] == list(GENERATION.suppressed_at_start)
    assert settings["alignment_heads"] == [(1, 1)]


def test_every_id_has_a_token(micro_checkpoint: Any) -> None:
    # given a tokenizer that lacks the tokens of timestamps
    # when both lists of tokens are joined, as onnx-asr does
    tokens = {**vocab(micro_checkpoint), **added_tokens(micro_checkpoint)}
    # then each id has a token, and special tokens have their own
    assert sorted(tokens.values()) == list(range(DIMS.n_vocab))
    assert SPECIAL.items() <= tokens.items()
    assert tokens["<|0.02|>"] == GENERATION.timestamp_begin + 1


def test_without_alignment_heads_the_last_half_of_the_layers_stands_for_them(
    micro_checkpoint: Any,
) -> None:
    checkpoint = replace(micro_checkpoint, generation=replace(GENERATION, alignment_heads=()))
    assert generation_config(checkpoint)["alignment_heads"] == [(1, 0), (1, 1)]


def test_settings_have_lines_and_tables_of_tokens_no_spaces(tmp_path: Path) -> None:
    settings, tokens = {"d_model": 128, "begin": [1, 2]}, {f"token{i}": i for i in range(1000)}
    write_json(tmp_path / "settings.json", settings)
    write_json(tmp_path / "tokens.json", tokens)
    texts = [(tmp_path / name).read_text() for name in ("settings.json", "tokens.json")]
    assert list(map(json.loads, texts)) == [settings, tokens]
    assert '\n "d_model": 128,\n' in texts[0]
    assert not set(" \n") & set(texts[1])
