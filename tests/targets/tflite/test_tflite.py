"""Lowering to .tflite and running .tflite files: names, order, dtypes, quantized inputs, damage."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from whisperport.errors import BundleError, LoweringError, ProgramError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.inspection.read_tflite import list_operators
from whisperport.model.inspection.tflite_signatures import read_signatures
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.speech.audio import load_audio, log_mel
from whisperport.targets.tflite.lowering import lower_to_tflite
from whisperport.targets.tflite.quantization import ALL, LINEAR, MATMUL, quantize, recipe
from whisperport.targets.tflite.quantize_in_place import quantize_statically
from whisperport.targets.tflite.runner import TfliteFile, TfliteRunner, dequantized, quantized
from whisperport.verification.clips import shipped_audio
from whisperport.verification.loss import loss_of

from ...extent import EVERYTHING, core_or_all
from ...outlier_checkpoints import NAMES, STORED, outlier_checkpoint, planted_in
from ...shared_exports import run_folder

# Lowering to .tflite and running .tflite files: names, order, dtypes, quantized inputs, damage.


class Both(nn.Module):
    """Two inputs and two outputs of equal shapes, so that only names tell them apart."""

    def forward(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return a - 2 * b, a + 3 * b


class Lookup(nn.Module):
    """An integer input, and an integer output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens), tokens + 1


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def written(path: Path, *programs: Program) -> Path:
    lower_to_tflite(programs, path, target="one", extra="litert-export")
    return path


def runner(path: Path, spec: ProgramSpec) -> TfliteRunner:
    return TfliteRunner(spec, TfliteFile(path, 1, extra="litert"))


@pytest.fixture(scope="module")
def rows() -> Program:
    torch.manual_seed(0)
    return trace("rows", Rows(), (torch.zeros(1, 3, 64),), ["y"])


