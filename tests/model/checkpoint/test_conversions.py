"""Checkpoints that other programs wrote."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from fuzz.conversions import (
    ctranslate2_variables,
    ggml_bytes,
    ggml_head,
    ggml_tensor,
    int8_variables,
    model_bin,
    write_ctranslate2,
)

from whisperport.errors import CheckpointError, TokenizerError, WhisperportError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.ggml import BLOCK_TYPES, dequantize
from whisperport.model.checkpoint.openai_releases import alignment_heads_of_size
from whisperport.program.json_records import to_json

# Checkpoints of CTranslate2 and whisper.cpp come back bit for bit; damaged ones are rejected.


@pytest.fixture(scope="module")
def made(tiny_checkpoint, tmp_path_factory):
    """The tiny checkpoint as a folder of CTranslate2 and a ggml file; do not write to them."""
    folder = tmp_path_factory.mktemp("made")
    generation = tiny_checkpoint.generation
    settings = {
        "suppress_ids": list(generation.suppressed),
        "suppress_ids_begin": list(generation.suppressed_at_start),
        "lang_ids": list(generation.languages.values()),
        "alignment_heads": [list(pair) for pair in generation.alignment_heads],
    }
    dims, weights = tiny_checkpoint.dims, tiny_checkpoint.weights
    variables = ctranslate2_variables(dims, weights)
    write_ctranslate2(folder / "float", variables, settings, tiny_checkpoint.tokenizer_json)
    write_ctranslate2(
        folder / "int8", int8_variables(variables), settings, tiny_checkpoint.tokenizer_json
    )
    (folder / "f32.bin").write_bytes(ggml_bytes(dims, weights, half=False))
    (folder / "f16.bin").write_bytes(ggml_bytes(dims, weights, half=True))
    return folder


def rejection(path):
    with pytest.raises(WhisperportError) as caught:
        load_checkpoint(path)
    assert caught.value.hint
    return caught.value


def test_a_ctranslate2_folder_comes_back_bit_for_bit(made, tiny_checkpoint):
    found = load_checkpoint(made / "float")

    assert found.weights.keys() == tiny_checkpoint.weights.keys()
    for name, tensor in tiny_checkpoint.weights.items():
        assert torch.equal(found.weights[name], tensor), name
    assert found.dims == tiny_checkpoint.dims
    assert found.generation == tiny_checkpoint.generation
    assert found.tokenizer_json == tiny_checkpoint.tokenizer_json
    assert to_json(found.source).get("quantized") is None


def test_int8_is_read_and_marked(made, tiny_checkpoint):
    found = load_checkpoint(made / "int8")

    weight = "decoder.blocks.1.attn.value.weight"
    error = (found.weights[weight] - tiny_checkpoint.weights[weight]).abs().max()
    assert 0 < error < tiny_checkpoint.weights[weight].abs().max() / 250
    assert to_json(found.source)["quantized"] == "int8"
    assert "quantized to int8" in found.warnings[-1]


def test_a_ggml_file_of_float32_comes_back_bit_for_bit(made, tiny_checkpoint):
    found = load_checkpoint(made / "f32.bin")

    for name, tensor in tiny_checkpoint.weights.items():
        assert torch.equal(found.weights[name], tensor), name
    assert found.dims == tiny_checkpoint.dims
    heads = tiny_checkpoint.generation.alignment_heads  # a ggml file does not keep them
    assert replace(found.generation, alignment_heads=heads) == tiny_checkpoint.generation
    assert json.loads(found.tokenizer_json) == json.loads(tiny_checkpoint.tokenizer_json)


def test_a_ggml_file_of_float16_has_the_rounded_weights(made, tiny_checkpoint):
    found = load_checkpoint(made / "f16.bin")

    for name, tensor in tiny_checkpoint.weights.items():
        small = tensor.dim() > 1 and "positional" not in name
        assert torch.equal(found.weights[name], tensor.half() if small else tensor), name


def test_alignment_heads_of_published_sizes_are_openais():
    heads, whose = alignment_heads_of_size(n_layers=4, n_heads=6, n_vocab=51864)

    assert heads == ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4))
    assert "tiny.en" in whose


def test_blocks_are_the_values_that_ggmls_description_gives():
    scale, minimum = struct.pack("<e", 0.5), struct.pack("<e", -1.0)
    low = bytes(i | (15 - i) << 4 for i in range(16))  # values 0..15, then 15..0
    values = torch.tensor([*range(16), *range(15, -1, -1)])
    fifth = struct.pack("<I", 0x8000_0001)  # 16 more for the first and the last value
    more = torch.zeros(32, dtype=torch.int64)
    more[[0, 31]] = 16
    expected = {
        "Q4_0": (scale + low, (values - 8) * 0.5),
        "Q4_1": (scale + minimum + low, values * 0.5 - 1),
        "Q5_0": (scale + fifth + low, (values + more - 16) * 0.5),
        "Q5_1": (scale + minimum + fifth + low, (values + more) * 0.5 - 1),
        "Q8_0": (
            scale + bytes(range(240, 256)) + bytes(16),
            torch.tensor([*range(-16, 0)] + 16 * [0]) * 0.5,
        ),
    }
    for kind in BLOCK_TYPES.values():
        data, wanted = expected[kind.name]
        blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8)[None]
        assert torch.equal(dequantize(blocks, kind)[0], wanted.float()), kind.name


def first_tensor(data):
    return data.index(b"encoder.conv1.weight") - 24


GGML = {
    "truncated": lambda data: data[:-5],
    "only its head": lambda data: data[:30],
    "a negative size": lambda data: data[:4] + struct.pack("<i", -1) + data[8:],
    "a huge size": lambda data: data[:8] + struct.pack("<i", 2**31 - 1) + data[12:],
    "bytes at the end": lambda data: data + b"\0\0\0",
    "other mel filters": lambda data: data[:60] + struct.pack("<f", 0.5) + data[64:],
    "more tokens than there are": lambda data: (
        data[: 56 + 80 * 201 * 4] + struct.pack("<i", 2**31 - 1) + data[60 + 80 * 201 * 4 :]
    ),
    "a missing tensor": lambda data: data[: first_tensor(data)],
    "a tensor twice": lambda data: data + data[first_tensor(data) :],
    "an unknown tensor": lambda data: data + ggml_tensor("decoder.proj", (1,), 0, bytes(4)),
}


@pytest.mark.parametrize("fault", GGML)
def test_a_damaged_ggml_file_is_rejected(fault, made, tmp_path):
    path = tmp_path / "ggml-tiny.bin"
    path.write_bytes(GGML[fault]((made / "f32.bin").read_bytes()))

    rejection(path)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("encoder.conv1.bias", (64, 1), 12, bytes(256)), "ggml's type 12"),
        (("encoder.conv1.bias", (64, 1), -1, bytes(256)), "ggml's type -1"),
        (("encoder.conv1.bias", (64, 1), 8, bytes(256)), "blocks of 32"),
        (("encoder.conv1.bias", (65,), 0, bytes(256)), "expected (64,)"),
        (("encoder.conv1.bias", (-64,), 0, bytes(256)), "expected (64,)"),
        (("encoder.conv1.bias", (1, 1, 1, 64), 0, bytes(256)), "4 axes"),
        (("encoder.conv1.bais", (64,), 0, bytes(256)), "name is `encoder.conv1.bias`"),
    ],
)
def test_a_wrong_tensor_is_named(tensor, message, tiny_checkpoint, tmp_path):
    path = tmp_path / "ggml-tiny.bin"
    path.write_bytes(ggml_head(tiny_checkpoint.dims) + ggml_tensor(*tensor))

    assert message in rejection(path).why


def test_another_vocabulary_in_a_ggml_file_is_rejected(made, tmp_path):
    data = bytearray((made / "f32.bin").read_bytes())
    at = 60 + 80 * 201 * 4 + 4
    data[at] ^= 1
    (tmp_path / "ggml.bin").write_bytes(data)

    assert isinstance(rejection(tmp_path / "ggml.bin"), TokenizerError)


@pytest.fixture
def altered(made, tmp_path):
    """`altered(bytes or None, **settings)`: the folder with another model.bin or other settings."""

    def alter(data=None, **settings):
        folder = tmp_path / "altered"
        folder.mkdir()
        for path in (made / "float").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        if data is not None:
            (folder / "model.bin").write_bytes(data)
        own = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(own))
        return folder

    return alter


def test_equal_variables_that_the_converter_stores_once_are_read(made, tiny_checkpoint, altered):
    # given a model.bin in which a bias is an alias of an equal one, as the converter writes it
    name, other = "decoder/layer_0/ffn/layer_norm/beta", "decoder/layer_1/ffn/layer_norm/beta"
    variables = ctranslate2_variables(tiny_checkpoint.dims, tiny_checkpoint.weights)
    first = variables.pop(name)
    variables[other] = first
    text = b"".join(struct.pack("<H", len(n) + 1) + n.encode() + b"\0" for n in (name, other))
    data = model_bin(variables)
    end = data.rindex(struct.pack("<I", 1) + struct.pack("<H", 26) + b"decoder/projection/weight")
    data = data[:end] + struct.pack("<I", 2) + data[end + 4 :] + text
    # when it is loaded, then both are there
    weights = load_checkpoint(altered(data)).weights
    for layer in (0, 1):
        assert torch.equal(weights[f"decoder.blocks.{layer}.mlp_ln.bias"], first)


def with_count(data, count):
    return data[:22] + struct.pack("<I", count) + data[26:]


CTRANSLATE2 = {
    "truncated": (lambda data: data[:-70], "truncated"),
    "another version": (lambda data: b"\5" + data[1:], "version 5"),
    "too many variables": (lambda data: with_count(data, 2**32 - 1), ""),
    "too few variables": (lambda data: with_count(data, 3), ""),
    "bytes at the end": (lambda data: data + b"\0", "1 bytes follow"),
    "another architecture": (lambda data: data.replace(b"WhisperSpec", b"WhimperSpec"), "Whimper"),
    "a huge size": (
        lambda data: data.replace(b"conv1/bias\0\1\x40\0\0\0", b"conv1/bias\0\1\xff\xff\xff\xff"),
        "should have 17179869180 bytes",
    ),
    "an unknown type": (
        lambda data: data.replace(b"conv1/bias\0\1\x40\0\0\0\0", b"conv1/bias\0\1\x40\0\0\0\x09"),
        "unknown type 9",
    ),
    "a name twice": (lambda data: data.replace(b"conv2/bias", b"conv1/bias"), "occurs twice"),
    "a web page": (lambda data: b"<!DOCTYPE html>", "web page"),
}


@pytest.mark.parametrize("fault", CTRANSLATE2)
def test_a_damaged_model_bin_is_rejected(fault, made, altered):
    change, message = CTRANSLATE2[fault]
    data = (made / "float" / "model.bin").read_bytes()
    assert change(data) != data

    error = rejection(altered(change(data)))

    assert isinstance(error, CheckpointError)
    assert message in error.why


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("decoder/activation", torch.tensor(1, dtype=torch.int8), "`decoder/activation` is 1"),
        ("decoder/alibi", torch.tensor(1, dtype=torch.int8), "`decoder/alibi` is 1"),
        ("encoder/layer_0/extra/weight", torch.zeros(2), "1 unexpected"),
        ("encoder/num_heads", torch.tensor(-2, dtype=torch.int16), "expected 1 to 1024"),
        ("encoder/layer_0/self_attention/linear_0/bias", torch.ones(192), "is not zero"),
        ("decoder/embeddings/weight", torch.zeros(51865, 64, dtype=torch.int8), "has no scale"),
        ("decoder/layer_norm/gamma", None, "1 missing: decoder.ln.weight"),
    ],
)
def test_a_wrong_variable_is_named(name, value, message, tiny_checkpoint, altered):
    variables = ctranslate2_variables(tiny_checkpoint.dims, tiny_checkpoint.weights) | {name: value}
    if value is None:
        del variables[name]

    assert message in rejection(altered(model_bin(variables))).why


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lang_ids": [10**9]}, "`lang_ids` lists 1000000000"),
        ({"lang_ids": "en"}, "`lang_ids` is 'en'"),
        ({"suppress_ids": [1.5]}, "`suppress_tokens` is [1.5]"),
        ({"alignment_heads": [[1]]}, "`alignment_heads` is [[1]]"),
    ],
)
def test_wrong_settings_are_named(settings, message, altered):
    assert message in rejection(altered(**settings)).why


def test_a_vocabulary_that_is_not_the_tokenizers_is_rejected(altered):
    folder = altered()
    (folder / "vocabulary.json").write_text(json.dumps(["a"] * 51865))

    assert "its token" in rejection(folder).why


# Checkpoints in other programs' formats are rejected with the name of the format and a hint.


def rejection_of_a_form(path):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["weights.npz", "config.json"], "MLX"),
        (["config.json", "onnx/encoder_model.onnx"], "ONNX"),
        (["config.json", "encoder_model_quantized.onnx"], "ONNX"),
        (["config.json", "openvino_encoder_model.xml"], "OpenVINO"),
        (["config.json", "tf_model.h5"], "TensorFlow"),
        (["config.json", "flax_model.msgpack"], "Flax"),
        (["AudioEncoder.mlmodelc/model.mil"], "Core ML"),
        (["adapter_model.safetensors"], "PEFT adapter"),
        (["manifest.json", "tokenizer.json"], "is a bundle"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_for_another_program_is_rejected_by_name(files, message, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    assert message in rejection_of_a_form(tmp_path).what


def test_weights_that_are_read_win_over_conversions_beside_them(altered_folder):
    folder = altered_folder()
    for name in ("tf_model.h5", "flax_model.msgpack", "model.bin"):
        (folder / name).write_bytes(b"x")

    assert load_checkpoint(folder).dims.n_audio_state == 64


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tiny.gguf", b"GGUF", "whisper.cpp"),
        ("weights.npz", b"PK", "MLX"),
        ("encoder.onnx", b"", "is a program"),
        ("decoder.pte", b"", "is a program"),
    ],
)
def test_a_file_for_another_program_is_rejected_by_name(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)

    assert message in rejection_of_a_form(tmp_path / name).what


def test_a_link_to_weights_that_are_not_there_is_an_error(altered_folder):
    folder = altered_folder(without=("model.safetensors",))
    (folder / "model.safetensors").symlink_to("../../blobs/0123")

    assert "a link to ../../blobs/0123, which does not exist" in rejection_of_a_form(folder).why


def test_a_folder_with_a_ggml_file_says_to_give_the_file(tmp_path):
    (tmp_path / "ggml-tiny.bin").write_bytes(b"lmgg")

    assert f"give the file: `{tmp_path / 'ggml-tiny.bin'}`" in rejection_of_a_form(tmp_path).hint
