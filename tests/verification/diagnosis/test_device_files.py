"""Files for a device and their diagnosis, from the command line, with the embedded bundle."""

import hashlib
import json
import secrets
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from whisperport.apps.cli.main import cli
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.staging import TOKEN_BYTES, Staging
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.device_inputs import write_device_inputs
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions, diagnose
from whisperport.verification.diagnosis.expected import Quantization
from whisperport.verification.diagnosis.expected_outputs import expected_outputs
from whisperport.verification.diagnosis.layers import compare_layers, layer_sentences
from whisperport.verification.diagnosis.layouts import explain_size
from whisperport.verification.diagnosis.raw_files import read_quantization
from whisperport.verification.reference import Reference
from whisperport.verification.tolerances import limit_of

from ...embedded import default_bundle
from .corruptions import noisy


def test_the_inputs_are_written_with_a_manifest_and_the_expected_output_passes(
    tmp_path: Path,
) -> None:
    # when
    out = tmp_path / "inputs"
    written = CliRunner().invoke(
        cli, ["diagnose", str(default_bundle()), "--write-inputs", str(out)]
    )

    # then
    assert written.exit_code == 0, written.output
    (clip,) = json.loads((out / "manifest.json").read_text())["clips"]
    for entry in (*clip["inputs"], *clip["expected"]):
        data = (out / entry["file"]).read_bytes()
        assert len(data) == entry["bytes"] == 4 * np.prod(entry["shape"])
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    output = out / clip["expected"][0]["file"]
    done = CliRunner().invoke(cli, ["diagnose", str(default_bundle()), str(output), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["passed"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["inputs"]  # nothing temporary is left


def test_a_wrong_file_has_exit_status_1_and_its_cause_is_printed(tmp_path: Path) -> None:
    # given
    path = tmp_path / "output.bin"
    path.write_bytes(bytes(4 * 1500 * 128))

    # when
    done = CliRunner().invoke(cli, ["diagnose", str(default_bundle()), str(path)])

    # then
    assert done.exit_code == 1
    assert "constant" in done.stdout


def test_what_a_killed_run_left_of_the_inputs_is_cleared_by_the_next_one(tmp_path: Path) -> None:
    # given
    out = tmp_path / "inputs"
    left = Staging(out, secrets.token_hex(TOKEN_BYTES)).partial
    (left / "clip").mkdir(parents=True)
    (left / "clip/mel.bin").write_bytes(b"half")

    # when
    write_device_inputs(str(default_bundle()), out)

    # then
    assert list(tmp_path.iterdir()) == [out]


def test_integers_are_written_with_their_quantization(tmp_path: Path) -> None:
    # given
    stated = {"mel": Quantization("int8", 0.02, -10), "features": Quantization("int16", 0.001, 0)}

    # when
    options = DiagnoseOptions(quantization=stated)
    written = write_device_inputs(str(default_bundle()), tmp_path / "inputs", options)

    # then
    (clip,) = written.manifest["clips"]
    assert [entry["dtype"] for entry in (*clip["inputs"], *clip["expected"])] == ["int8", "int16"]
    assert clip["inputs"][0]["quantization"] == asdict(stated["mel"])
    assert (written.folder / clip["inputs"][0]["file"]).stat().st_size == 80 * 3000


@pytest.mark.parametrize("there", ["file", "folder with a file", "link"])
def test_existing_files_are_not_replaced(there: str, tmp_path: Path) -> None:
    # given
    out = tmp_path / "inputs"
    if there == "file":
        out.write_text("mine")
    elif there == "link":
        out.symlink_to(tmp_path)
    else:
        out.mkdir()
        (out / "mine").write_text("mine")

    # then
    with pytest.raises(UsageError, match="cannot write"):
        write_device_inputs(str(default_bundle()), out)


@pytest.mark.parametrize(
    ("size", "dtype"), [(1_152_000, "int8"), (4_608_000, "float32"), (2_304_000, "float16")]
)
def test_the_sizes_of_whisper_small_are_explained(size: int, dtype: str) -> None:
    (first, *_) = explain_size(size, "features", (1, 1500, 768))

    assert "exactly 1500 x 768" in first
    assert dtype in first


def test_a_padded_size_and_an_impossible_size_are_explained() -> None:
    assert "1504" in explain_size(4 * 768 * 1504, "features", (1, 1500, 768))[0]
    assert "fit no dtype" in explain_size(1_234_567, "features", (1, 1500, 768))[0]


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"x": 3}', '{"x": {"dtype": "int4", "scale": 1, "zero_point": 0}}'),
        '{"x": {"dtype": "int8", "scale": 0, "zero_point": 0}}',
        '{"x": {"dtype": "int8", "scale": 1, "zero_point": 300}}',
        '{"x": {"dtype": "int8", "scale": 1, "zero_point": 0.5}}',
    ],
)
def test_a_wrong_quantization_is_a_clear_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "quantization.json"
    path.write_text(content)

    with pytest.raises(UsageError):
        read_quantization(path)


