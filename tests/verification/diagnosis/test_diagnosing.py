"""What `diagnose` says about right files and about files with known mistakes."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.apps.cli.diagnose import print_diagnosis
from whisperport.errors import UsageError
from whisperport.speech.audio import log_mel
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions, diagnose
from whisperport.verification.diagnosis.expected import Expected, ExpectedTensor, Quantization
from whisperport.verification.diagnosis.matching import NamedValue, aligned, error_of, matched
from whisperport.verification.diagnosis.verdict import verdict_of
from whisperport.verification.diagnosis.wrong_inputs import input_mistakes
from whisperport.verification.tolerances import GATES

from ...extent import core_or_all
from ...micro import DIMS
from .corruptions import CHANNELS, FRAMES, ONE, TWO, expected, features, floats, noisy, stored

# What `diagnose` says about right files and about files with known mistakes.


def file_of(folder: Path, values: Any) -> Path:
    path = folder / "output.bin"
    path.write_bytes(np.ascontiguousarray(values).tobytes())
    return path


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_a_mistake_is_named(name: str, tmp_path: Path) -> None:
    # given
    change, causes = {**ONE, **TWO}[name]
    path = file_of(tmp_path, change(features(1)))

    # when
    found = diagnose(expected(), path)

    # then
    assert set(found.causes) == causes
    assert not found
    assert all(finding.sentence for output in found.outputs for finding in output.findings)


@pytest.mark.parametrize(
    "values",
    [
        features(1),
        features(1).astype(np.float16).astype(np.float32),
        floats(noisy(features(1), 45)),
    ],
    ids=["exact", "computed in float16", "45 dB"],
)
def test_a_right_file_passes(values: Any, tmp_path: Path) -> None:
    found = diagnose(expected(), file_of(tmp_path, values))

    assert found
    assert found.causes == ()


def test_an_unrelated_file_has_no_cause_and_says_what_was_tried(tmp_path: Path) -> None:
    # given
    noise = np.random.default_rng(8).standard_normal(features(1).shape)

    # when
    found = diagnose(expected(), file_of(tmp_path, floats(noise)))

    # then
    assert not found
    assert found.causes == ()
    assert found.unexplained == ("features",)
    assert found.outputs[0].excluded


@pytest.mark.parametrize(
    "name",
    [
        *("int8 read as uint8", "int8, transposed", "shifted"),
        *core_or_all((), ("int8", "float16", "big-endian", "header", "scale", "zero point")),
        *core_or_all((), ("transposed", "padded", "tiles", "halves exchanged")),
        "padded and transposed",
    ],
)
def test_the_lines_of_a_fix_correct_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    change, _ = {**ONE, **TWO}[name]
    found = diagnose(expected(), file_of(tmp_path, change(features(1))))
    monkeypatch.chdir(tmp_path)

    # when
    exec(found.outputs[0].fix, {})

    # then
    corrected = np.fromfile(tmp_path / "corrected.bin", "<f4").reshape(features(1).shape)
    error = np.mean((corrected - features(1)) ** 2) / np.mean(features(1) ** 2)
    assert error < 1e-3
    assert found.outputs[0].after.sqnr_db > 30


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        (noisy(features(1), 11.7), "quantization-error"),
        (features(2), "other-clip"),
        (np.zeros((FRAMES, CHANNELS)), "constant"),
    ],
)
def test_no_lines_are_printed_that_would_only_copy_the_file(
    values: Any, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given values that are stored as expected, and are wrong
    found = diagnose(expected(), file_of(tmp_path, floats(values)))
    # when the diagnosis is printed
    print_diagnosis(found)
    # then nothing is said to correct them, and what to do instead is
    printed = capsys.readouterr().out
    assert [one.value for one in found.causes] == [cause]
    assert found.outputs[0].fix == ""
    assert found.outputs[0].to_json()["fix"] == ""
    assert "these lines correct" not in printed
    assert "corrected:" not in printed
    assert "nothing corrects this file" in printed
    assert found.outputs[0].findings[0].advice in printed


def test_lines_that_correct_a_part_say_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a transposed file with noise
    found = diagnose(expected(), file_of(tmp_path, floats(noisy(features(1), 12).T)))
    # when the diagnosis is printed
    print_diagnosis(found)
    # then the corrected file is said to fail
    printed = capsys.readouterr().out
    assert "these lines correct how the file is stored:" in printed
    assert re.search(r"; it still fails: SQNR 1[12]\.\d dB is below 35 dB", printed)


def test_declared_integers_pass(tmp_path: Path) -> None:
    # given
    tensor = ExpectedTensor("features", features(1)[None], 1, Quantization("int8", 0.05, 11))
    declared = Expected("encoder", "clip", (tensor,), precision="w8a8")

    # when
    right = diagnose(declared, file_of(tmp_path, stored(features(1))))
    wrong = diagnose(declared, file_of(tmp_path, features(1)))

    # then
    assert right
    assert wrong.causes == (CauseCode.FLOATS_READ_AS_INTEGERS,)


def test_the_encoder_of_a_short_window_has_the_limit_of_the_encoder() -> None:
    short, full, decoder = (
        Expected(name, "clip", (), precision="w8a8").limit("features")
        for name in ("encoder_250", "encoder", "cross_kv_250")
    )

    assert short == full != decoder


def test_exchanged_outputs_are_named(tmp_path: Path) -> None:
    # given
    tensors = tuple(ExpectedTensor(f"cross_k_{i}", features(i + 1), 0) for i in range(3))
    files = dict(zip(("cross_k_0", "cross_k_1", "cross_k_2"), (1, 0, 2), strict=True))
    for name, source in files.items():
        (tmp_path / f"{name}.bin").write_bytes(features(source + 1).tobytes())

    # when
    found = diagnose(Expected("cross_kv", "clip", tensors), tmp_path)

    # then
    assert found.causes == (CauseCode.OUTPUTS_SWAPPED,)
    assert [output.passed for output in found.outputs] == [False, False, True]
    assert "`cross_k_1`" in found.outputs[0].findings[0].sentence


def test_the_simulation_tells_a_bad_quantization_from_a_wrong_device() -> None:
    # given
    right, coarse = floats(features(1)), floats(noisy(features(1), 12))
    coarser = floats(noisy(features(1), 9))
    fine, unknown = floats(noisy(features(1), 25)), np.full_like(right, np.nan)

    def verdict(device: Any, simulated: Any) -> str:
        return verdict_of([device], [simulated], [right], GATES["w8a8"]).sentence

    # then
    assert verdict(coarse, coarse).startswith("The device computes what its toolchain simulates")
    assert verdict(coarser, coarse).startswith("The quantization is bad, and the device is right")
    assert verdict(coarse, fine).startswith("The device is wrong, and the quantization is good")
    assert verdict(fine, fine).startswith("Quantization and device are right")
    assert verdict(-right, coarse).startswith("Quantization and device are both wrong")
    assert verdict(unknown, fine).startswith("No values")


def test_a_diagnosis_with_a_simulation_has_a_verdict() -> None:
    right = floats(features(1)[None])

    found = diagnose(expected(), right, DiagnoseOptions(simulated=right))

    assert found.verdict.startswith("Quantization and device are right")
    assert found.numbers["l2_ratio"] == 1


def test_a_file_like_the_toolchains_simulation_has_the_model_as_its_cause() -> None:
    # given a file that is far from the expected output, and the same as the toolchain's simulation
    noise = floats(np.random.default_rng(8).standard_normal(features(1).shape))

    # when
    found = diagnose(expected(), noise, DiagnoseOptions(simulated=noise.copy()))

    # then
    assert found.verdict.startswith("The device computes what its toolchain simulates")
    assert found.causes == (CauseCode.QUANTIZATION_ERROR,)


def test_a_diagnosis_is_plain_json(tmp_path: Path) -> None:
    import json

    found = diagnose(expected(), file_of(tmp_path, np.full((180, 64), np.inf, np.float32)))

    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["causes"] == ["not-finite"]
    assert data["passed"] is False


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x10\x00not a header....."]
)
def test_a_damaged_file_is_a_clear_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "output.npy"
    path.write_bytes(content)

    with pytest.raises(UsageError):
        diagnose(expected(), path)


def test_an_npy_file_that_states_more_values_than_it_has_is_rejected(tmp_path: Path) -> None:
    # given
    path = tmp_path / "output.npy"
    np.save(path, np.zeros(4, np.float32))
    content = path.read_bytes().replace(b"'shape': (4,)", b"'shape': (1<<40,)"[:13])
    path.write_bytes(content.replace(b"(4,)", b"(9,)"))

    # then
    with pytest.raises(UsageError, match=r"output\.npy"):
        diagnose(expected(), path)


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "output.npy"
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)

    with pytest.raises(UsageError):
        diagnose(expected(), path)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    # given
    path = tmp_path / "output.bin"
    with path.open("wb") as file:
        file.truncate(2**40)  # a file with holes

    # then
    with pytest.raises(UsageError, match="too large"):
        diagnose(expected(), path)


def test_a_device_file_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    for path in ("/dev/zero", tmp_path / "missing.bin", tmp_path / "nul\0.bin"):
        with pytest.raises(UsageError):
            diagnose(expected(), str(path))


def test_an_unknown_output_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no output `logits`"):
        diagnose(expected(), {"logits": file_of(tmp_path, features(1))})


@pytest.mark.parametrize("seed", range(core_or_all(2, 12)))
def test_random_bytes_never_crash_and_are_never_explained_as_right(
    seed: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(seed)
    path = file_of(tmp_path, random.integers(0, 256, int(random.integers(1, 90_000)), np.uint8))

    assert not diagnose(expected(), path)


# Usual mistakes with the input of an encoder.


def test_every_mistake_makes_another_input_of_the_right_shape() -> None:
    # given two seconds of noise, and a window of three
    audio = np.random.default_rng(0).standard_normal(32000).astype(np.float32) / 10
    dims = replace(DIMS, n_mels=80, n_audio_ctx=150)
    right = log_mel(audio, dims.n_mels, n_frames=dims.n_frames)

    # when
    made = [mistake.spectrogram(audio, dims) for mistake in input_mistakes(dims)]

    # then
    wrong = [mel for mel in made if mel is not None]  # the others begin after the audio
    assert len(wrong) > 20
    assert all(mel.shape == right.shape for mel in wrong)
    assert not any(np.array_equal(mel, right) for mel in wrong)


# Values of two programs are matched by names, modules, order and similarity.

RANDOM = np.random.default_rng(0)


def values(count, shape=(1, 6, 8)):
    return [RANDOM.standard_normal(shape).astype(np.float32) for _ in range(count)]


def test_values_without_a_common_name_are_matched_by_similarity():
    arrays = values(5)
    a = [NamedValue(f"a{n}", one) for n, one in enumerate(arrays)]
    b = [NamedValue(f"b{n}", one + 1e-6) for n, one in enumerate(arrays)]
    b.insert(2, NamedValue("extra", values(1)[0]))

    assert matched(a, b) == [(0, 0), (1, 1), (2, 3), (3, 4), (4, 5)]


def test_values_in_another_layout_are_matched_and_aligned():
    (array,) = values(1, (1, 3, 4, 5))
    turned = np.ascontiguousarray(array.transpose(0, 2, 3, 1))

    assert matched([NamedValue("a", array)], [NamedValue("b", turned)]) == [(0, 0)]
    found = aligned(array, turned, layouts=True)
    assert found is not None
    assert error_of(array, found) == 0


def test_a_value_that_diverges_is_matched_by_its_name():
    first, second, wrong = values(3)
    a = [NamedValue("x", first, "linear", "fc1"), NamedValue("y", second, "linear", "fc2")]
    b = [NamedValue("x", first, "linear", "fc1"), NamedValue("y", 9 * wrong, "linear", "fc2")]

    assert matched(a, b) == [(0, 0), (1, 1)]


def test_values_in_another_order_are_matched_too():
    arrays = values(4)
    a = [NamedValue(f"a{n}", one) for n, one in enumerate(arrays)]
    b = [NamedValue(f"b{n}", arrays[n]) for n in (1, 0, 2, 3)]

    assert matched(a, b) == [(0, 1), (1, 0), (2, 2), (3, 3)]


def test_axes_of_one_shape_are_exchanged_only_between_layouts():
    (array,) = values(1, (1, 4, 4))
    turned = array.transpose(0, 2, 1)

    assert error_of(array, aligned(array, turned, layouts=False)) > 0.1
    assert error_of(array, aligned(array, turned, layouts=True)) == 0
    assert aligned(array, values(1, (1, 5, 4))[0], layouts=True) is None


def test_infinities_of_masks_are_equal_and_a_nan_is_not():
    x = np.array([1, 2, -np.inf], np.float32)

    assert error_of(x, x.copy()) == 0
    assert error_of(x, np.array([1, 2, 3], np.float32)) == math.inf
    assert error_of(x[:2], np.array([1, np.nan], np.float32)) == math.inf


def test_the_largest_number_of_a_mask_hides_no_error():
    lowest = np.finfo(np.float32).min
    x = np.array([1, 2, lowest], np.float32)

    assert error_of(x, np.array([1, 3, lowest], np.float32)) == pytest.approx(1 / 5**0.5)
    assert error_of(x, np.array([1, 2, -np.inf], np.float32)) == 0
    assert error_of(x, np.array([1, 2, np.inf], np.float32)) == math.inf
    assert error_of(x, np.array([1, lowest, 3], np.float32)) == math.inf
