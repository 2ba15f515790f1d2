"""What has changed in a file of a layout is named: one byte, one key, one order."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.layouts import layout_of

pytest.importorskip("torch")
pytest.importorskip("onnx")
import onnx
from tests.build.layouts.test_written_graphs import SHAPES, random_checkpoint

from whisperport.build.layouts.onnx_graph import file as onnx_files
from whisperport.build.layouts.parts import changed_part, parts_of
from whisperport.model.checkpoint import ggml

NAME = "decoder.blocks.1.mlp.0.weight"


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return random_checkpoint(**SHAPES["distil"], n_audio_ffn=128, n_text_ffn=128)


def written(checkpoint: Any, app: str, folder: Path) -> Path:
    """The files of an app, without the tokenizer that OpenVINO's own package makes."""
    if app == "openvino-genai":
        pytest.importorskip("openvino")
        from whisperport.build.layouts.openvino_genai.folder import write_graphs

        write_graphs(checkpoint, "fp32", folder)
        return folder
    layout = layout_of(app)
    out = folder / f"model{layout.suffix}" if layout.suffix else folder
    layout.write(checkpoint, layout.precisions[0], out)
    return folder


@pytest.mark.parametrize(
    ("app", "file", "part"),
    [
        ("faster-whisper", "model.bin", "tensor decoder/layer_1/ffn/linear_0/weight"),
        ("whisper.cpp", "model.bin", f"tensor {NAME}"),
        ("openvino-genai", "openvino_decoder_model.bin", f"tensor {NAME}"),
        ("sherpa-onnx", "decoder.onnx", f"tensor {NAME}.T"),
        ("transformers.js", "onnx/decoder_model_merged.onnx", f"tensor {NAME}.T"),
    ],
)
def test_one_byte_of_a_tensor_is_named(
    checkpoint: Any, app: str, file: str, part: str, tmp_path: Path
) -> None:
    # given the bytes of one weight in a written file
    path = written(checkpoint, app, tmp_path) / file
    known = parts_of(path)
    assert known is not None
    array = checkpoint.weights[NAME]
    array = array.half() if app == "whisper.cpp" else array
    stored = array.T.contiguous() if part.endswith(".T") else array
    data = bytearray(path.read_bytes())
    start = data.find(stored.numpy().tobytes())
    assert start > 0
    # when one of them changes
    data[start + 1] ^= 1
    path.write_bytes(data)
    # then the tensor is named
    assert changed_part(path, known) == f"{part} has changed"


def test_a_tensor_in_a_second_file_is_named(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_files, "LONGEST", 10_000)
    path = written(checkpoint, "sherpa-onnx", tmp_path) / "decoder.onnx_data"
    known = parts_of(path)
    assert known is not None
    data = bytearray(path.read_bytes())
    data[data.find(checkpoint.weights[NAME].T.contiguous().numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert changed_part(path, known) == f"tensor {NAME}.T has changed"


@pytest.mark.parametrize(
    ("position", "part"),
    [
        (4, "it can no longer be read: `decoder.token_embedding.weight` has the shape"),
        (44, "header has changed"),
        (60, "table of mel filters has changed"),
        (-1, "list of tokens has changed"),
    ],
)
def test_what_is_before_the_tensors_of_a_ggml_file_is_named(
    checkpoint: Any, position: int, part: str, tmp_path: Path
) -> None:
    # given a written file
    path = written(checkpoint, "whisper.cpp", tmp_path) / "model.bin"
    known = parts_of(path)
    assert known is not None
    # when a byte of its sizes, its mel filters or a token changes
    data = bytearray(path.read_bytes())
    before, token = ggml.read_sound_and_text(path)[1][:2]
    tokens = before + len(token).to_bytes(4, "little") + token
    data[position if position > 0 else data.index(tokens) + len(before) + 4] ^= 1
    path.write_bytes(data)
    # then that is named
    assert changed_part(path, known).startswith(part)


def reordered(value: dict[str, Any]) -> dict[str, Any]:
    first, second, *rest = value
    return {name: value[name] for name in (second, first, *rest)}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda value: {**value, "d_model": 1}, "d_model has changed"),
        (lambda value: {k: v for k, v in value.items() if k != "d_model"}, "d_model is missing"),
        (lambda value: {**value, "new": 1}, "new was added"),
        (reordered, "architectures is at the place of model_type"),
        (
            lambda value: {**value, "transformers.js_config": {"dtype": "q4"}},
            "transformers.js_config.dtype has changed",
        ),
    ],
)
def test_a_key_of_a_json_file_is_named(
    checkpoint: Any, change: Callable[[Any], Any], part: str, tmp_path: Path
) -> None:
    # given the settings of a layout
    path = written(checkpoint, "transformers.js", tmp_path) / "config.json"
    known = parts_of(path)
    assert known is not None
    # when a key changes, is removed, is added or moves
    path.write_text(json.dumps(change(json.loads(path.read_bytes()))))
    # then it is named
    assert changed_part(path, known) == part