@pytest.fixture(scope="module")
def rows_file(rows: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tflite") / "rows.tflite", rows)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "x.npy"
    np.save(path, np.random.default_rng(0).standard_normal((16, 1, 3, 64)).astype(np.float32))
    return path


# Lowering ----------------------------------------------------------------------------------------


def test_names_and_order_are_those_of_the_program(tmp_path: Path) -> None:
    program = trace("both", Both(), (torch.zeros(1, 4), torch.zeros(1, 4)), ["less", "more"])

    path = written(tmp_path / "both.tflite", program)
    found = read_signatures(path)["both"]
    b, a = (np.full((1, 4), value, np.float32) for value in (1, 10))
    outputs = runner(path, program.spec).run({"a": a, "b": b})

    assert [tensor.name for tensor in found.inputs] == ["b", "a"]
    assert [tensor.name for tensor in found.outputs] == ["less", "more"]
    np.testing.assert_array_equal(outputs["less"], a - 2 * b)
    np.testing.assert_array_equal(outputs["more"], a + 3 * b)


def test_64_bit_integers_are_stored_in_32_and_stay_64_for_the_caller(tmp_path: Path) -> None:
    program = trace("lookup", Lookup(), (torch.zeros(1, 3, dtype=torch.int64),), ["rows", "next"])
    path = written(tmp_path / "lookup.tflite", program)
    tokens = np.array([[1, 9, 0]])

    outputs = runner(path, program.spec).run({"tokens": tokens})

    assert read_signatures(path)["lookup"].inputs[0].dtype == "int32"
    assert outputs["next"].dtype == np.int64
    np.testing.assert_array_equal(outputs["next"], tokens + 1)
    with pytest.raises(ValueError, match="more than 32 bits"):
        runner(path, program.spec).run({"tokens": np.array([[1, 2**31, 0]])})


def test_programs_in_one_file_store_an_equal_weight_once_and_run_as_alone(
    rows_file: Path, tmp_path: Path
) -> None:
    module, x = Rows(), torch.randn(1, 3, 64)
    programs = [trace("rows", module, (x,), ["y"]), trace("longer", module, (x[:, :2],), ["y"])]

    path = written(tmp_path / "two.tflite", *programs)

    assert list(read_signatures(path)) == ["rows", "longer"]
    assert path.stat().st_size < 1.5 * rows_file.stat().st_size
    for program, given in zip(programs, (x, x[:, :2].contiguous()), strict=True):
        found = runner(path, program.spec).run({"x": given.numpy()})["y"]
        np.testing.assert_allclose(found, module(given).detach(), atol=1e-5)  # sums of 64 products


def test_a_program_that_cannot_be_converted_leaves_no_file(tmp_path: Path) -> None:
    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.svdvals(x)

    program = trace("unknown", Unknown(), (torch.eye(3),), ["y"])

    with pytest.raises(LoweringError, match="could not convert unknown") as failed:
        written(tmp_path / "unknown.tflite", program)

    assert 0 < len(failed.value.why) <= 300
    assert "whisperport check" in failed.value.hint
    assert list(tmp_path.iterdir()) == []


def test_what_the_converter_prints_is_suppressed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = trace("quiet", nn.Linear(4, 4), (torch.zeros(1, 4),), ["y"])

    written(tmp_path / "quiet.tflite", program)
    runner(tmp_path / "quiet.tflite", program.spec).run({"input": np.zeros((1, 4), np.float32)})

    printed = capfd.readouterr()
    assert printed.out == printed.err == ""
    os.write(2, b"printed again")
    assert capfd.readouterr().err == "printed again"


# Running -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("w8a8", "int8"), ("w8a16", "int16")])
def test_quantized_inputs_and_outputs_are_float32_for_the_caller(
    precision: str, dtype: str, rows: Program, rows_file: Path, samples: Path, tmp_path: Path
) -> None:
    path = tmp_path / "quantized.tflite"
    quantize(rows_file, path, recipe(precision, ALL), {"rows": {"x": samples}})
    x = np.load(samples)[3]
    expected = runner(rows_file, rows.spec).run({"x": x})["y"]

    found = runner(path, rows.spec).run({"x": x})["y"]

    signature = read_signatures(path)["rows"]
    assert (signature.inputs[0].dtype, signature.outputs[0].dtype) == (dtype, dtype)
    assert found.dtype == np.float32
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 0 < error < 0.05  # 1/128 of the range for input, weight and output each


class UsedTwice(nn.Module):
    """Its first output has another use in the graph, as new keys have that are joined to a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        key = self.key(x).transpose(1, 2)
        return key, torch.matmul(self.query(x), torch.cat([cache, key], 2))


def test_the_names_of_outputs_are_those_of_the_graph(tmp_path: Path) -> None:
    # given a program in 8 bits but for one multiplication
    program = trace(
        "step", UsedTwice(), (torch.zeros(1, 4, 8), torch.zeros(1, 8, 6)), ["key", "scores"]
    )
    file, samples = written(tmp_path / "float.tflite", program), {}
    for tensor in program.spec.inputs:
        samples[tensor.name] = tmp_path / f"{tensor.name}.npy"
        values = np.random.default_rng(0).standard_normal((8, *tensor.shape))
        np.save(samples[tensor.name], values.astype(np.float32))
    (matmul,) = [op.tensor for op in list_operators(file)[0] if op.name == "BATCH_MATMUL"]
    # when it is quantized
    steps = recipe("w8a8", ALL, [("fp32", "BATCH_MATMUL", matmul)])
    quantize(file, tmp_path / "quantized.tflite", steps, {"step": samples})
    # then the signature's outputs are those of the graph, and a run returns them
    (graph,), (signature,) = graphs_of(tmp_path / "quantized.tflite")
    assert {int(output.tensorIndex) for output in signature.outputs} == {*map(int, graph.outputs)}
    inputs = {name: np.load(path)[3] for name, path in samples.items()}
    right = runner(file, program.spec).run(inputs)
    found = runner(tmp_path / "quantized.tflite", program.spec).run(inputs)
    for name in ("key", "scores"):
        assert np.abs(found[name] - right[name]).max() < 0.05 * np.abs(right[name]).max()


def graphs_of(path: Path) -> tuple[Any, Any]:
    """Return the subgraphs and the signatures of a file."""
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(path))
    return model.subgraphs, model.signatureDefs


@pytest.mark.parametrize(("dtype", "zero_point"), [(np.uint8, 128), (np.int8, -3), (np.int16, 0)])
def test_integers_and_real_numbers_are_converted_to_each_other(
    dtype: type[np.generic], zero_point: int
) -> None:
    real = np.array([-9.0, -0.5, 0.0, 0.26, 9.0], np.float32)

    stored = quantized(real, dtype, 0.5, zero_point)

    assert stored.dtype == dtype
    found = dequantized(stored, 0.5, zero_point)
    np.testing.assert_array_equal(found, np.array([-9.0, -0.5, 0.0, 0.5, 9.0], np.float32))
    far = dequantized(quantized(np.float32([-1e9, 1e9]), dtype, 0.5, zero_point), 0.5, zero_point)
    limits = np.iinfo(dtype)
    np.testing.assert_array_equal(far, 0.5 * (np.array([limits.min, limits.max]) - zero_point))


def test_values_outside_the_calibrated_range_are_clipped_and_do_not_wrap_around(
    rows: Program, rows_file: Path, samples: Path, tmp_path: Path
) -> None:
    path = tmp_path / "quantized.tflite"
    quantize(rows_file, path, recipe("w8a8", ALL), {"rows": {"x": samples}})
    run = runner(path, rows.spec).run
    x = np.load(samples)[3]

    far, farther = (run({"x": np.sign(x) * np.float32(value)})["y"] for value in (1e2, 1e4))

    np.testing.assert_array_equal(far, farther)


@pytest.mark.parametrize("precision", ["fp16", "w8"])
def test_quantization_without_calibration_makes_the_file_smaller_and_keeps_the_values(
    precision: str, rows: Program, rows_file: Path, samples: Path, tmp_path: Path
) -> None:
    path = tmp_path / "quantized.tflite"
    quantize(rows_file, path, recipe(precision))
    x = np.load(samples)[0]

    expected, found = (runner(p, rows.spec).run({"x": x})["y"] for p in (rows_file, path))

    assert path.stat().st_size < 0.75 * rows_file.stat().st_size
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    assert (found != expected).any()


def test_only_linear_operators_are_quantized_unless_all_are_asked_for() -> None:
    assert [step["operation"] for step in recipe("w8a8")] == list(LINEAR)
    assert [step["operation"] for step in recipe("w8a8", ALL)] == ["*"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "word"),
    [
        (("x", "other"), ("y",), "'other' is only in the manifest"),
        (("x",), ("y", "z"), "'z' is only in the manifest"),
        ((), ("y",), "'x' is only in the file"),
    ],
)
def test_a_file_with_other_names_is_not_loaded(
    inputs: tuple[str, ...], outputs: tuple[str, ...], word: str, rows_file: Path
) -> None:
    shape = (1, 3, 64)
    spec = ProgramSpec(
        "rows",
        tuple(TensorSpec(name, shape) for name in inputs),
        tuple(TensorSpec(name, shape) for name in outputs),
    )

    with pytest.raises(BundleError, match="another signature") as failed:
        runner(rows_file, spec)

    assert word in failed.value.why


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool"])
def test_a_file_of_another_dtype_is_not_loaded(dtype: str, rows: Program, rows_file: Path) -> None:
    spec = ProgramSpec("rows", (TensorSpec("x", (1, 3, 64), dtype),), rows.spec.outputs)

    with pytest.raises(BundleError, match="another signature") as failed:
        runner(rows_file, spec)

    assert dtype in failed.value.why


def test_a_program_without_a_signature_is_found_by_position(rows: Program, rows_file: Path) -> None:
    """Files of other converters have no signature, or one with another name."""
    renamed = ProgramSpec(
        "encoder", (TensorSpec("mel", (1, 3, 64)),), (TensorSpec("features", (1, 3, 64)),)
    )
    x = np.ones((1, 3, 64), np.float32)

    found = runner(rows_file, renamed).run({"mel": x})["features"]

    np.testing.assert_array_equal(found, runner(rows_file, rows.spec).run({"x": x})["y"])


# Signatures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [0, 3, 40, 400, 2000])
def test_a_cut_file_has_no_signatures(end: int, rows_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.tflite"
    path.write_bytes(rows_file.read_bytes()[:end])

    with pytest.raises(ProgramError, match="damaged"):
        read_signatures(path)


def test_changed_bytes_never_raise_anything_but_a_program_error(
    rows_file: Path, tmp_path: Path
) -> None:
    whole, path = rows_file.read_bytes(), tmp_path / "changed.tflite"
    random, refused = np.random.default_rng(0), 0

    for _ in range(200):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 40):
            data[place] = random.integers(256)
        path.write_bytes(data)
        try:
            read_signatures(path)
        except ProgramError:
            refused += 1

    assert refused


# An encoder with a massive channel in static 8 bits: one output in another precision repairs it.

RUINED_DB, REPAIRED_DB = 13.0, 20.0  # the most that was measured as ruined: 12.1, early-tail, AVX2


@pytest.fixture(scope="module", params=core_or_all(NAMES[-1:], NAMES))
def name(request: pytest.FixtureRequest) -> str:
    """A stored checkpoint with a massive channel."""
    return str(request.param)


@pytest.fixture(scope="module")
def mels() -> np.ndarray:
    """(3, 1, 80, 3000): two clips to calibrate with, and one to measure."""
    clips = [load_audio(clip.path) for clip in shipped_audio()[:3]]
    return np.stack([log_mel(clip, 80, n_frames=3000)[None] for clip in clips])


@pytest.fixture(scope="module")
def lowered(
    name: str, mels: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ProgramSpec, Mapping[str, Path]]:
    """Its encoder as a .tflite file in float32, and the calibration set."""
    folder = tmp_path_factory.mktemp("sensitive")
    checkpoint = load_checkpoint(outlier_checkpoint(name, run_folder(tmp_path_factory)))
    (encoder,) = whisper_programs(Parts(build_model(checkpoint), []), ["encoder"])
    lower_to_tflite([encoder], folder / "encoder.tflite", target="litert", extra="litert-export")
    np.save(folder / "mel.npy", mels[:2])
    return folder / "encoder.tflite", encoder.spec, {"mel": folder / "mel.npy"}


def features(path: Path, spec: ProgramSpec, mel: np.ndarray) -> np.ndarray:
    runner = TfliteRunner(spec, TfliteFile(path, 1, extra="litert"))
    return np.array(runner.run({"mel": mel})["features"][0])


@pytest.mark.skipif(not EVERYTHING, reason="make test-all: as on ONNX Runtime")
def test_naive_8_bits_ruin_it_and_the_planted_output_in_another_precision_repairs_it(
    name: str,
    lowered: tuple[Path, ProgramSpec, Mapping[str, Path]],
    mels: np.ndarray,
    tmp_path: Path,
) -> None:
    source, spec, arrays = lowered
    expected = features(source, spec, mels[2])
    planted = planted_in(STORED / f"{name}.xz")
    sqnr, sizes, notes = {}, {}, {}
    for other in ("", "w8", "w8a16", "fp32"):
        exceptions = dict.fromkeys(LINEAR, other) if other else {}
        path = tmp_path / f"{other}.tflite"
        path.write_bytes(source.read_bytes())
        notes[other] = quantize_statically(
            path,
            spec,
            "w8a8",
            arrays,
            sensitive_in=exceptions,
            target="litert",
            extra="litert-export",
        )
        sqnr[other] = loss_of(features(path, spec, mels[2]), expected).sqnr_db
        sizes[other] = path.stat().st_size

    assert sqnr.pop("") < RUINED_DB
    assert notes.pop("") == ()
    assert min(sqnr.values()) > REPAIRED_DB, sqnr
    assert sizes["w8"] < 1.01 * sizes[""]
    place = f"{planted.name.removeprefix('encoder.')}.mlp.2"
    for other, (note,) in notes.items():
        assert note.startswith(f"in {other} instead: {place}: channel {planted.channel} reaches ")


def test_attention_keeps_its_probabilities_in_float_and_the_scores_are_in_8_bits(
    lowered: tuple[Path, ProgramSpec, Mapping[str, Path]], mels: np.ndarray, tmp_path: Path
) -> None:
    source, spec, arrays = lowered
    expected = features(source, spec, mels[2])
    sqnr, notes = {}, {}
    for name, in_attention in (("float", {"BATCH_MATMUL": "fp32"}), ("8 bits", {})):
        path = tmp_path / f"{name}.tflite"
        path.write_bytes(source.read_bytes())
        notes[name] = quantize_statically(
            path,
            spec,
            "w8a8",
            arrays,
            operators=MATMUL,
            sensitive_in={**dict.fromkeys(LINEAR, "w8"), **in_attention},
            target="litert",
            extra="litert-export",
        )
        sqnr[name] = loss_of(features(path, spec, mels[2]), expected).sqnr_db

    exceptions = [note for note in notes["float"] if "attn" in note]
    assert sqnr["8 bits"] < RUINED_DB
    assert sqnr["float"] > REPAIRED_DB
    assert [note.split(": ")[1] for note in exceptions] == [
        f"blocks.{block}.attn, probabilities times values" for block in range(4)
    ]
