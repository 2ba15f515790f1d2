"""Files of 1,152,000 and 4,608,000 bytes: the outputs of an encoder of Whisper small in int8 and float32.

A bundle of Whisper small takes minutes to make. These tests use the embedded bundle with the sizes of
Whisper small, and random features: the programs are not run.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from whisperport.program.bundle import MANIFEST, Bundle, FileEntry
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.signatures import expected_signature
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.diagnosing import diagnose
from whisperport.verification.diagnosis.result import Diagnosis

from ...embedded import default_bundle

INT8_BYTES, FLOAT32_BYTES = 1_152_000, 4_608_000
T, WIDTH = 1500, 768


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with the sizes of Whisper small."""
    folder = tmp_path_factory.mktemp("small") / "bundle"
    shutil.copytree(default_bundle(), folder)
    manifest = Bundle.open(default_bundle()).manifest
    sizes = {"n_audio_state": WIDTH, "n_text_state": WIDTH, "n_audio_head": 12, "n_text_head": 12}
    dims = replace(manifest.dims, **sizes, n_audio_ffn=4 * WIDTH, n_text_ffn=4 * WIDTH)
    changed = ["reference.npz", "embedding.npy", "positions.npy"]
    for name in changed[1:]:
        old = np.load(folder / name, mmap_mode="r")
        rows, dtype = old.shape[0], old.dtype
        (folder / name).unlink()
        np.lib.format.open_memmap(folder / name, "w+", dtype, (rows, WIDTH)).flush()
    _write_features(folder / changed[0])
    files = {name: _entry(folder / name) for name in changed}
    programs = tuple(
        replace(entry, spec=expected_signature(entry.spec, dims, None, _heads(entry.spec)))
        for entry in manifest.programs
    )
    made = replace(
        manifest, name="small", dims=dims, programs=programs, files={**manifest.files, **files}
    )
    (folder / MANIFEST).write_bytes(made.to_bytes())
    return Bundle.open(folder)


def _write_features(path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = dict(np.load(path))
    for name in [name for name in arrays if name.startswith("features_")]:
        rows = len(arrays[name])
        channels = random.uniform(0.5, 3, WIDTH)
        arrays[name] = (channels * random.standard_normal((rows, WIDTH))).astype(np.float32)
    np.savez(path, **arrays)


def _entry(path: Path) -> FileEntry:
    return FileEntry(file_sha256(path), path.stat().st_size)


def _heads(spec: object) -> int:
    shapes = {tensor.name: tensor.shape for tensor in spec.outputs}  # type: ignore[attr-defined]
    return shapes["scores"][0] if "scores" in shapes else 0


@pytest.fixture(scope="module")
def int8_file(small: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A file of 1.2 MB with the features in int8, and their scale; do not write to it."""
    path = tmp_path_factory.mktemp("int8") / "output.bin"
    values, scale = _in_int8(_features(small))
    values.tofile(path)
    return path, scale


@pytest.fixture(scope="module")
def int8_diagnosis(small: Bundle, int8_file: tuple[Path, float]) -> Diagnosis:
    """The diagnosis of this file."""
    return diagnose(small, int8_file[0])


def _features(bundle: Bundle) -> np.ndarray:
    return np.asarray(bundle.reference()["features_0"])


def _in_int8(x: np.ndarray) -> tuple[np.ndarray, float]:
    scale = float(np.abs(x).max()) / 127
    return np.clip(np.rint(x / scale), -128, 127).astype(np.int8), scale


def test_the_small_file_is_the_output_in_int8(
    int8_file: tuple[Path, float], int8_diagnosis: Diagnosis
) -> None:
    # given a file of 1.2 MB with the features in int8
    path, scale = int8_file
    assert path.stat().st_size == INT8_BYTES
    # when it is diagnosed
    found = int8_diagnosis
    # then it is named, and its scale is found
    (finding,) = found.outputs[0].findings
    assert finding.cause is CauseCode.INTEGERS_READ_AS_FLOATS
    assert "int8" in finding.sentence
    assert found.outputs[0].after
    assert f"{scale:.3f}" in found.outputs[0].fix


def test_the_fix_of_the_small_file_restores_the_features(
    small: Bundle,
    int8_file: tuple[Path, float],
    int8_diagnosis: Diagnosis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a file of 1.2 MB with the features in int8, and its diagnosis
    path, scale = int8_file
    fix = int8_diagnosis.outputs[0].fix
    # when the printed numpy program runs in the folder of a copy of the file
    shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(fix, "fix", "exec"), {})
    # then its file holds the features within one step of the integers
    restored = np.fromfile(tmp_path / "corrected.bin", np.float32).reshape(T, WIDTH)
    assert np.abs(restored - _features(small)).max() <= 0.51 * scale


def test_the_command_line_explains_the_small_file(
    small: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a file of 1.2 MB with the features in int8
    path = tmp_path / "output.bin"
    values, _ = _in_int8(_features(small))
    values.tofile(path)
    # when `whisperport diagnose` is called with it
    code, printed = _diagnose(capsys, small.folder, path)
    # then the exit status is 1, and dtype, size and scale are printed
    assert code == 1
    assert "1,152,000 bytes; expected 4,608,000" in printed
    assert "integers-read-as-floats" in printed
    assert "int8" in printed
    assert "corrected: SQNR" in printed


def test_the_command_line_passes_the_large_file(
    small: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a file of 4.6 MB with the features in float32
    path = tmp_path / "output.bin"
    _features(small).tofile(path)
    # when `whisperport diagnose` is called with it
    code, printed = _diagnose(capsys, small.folder, path)
    # then it passes
    assert code == 0
    assert "encoder, clip 01-espeak.wav: pass" in printed


def test_the_command_line_passes_the_small_file_if_its_quantization_is_stated(
    small: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a file of 1.2 MB with the features in int8, and a file that says so
    path, stated = tmp_path / "output.bin", tmp_path / "quantization.json"
    values, scale = _in_int8(_features(small))
    values.tofile(path)
    stated.write_text(json.dumps({"features": {"dtype": "int8", "scale": scale, "zero_point": 0}}))
    options = ("--quantization", stated, "--device-precision", "w8a8")
    # when `whisperport diagnose` is called with both
    code, printed = _diagnose(capsys, small.folder, path, *options)
    # then it passes
    assert code == 0, printed


def _diagnose(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Call `whisperport diagnose`; return its exit status and what it printed."""
    from whisperport.apps.cli.main import cli

    capsys.readouterr()
    code = 0
    try:
        cli(["diagnose", *map(str, arguments)], prog_name="whisperport", standalone_mode=False)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err