@pytest.mark.parametrize(
    ("app", "file"), [("sherpa-onnx", "tokens.txt"), ("faster-whisper", "vocabulary.json")]
)
def test_a_line_that_moved_is_named(checkpoint: Any, app: str, file: str, tmp_path: Path) -> None:
    # given a list of tokens
    path = written(checkpoint, app, tmp_path) / file
    known = parts_of(path)
    assert known is not None
    assert not known.names  # their names would be as long as the file
    # when two of them change places
    text = path.read_text(encoding="utf-8")
    lines = json.loads(text) if file.endswith(".json") else text.split("\n")
    lines[30], lines[31] = lines[31], lines[30]
    path.write_text(json.dumps(lines) if file.endswith(".json") else "\n".join(lines), "utf-8")
    # then the first is named
    assert changed_part(path, known) == "entry 31 has changed"


def test_the_order_and_the_metadata_of_an_onnx_file_are_named(
    checkpoint: Any, tmp_path: Path
) -> None:
    path = written(checkpoint, "sherpa-onnx", tmp_path) / "encoder.onnx"
    known = parts_of(path)
    assert known is not None
    original = path.read_bytes()
    # when one text of the metadata changes
    model = onnx.load(path)
    model.metadata_props[3].value += "1"
    onnx.save(model, path)
    assert changed_part(path, known) == f"metadata {model.metadata_props[3].key} has changed"
    # or two nodes change places
    model = onnx.load_from_string(original)
    first, second = (model.graph.node[i].output[0] for i in (0, 1))
    swapped = [model.graph.node[i] for i in (1, 0, *range(2, len(model.graph.node)))]
    nodes = [type(node).FromString(node.SerializeToString()) for node in swapped]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)
    # then that is named
    assert changed_part(path, known) == f"node {second} is at the place of node {first}"
    # or the version of the operators changes
    model = onnx.load_from_string(original)
    model.opset_import[0].version += 1
    onnx.save(model, path)
    assert changed_part(path, known) == "header has changed"


def test_a_layer_of_an_openvino_file_is_named(checkpoint: Any, tmp_path: Path) -> None:
    path = written(checkpoint, "openvino-genai", tmp_path) / "openvino_encoder_model.xml"
    known = parts_of(path)
    assert known is not None
    text = path.read_text()
    path.write_text(text.replace('strides="2"', 'strides="1"', 1))
    assert changed_part(path, known).startswith("layer Convolution_")


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"{", b"<a>", b"[" * 100_000])
def test_a_damaged_file_is_no_error(checkpoint: Any, damage: bytes, tmp_path: Path) -> None:
    folder = written(checkpoint, "faster-whisper", tmp_path)
    for path in folder.iterdir():
        known = parts_of(path)
        assert known is not None
        path.write_bytes(damage)
        assert changed_part(path, known)