def test_a_quantization_is_read(tmp_path: Path) -> None:
    path = tmp_path / "quantization.json"
    path.write_text('{"features": {"dtype": "uint8", "scale": 0.5, "zero_point": 128}}')

    assert read_quantization(path) == {"features": Quantization("uint8", 0.5, 128)}


def test_the_layer_where_the_error_begins_is_named(tmp_path: Path) -> None:
    # given
    device, reference = tmp_path / "device", tmp_path / "reference"
    device.mkdir()
    reference.mkdir()
    random = np.random.default_rng(0)
    for number in (1, 2, 10):
        right = random.standard_normal((50, 32)).astype(np.float32)
        noise = 0.1 if number == 10 else 1e-4
        wrong = right + noise * random.standard_normal(right.shape).astype(np.float32)
        np.save(reference / f"block_{number}.npy", right)
        (device / f"block_{number}.bin").write_bytes(wrong.astype(np.float32).tobytes())

    # when
    layers = compare_layers(device, reference)

    # then
    assert [layer.name for layer in layers] == ["block_1", "block_2", "block_10"]
    assert "begins at the layer block_10" in layer_sentences(layers)[-1]
    with pytest.raises(UsageError):
        compare_layers(tmp_path / "missing", reference)


def test_folders_of_layers_are_diagnosed_in_place_of_a_bundle(tmp_path: Path) -> None:
    # given the layers in float32, and those of a device
    right = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32)
    for name, values in (("reference", right), ("device", -right)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "block_1.npy", values)
    folders = [str(tmp_path / "reference"), str(tmp_path / "device")]

    # when
    page = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["diagnose", *folders, "--html", str(page)])

    # then
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("block_1: SQNR ")
    assert "Layers of a device" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either OUTPUT, to diagnose it, or --write-inputs"),
        (
            ["a.bin", "--write-inputs", "new"],
            "give either OUTPUT, to diagnose it, or --write-inputs",
        ),
        (["a.bin", "--html", "page.html"], "--html shows LAYERS only"),
        (["a.bin", "b.bin"], "expected NAME=PATH with a new name"),
    ],
)
def test_what_contradicts_is_wrong_usage(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    done = CliRunner().invoke(cli, ["diagnose", str(default_bundle()), *arguments])

    assert done.exit_code == 2
    assert message in done.output


def _file_with(folder: Path, sqnr_db: float) -> Path:
    """Write the expected features with noise."""
    reference = Reference.from_arrays(Bundle.open(default_bundle()).reference())
    values = noisy(reference.clips[0].features, sqnr_db).astype(np.float32)
    path = folder / "output.bin"
    values.tofile(path)
    return path


def test_text_json_and_exit_status_of_a_file_state_one_verdict_with_its_limit(
    tmp_path: Path,
) -> None:
    # given features with 11.7 dB
    path = _file_with(tmp_path, 11.7)
    command = ["diagnose", str(default_bundle()), str(path)]
    verified = limit_of("w8a8", None, encoder=True)

    # when the device computes in 8 bits
    text = CliRunner().invoke(cli, [*command, "--device-precision", "w8a8"])
    data = CliRunner().invoke(cli, [*command, "--device-precision", "w8a8", "--json"])

    # then it passes the limit that `verify` has for such an encoder, everywhere
    (output,) = json.loads(data.stdout)["outputs"]
    assert (text.exit_code, data.exit_code, output["passed"]) == (0, 0, True)
    assert "SQNR 11.7 dB" in text.stdout
    assert output["limit"] == f"{verified.rule} for w8a8: {verified.because}"
    assert f"  limit: {output['limit']}\n  pass\n" in text.stdout
    assert text.stdout.endswith("encoder, clip 01-espeak.wav: pass\n")
    assert text.stderr.splitlines()[-1] == (
        f"next: whisperport transcribe --bundle {default_bundle()} --features {path}"
    )


def test_an_output_that_is_a_frame_late_does_not_pass_in_8_bits() -> None:
    # given the right features, one frame late, which have 19 dB
    expected = expected_outputs(default_bundle(), precision="w8a8")
    late = np.roll(expected.tensors[0].array, 1, axis=1)

    # when
    found = diagnose(expected, late)

    # then
    assert not found
    assert found.causes == (CauseCode.FRAME_SHIFT,)


def test_simulated_and_printed_limit_are_one(tmp_path: Path) -> None:
    # given a device that computes what its 8-bit simulation computes, with 12 dB
    path = _file_with(tmp_path, 12)
    command = ["diagnose", str(default_bundle()), str(path)]

    # when
    done = CliRunner().invoke(cli, [*command, "--simulated", str(path)])

    # then
    assert done.exit_code == 0, done.output
    assert "limit: SQNR ≥ 10 dB for w8a8" in done.stdout
    assert "verdict: Quantization and device are right" in done.stdout
