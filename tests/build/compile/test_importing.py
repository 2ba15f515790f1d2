"""`import_artifact`: published files, made here as the public sources describe them; none was run."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whisperport.build.export.drafting
from whisperport.build.compile.importing import ImportOptions, import_artifact
from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.origin import is_trusted
from whisperport.runtime import load_engine
from whisperport.targets import TARGETS, RunOptions, get_target

from ...conftest import noise_clips
from ...targets.vendors.hailo.hef_file import encoder_hef, hef_bytes

ROWS = 8
PIECES = {"net/conv1": 12966, "net/conv2": 12966, "net/conv3": 12966, "net/conv4": 12967}


def _decoder(embeddings: tuple[int, int, int], width: int = 64) -> bytes:
    """With an output beside the logits, as published ones have."""
    outputs = {"net/ew_add1": (1, ROWS, width)}
    outputs |= {name: (1, ROWS, size) for name, size in PIECES.items()}
    inputs = {"net/input_layer1": (1, 100, width), "net/input_layer2": embeddings}
    return hef_bytes(3, inputs, outputs)


def _file(folder: Path, content: bytes, name: str = "encoder.hef") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def _assets(folder: Path, checkpoint: Any, change: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    embedding = checkpoint.weights["decoder.token_embedding.weight"].float().numpy()
    positions = checkpoint.weights["decoder.positional_embedding"].float().numpy()[:ROWS]
    np.save(folder / "token_embedding_weight_tiny.npy", embedding + np.float32(change))
    np.save(folder / "onnx_add_input_tiny.npy", positions)
    return folder


def test_published_files_become_a_bundle_whose_rest_is_verified(
    one_layer_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(whisperport.build.export.drafting, "shipped_clips", noise_clips)
    encoder = _file(tmp_path, encoder_hef(3))
    (tmp_path / ".bundle.import.partial-0123456789abcdef").mkdir()  # of an import that was killed
    options = ImportOptions(
        programs={"uncached_decoder": _file(tmp_path, _decoder((1, ROWS, 64)), "decoder.hef")},
        options={"hailo8l.assets": str(_assets(tmp_path / "assets", one_layer_checkpoint))},
        run=RunOptions(threads=1),
    )

    import_artifact(encoder, one_layer_checkpoint, tmp_path / "bundle", options)

    assert not list(tmp_path.glob(".bundle*"))
    opened = Bundle.open(tmp_path / "bundle")
    entry, full = (opened.manifest.program(name) for name in ("encoder", "uncached_decoder"))
    assert entry.target == "hailo8l"
    for name in ("encoder", "uncached_decoder"):
        assert opened.manifest.status(name) == "checked against vendor documentation"
        assert not opened.manifest.is_verified(name)  # the files were not run
    assert entry.files[0] == "hailo8l/encoder.hef"
    assert entry.facts.imported == "encoder.hef"
    assert opened.manifest.dims.n_audio_ctx == 100  # what the HEF takes
    assert full.spec.inputs[1].shape == (1, 64, 1, ROWS)  # the HEF adds positions
    assert opened.manifest.is_verified("step")
    assert not opened.manifest.verified
    assert not opened.manifest.failed
    assert ".emulate=on" in opened.manifest.verification["subject"]
    assert not is_trusted(opened)
    load_engine(opened, RunOptions(threads=1, options={"hailo8l.emulate": "on"}))
    assert sorted(os.listdir(tmp_path)) == ["assets", "bundle", "decoder.hef", "encoder.hef"]


@pytest.mark.parametrize("mel", [(1, 200, 80), (200, 1, 80)], ids=str)
@pytest.mark.parametrize("features", [(1, 100, 64), (100, 1, 64)], ids=str)
def test_the_window_is_read_from_whichever_arrangement_an_encoder_has(
    tiny_checkpoint, tmp_path, mel, features
):
    content = hef_bytes(3, {"net/input_layer1": mel}, {"net/normalization9": features})
    artifacts = {"encoder": _file(tmp_path, content)}
    assert get_target("hailo8l").importer.form(artifacts, tiny_checkpoint.dims).window_s == 2.0


@pytest.mark.parametrize(
    ("embeddings", "positions"), [((ROWS, 1, 64), "host"), ((1, ROWS, 64), "graph")]
)
def test_both_generations_of_decoders_are_told_apart_by_their_shape(
    tiny_checkpoint, tmp_path, embeddings, positions
):
    artifacts = {
        "encoder": _file(tmp_path, encoder_hef(3)),
        "uncached_decoder": _file(tmp_path, _decoder(embeddings), "decoder.hef"),
    }
    form = get_target("hailo8l").importer.form(artifacts, tiny_checkpoint.dims)
    assert form.options == {"sequence-length": "8", "positions": positions}
    assert form.window_s == 2.0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            encoder_hef(3, frames=400),
            "is not an encoder of this checkpoint",
        ),  # longer than it was trained
        (encoder_hef(3, bins=128), "is not an encoder of this checkpoint"),
        (encoder_hef(3, width=384), "is not an encoder of this checkpoint"),
        (encoder_hef(7), "for a chip that is not known here"),
        (encoder_hef(3)[:-1], "damaged"),
        (hef_bytes(3, {}, {}), "the shapes of encoder.hef are not known"),
        (b"hello", "is not a HEF"),
        (_decoder((ROWS, 1, 64)), "is not an encoder of this checkpoint"),
    ],
    ids=["window", "bins", "width", "chip", "cut", "older", "text", "decoder"],
)
def test_a_file_that_is_no_encoder_of_the_checkpoint_is_rejected_before_any_work(
    tiny_checkpoint, tmp_path, content, says
):
    with pytest.raises(BundleError, match=says):
        import_artifact(_file(tmp_path, content), tiny_checkpoint, tmp_path / "bundle")
    assert os.listdir(tmp_path) == ["encoder.hef"]


def test_a_chip_that_does_not_run_the_file_is_rejected(tiny_checkpoint, tmp_path):
    hef = _file(tmp_path, encoder_hef(1))
    with pytest.raises(BundleError, match="another chip than `hailo8l`"):
        import_artifact(hef, tiny_checkpoint, tmp_path / "bundle", ImportOptions(target="hailo8l"))


@pytest.mark.parametrize(
    ("architecture", "target"), [(1, "hailo8"), (3, "hailo8l"), (103, "hailo10h")]
)
def test_the_target_is_the_one_that_a_file_was_compiled_for(tmp_path, architecture, target):
    hef = _file(tmp_path, encoder_hef(architecture))
    named = {one.spec.name: one.importer for one in TARGETS if one.importer}
    assert [name for name, importer in named.items() if importer.is_for(hef)] == [target]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (ImportOptions(target="onnxruntime"), "`onnxruntime` cannot import compiled files"),
        (ImportOptions(programs={"step": Path("step.hef")}), "cannot import a program `step`"),
        (ImportOptions(options={"hailo8l.asset": "x"}), "no option `asset`"),
    ],
)
def test_what_a_target_does_not_import_is_rejected(tiny_checkpoint, tmp_path, options, says):
    hef = _file(tmp_path, encoder_hef(3))
    with pytest.raises(UsageError, match=says):
        import_artifact(hef, tiny_checkpoint, tmp_path / "bundle", options)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("embeddings", [(ROWS, 1, 384), (ROWS, 2, 64)], ids=["width", "layout"])
def test_a_decoder_of_another_checkpoint_is_rejected(tiny_checkpoint, tmp_path, embeddings):
    decoder = _file(tmp_path, _decoder(embeddings), "decoder.hef")
    with pytest.raises(BundleError, match="is not a decoder of this checkpoint"):
        import_artifact(
            _file(tmp_path, encoder_hef(3)),
            tiny_checkpoint,
            tmp_path / "bundle",
            ImportOptions(programs={"uncached_decoder": decoder}),
        )


@pytest.mark.parametrize("fault", ["values", "missing", "text", "shape"])
def test_tables_that_are_not_the_checkpoints_are_rejected(tiny_checkpoint, tmp_path, fault):
    assets = _assets(tmp_path / "assets", tiny_checkpoint, 0.1 if fault == "values" else 0.0)
    table = assets / "onnx_add_input_tiny.npy"
    if fault == "missing":
        table.unlink()
    elif fault == "text":
        table.write_bytes(b"no array")
    elif fault == "shape":
        np.save(table, np.zeros((ROWS, 3), np.float32))
    options = ImportOptions(
        programs={"uncached_decoder": _file(tmp_path, _decoder((ROWS, 1, 64)), "decoder.hef")},
        options={"hailo8l.assets": str(assets)},
    )
    with pytest.raises(BundleError):
        import_artifact(
            _file(tmp_path, encoder_hef(3)), tiny_checkpoint, tmp_path / "bundle", options
        )
    assert not (tmp_path / "bundle").exists()
    assert "hailo_platform" not in sys.modules
