"""Checkpoints in other programs' formats are rejected with the name of the format and a hint."""

import pytest

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import load_checkpoint


def rejection(path):
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

    assert message in rejection(tmp_path).what


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

    assert message in rejection(tmp_path / name).what


def test_a_link_to_weights_that_are_not_there_is_an_error(altered_folder):
    folder = altered_folder(without=("model.safetensors",))
    (folder / "model.safetensors").symlink_to("../../blobs/0123")

    assert "a link to ../../blobs/0123, which does not exist" in rejection(folder).why


def test_a_folder_with_a_ggml_file_says_to_give_the_file(tmp_path):
    (tmp_path / "ggml-tiny.bin").write_bytes(b"lmgg")

    assert f"give the file: `{tmp_path / 'ggml-tiny.bin'}`" in rejection(tmp_path).hint
