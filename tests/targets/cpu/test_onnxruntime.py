"""The target `onnxruntime`: files that store weights once, its precision `w8`, and threads."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError, LoweringError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.trial import eager_outputs, random_inputs
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.model.trace.whisper import step as step_program
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.speech.audio import load_audio, log_mel
from whisperport.system.machine import usable_cores
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.onnxruntime import OPSETS, LowerOptions
from whisperport.targets.onnx import runner as onnx_runner
from whisperport.verification.array_comparison import compare
from whisperport.verification.clips import shipped_audio
from whisperport.verification.loss import loss_of
from whisperport.verification.tolerances import GATES

from ...conftest import noise_clips
from ...embedded import default_bundle
from ...extent import EVERYTHING, core_or_all
from ...outlier_checkpoints import NAMES, STORED, outlier_checkpoint, planted_in
from ...shared_exports import run_folder

# ONNX files that store weights once, and sessions that use the given options.

ORT = get_target("onnxruntime")


@pytest.fixture(scope="module")
def step(micro_checkpoint: Any) -> Program:
    return step_program(Parts(build_model(micro_checkpoint), [(0, 0)])).traced()


@pytest.fixture(scope="module")
def bundle(exported: Callable[[str], Bundle]) -> Bundle:
    return exported("onnxruntime")


def test_every_weight_is_stored_once_for_all_programs(bundle: Bundle, tiny_checkpoint: Any) -> None:
    weights = tiny_checkpoint.weights.values()
    large = [w for w in weights if w.numel() * w.element_size() >= 1024]
    # The embedding is once the projection to the vocabulary; token lookup is the host's.
    total = sum(w.numel() * w.element_size() for w in large)

    size = (bundle.folder / "onnxruntime/weights.bin").stat().st_size

    assert size < 1.02 * total + 4096 * len(large)


def test_graphs_hold_no_weights_and_no_paths_of_the_build_machine(bundle: Bundle) -> None:
    for entry in bundle.manifest.programs:
        file = bundle.folder / entry.files[0]
        data = file.read_bytes()

        assert len(data) < 200_000
        for leak in (b"site-packages", b"/src/", b"whisperport", str(Path.home()).encode()):
            assert leak not in data


def test_graphs_are_valid_and_of_the_opset_that_is_stated(bundle: Bundle) -> None:
    for entry in bundle.manifest.programs:
        file = bundle.folder / entry.files[0]

        onnx.checker.check_model(str(file), full_check=True)

        model = onnx.load(str(file), load_external_data=False)
        opsets = {o.domain: o.version for o in model.opset_import}
        assert opsets[""] == entry.facts.target_facts["opset"]
        assert [i.name for i in model.graph.input] == [t.name for t in entry.spec.inputs]
        assert [o.name for o in model.graph.output] == [t.name for t in entry.spec.outputs]


@pytest.mark.skipif(not EVERYTHING, reason="an export; run make test-all")
def test_a_bundle_of_another_opset_is_verified_and_of_that_opset_throughout(
    micro_checkpoint: Any, quick_tracing: None, tmp_path: Path
) -> None:
    clips = tuple(replace(clip, samples=clip.samples[:3200]) for clip in noise_clips())  # a window
    how = ExportOptions(options={"onnxruntime.opset": "13"}, clips=clips, run=RunOptions(threads=1))

    older = export(micro_checkpoint, "onnxruntime", tmp_path / "13", how)

    assert older.manifest.verified
    for entry in older.manifest.programs:
        model = onnx.load(str(older.folder / entry.files[0]), load_external_data=False)
        assert {o.domain: o.version for o in model.opset_import} == {"": 13}
        assert entry.facts.target_facts["opset"] == 13


@pytest.mark.parametrize("opset", core_or_all(OPSETS[:1], OPSETS))
def test_every_opset_computes_what_torch_does(opset: int, step: Program, tmp_path: Path) -> None:
    target = ORT.configured(LowerOptions(opset=opset))
    (entry,) = target.lower([step], tmp_path)
    inputs = random_inputs(step, 0)

    runner = target.load(tmp_path, [entry], RunOptions(threads=1))["step"]
    found = runner.run({t.name: x.numpy() for t, x in zip(step.spec.inputs, inputs, strict=True)})

    model = onnx.load(str(tmp_path / entry.files[0]), load_external_data=False)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
    for array, expected in zip(found.values(), eager_outputs(step, inputs), strict=True):
        np.testing.assert_allclose(array, expected.numpy(), atol=1e-4, rtol=0)


def test_the_opsets_are_those_that_are_written() -> None:
    from whisperport.model.trace.onnx_opset import NEWEST, OLDEST

    assert (OPSETS[0], OPSETS[-1]) == (OLDEST, NEWEST)


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_asked_for(bundle: Bundle, threads: int) -> None:
    runners = ORT.load(bundle.folder, bundle.manifest.programs, RunOptions(threads=threads))

    sessions = [runner._session.get_session_options() for runner in runners.values()]  # type: ignore[attr-defined]
    assert {options.intra_op_num_threads for options in sessions} == {threads}


def test_a_provider_that_is_not_installed_lists_those_that_are(bundle: Bundle) -> None:
    options = RunOptions(options={"onnxruntime.provider": "NeuronExecutionProvider"})

    with pytest.raises(LoweringError, match="NeuronExecutionProvider") as refused:
        ORT.load(bundle.folder, bundle.manifest.programs, options)

    assert "CPUExecutionProvider" in refused.value.why


def test_inputs_may_be_read_only(bundle: Bundle) -> None:
    """Read-only, as arrays that are mapped from disk."""
    entry = bundle.manifest.program("cross_kv")
    features = np.ones(entry.spec.inputs[0].shape, np.float32)
    features.setflags(write=False)

    outputs = ORT.load(bundle.folder, [entry], RunOptions(threads=1))["cross_kv"].run(
        {"features": features}
    )

    assert len(outputs) == len(entry.spec.outputs)


def test_outputs_are_written_to_given_arrays(bundle: Bundle) -> None:
    """Parts of larger arrays, as the rows of a batch."""
    entry = bundle.manifest.program("cross_kv")
    runner = ORT.load(bundle.folder, [entry], RunOptions(threads=1))["cross_kv"]
    random = np.random.default_rng(0)
    features = random.standard_normal(entry.spec.inputs[0].shape).astype(np.float32)
    whole = {t.name: np.full((3, *t.shape), 7, np.float32) for t in entry.spec.outputs}

    runner.run_into({"features": features}, {name: array[1] for name, array in whole.items()})

    assert runner.writes_in_place
    for name, expected in runner.run({"features": features}).items():
        np.testing.assert_array_equal(whole[name][1], expected)
        assert (whole[name][[0, 2]] == 7).all()


def test_arrays_that_are_not_contiguous_are_rejected_as_outputs(bundle: Bundle) -> None:
    entry = bundle.manifest.program("cross_kv")
    runner = ORT.load(bundle.folder, [entry], RunOptions(threads=1))["cross_kv"]
    features = np.zeros(entry.spec.inputs[0].shape, np.float32)
    apart = {t.name: np.zeros((*t.shape, 2), np.float32)[..., 0] for t in entry.spec.outputs}

    with pytest.raises(ValueError, match="another form"):
        runner.run_into({"features": features}, apart)


# The precision `w8a8` of the target `onnxruntime`, on an encoder with a massive channel.


NAME = NAMES[-1]  # of the stored checkpoint
RUINED_DB, REPAIRED_DB = 12.0, 20.0
BLOCKS = 4

Quantized = Callable[[LowerOptions | None, Path], ProgramEntry]


@pytest.fixture(scope="module")
def mels() -> np.ndarray:
    """(3, 1, 80, 3000): two clips to calibrate with, and one to measure."""
    clips = [load_audio(clip.path) for clip in shipped_audio()[:3]]
    return np.stack([log_mel(clip, 80, n_frames=3000)[None] for clip in clips])


@pytest.fixture(scope="module")
def quantized(mels: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """Lowers the encoder into a folder, and quantizes it with some options; None: it stays in float32."""
    checkpoint = load_checkpoint(outlier_checkpoint(NAME, run_folder(tmp_path_factory)))
    (encoder,) = whisper_programs(Parts(build_model(checkpoint), []), ["encoder"])
    samples = tmp_path_factory.mktemp("samples") / "mel.npy"
    np.save(samples, mels[:2])

    def make(options: LowerOptions | None, folder: Path) -> ProgramEntry:
        target = get_target("onnxruntime")
        if options is None:
            return target.lower([encoder], folder)[0]
        target = target.configured(options).with_precisions({"encoder": "w8a8"})
        (entry,) = target.lower([encoder], folder)
        assert target.calibration(encoder.spec, "w8a8") is not None
        return target.quantize(entry, folder, {"mel": samples})

    return make


def features(folder: Path, entry: ProgramEntry, mel: np.ndarray) -> np.ndarray:
    runner = get_target("onnxruntime").load(folder, [entry], RunOptions(threads=1))["encoder"]
    return np.array(runner.run({"mel": mel})["features"][0])


def test_naive_8_bits_ruin_it_and_exceptions_repair_it(
    quantized: Quantized, mels: np.ndarray, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("float", "naive", "repaired")}
    for folder in folders.values():
        folder.mkdir()
    naive = quantized(LowerOptions(sensitive="as-others"), folders["naive"])
    repaired = quantized(LowerOptions(), folders["repaired"])
    expected = features(folders["float"], quantized(None, folders["float"]), mels[2])

    sqnr = {
        entry: loss_of(features(folders[entry], made, mels[2]), expected).sqnr_db
        for entry, made in (("naive", naive), ("repaired", repaired))
    }

    assert sqnr["naive"] < RUINED_DB
    assert sqnr["repaired"] > REPAIRED_DB
    assert naive.facts.notes == ()
    planted = planted_in(STORED / f"{NAME}.xz")
    (note,) = [one for one in repaired.facts.notes if one.startswith("in w8 instead: ")]
    assert f"Gelu of {planted.name.removeprefix('encoder.')}.mlp.0: " in note
    in_float = [one for one in repaired.facts.notes if one.startswith("in fp32 instead: ")]
    assert 0 < len(in_float) <= BLOCKS
    assert all("Softmax of " in one for one in in_float)
    assert repaired.files == ("onnxruntime/encoder.onnx", "onnxruntime/encoder.bin")
    assert {file.name for file in (folders["repaired"] / "onnxruntime").iterdir()} == {
        *("encoder.bin", "encoder.onnx", "weights.bin")
    }
    model = onnx.load(str(folders["repaired"] / repaired.files[0]), load_external_data=False)
    matrices = [one for one in model.graph.initializer if len(one.dims) > 1]
    in_8_bits = [one for one in matrices if one.data_type == onnx.TensorProto.UINT8]
    assert len(in_8_bits) == 2 + 6 * BLOCKS  # two convolutions, and six linears in each block
    operators = _executed(folders["repaired"], repaired)
    assert operators["MatMulNBits"] == 1
    assert operators["FusedMatMul"] + operators["MatMul"] == len(
        in_float
    )  # probabilities times values
    assert operators["Gemm"] + operators["Conv"] == 0


def _executed(folder: Path, entry: ProgramEntry) -> Mapping[str, int]:
    """Return how often ONNX Runtime executes each operator, after its own changes of the graph."""
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(folder / "executed.onnx")
    settings.log_severity_level = 3
    onnxruntime.InferenceSession(str(folder / entry.files[0]), settings)
    model = onnx.load(str(folder / "executed.onnx"), load_external_data=False)
    return Counter(node.op_type for node in model.graph.node)


# The precision `w8` of the target `onnxruntime`: weights in 8 bits, once in the file of all programs.

WEIGHTS = "onnxruntime/weights.bin"
X = np.random.default_rng(0).standard_normal((1, 3, 128)).astype(np.float32)


class Projections(nn.Module):
    """Linears with and without bias, and a product of two inputs, which has no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.narrow = nn.Linear(128, 8)  # stays in float32: it is small

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second(torch.relu(self.first(x)))
        return y @ x.transpose(1, 2), self.narrow(y)


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    """Two programs of the same weights, whose output channels have scales from 0.01 to 10."""
    torch.manual_seed(0)
    module = Projections().eval()
    with torch.no_grad():
        module.first.weight *= torch.logspace(-2, 1, 256)[:, None]
    return [
        trace(name, module, (torch.zeros(1, rows, 128),), ["scores", "narrow"])
        for name, rows in (("three", 3), ("seven", 7))
    ]


def lowered(
    programs: list[Program], folder: Path, precision: str, opset: int = OPSETS[-1]
) -> list[ProgramEntry]:
    target = ORT.configured(LowerOptions(opset=opset))
    chosen = target.with_precisions({program.name: precision for program in programs})
    return chosen.lower(programs, folder)


def run(folder: Path, entry: ProgramEntry) -> dict[str, Any]:
    return ORT.load(folder, [entry], RunOptions(threads=1))[entry.spec.name].run({"x": X})


@pytest.mark.parametrize("opset", core_or_all(OPSETS[:1], OPSETS))
def test_every_opset_computes_what_float32_does_within_the_tolerance(
    opset: int, programs: list[Program], tmp_path: Path
) -> None:
    entries = lowered(programs, tmp_path, "w8", opset)

    found = run(tmp_path, entries[0])

    with torch.no_grad():
        expected = programs[0].exported.module(check_guards=False)(torch.from_numpy(X))
    for array, exact in zip(found.values(), expected, strict=True):
        assert compare("y", array, exact.numpy(), GATES["w8"])
    assert [entry.precision for entry in entries] == ["w8", "w8"]


def test_weights_are_stored_once_in_a_byte_and_an_eighth(
    programs: list[Program], tmp_path: Path
) -> None:
    (tmp_path / "8").mkdir()
    (tmp_path / "32").mkdir()

    entries = lowered(programs, tmp_path / "8", "w8")
    lowered(programs, tmp_path / "32", "fp32")

    # A byte per weight and 4 for each 32 of them; the narrow weight and the biases stay as they are.
    sizes = [(tmp_path / folder / WEIGHTS).stat().st_size for folder in ("8", "32")]
    assert sizes[0] < 0.32 * sizes[1]
    for entry in entries:
        nodes = [node.op_type for node in _model(tmp_path / "8", entry).graph.node]
        assert nodes.count("MatMulNBits") == 2


def test_float32_is_the_default_and_has_no_operator_of_onnx_runtime(
    programs: list[Program], tmp_path: Path
) -> None:
    (entry, _) = ORT.lower(programs, tmp_path)

    assert entry.precision == "fp32"
    assert {opset.domain for opset in _model(tmp_path, entry).opset_import} == {""}


@pytest.mark.parametrize("part", ["_8bits", "_scales"])
def test_a_weight_or_scale_of_another_size_is_a_damaged_bundle(
    part: str, programs: list[Program], tmp_path: Path
) -> None:
    (entry, _) = lowered(programs, tmp_path, "w8")
    model = _model(tmp_path, entry)
    tensor = next(one for one in model.graph.initializer if one.name.endswith(part))
    tensor.dims[0] //= 2
    length = next(one for one in tensor.external_data if one.key == "length")
    length.value = str(int(length.value) // 2)
    (tmp_path / entry.files[0]).write_bytes(model.SerializeToString())

    with pytest.raises(BundleError):
        run(tmp_path, entry)


@pytest.mark.parametrize("value", [np.nan, 1e30, 0.0])
def test_scales_with_wrong_values_fail_the_comparison(
    value: float, programs: list[Program], tmp_path: Path
) -> None:
    (entry, _) = lowered(programs, tmp_path, "w8")
    exact = run(tmp_path, entry)["narrow"]
    model = _model(tmp_path, entry)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_scales"):
            damaged = np.full(tensor.dims, value, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(damaged, tensor.name))
    (tmp_path / entry.files[0]).write_bytes(model.SerializeToString())

    found = run(tmp_path, entry)["narrow"]

    assert not compare("narrow", found, exact, GATES["w8"])


def _model(folder: Path, entry: ProgramEntry) -> Any:
    return onnx.load(str(folder / entry.files[0]), load_external_data=False)


# The run options of the CPU threads of the decoder's programs.


@pytest.fixture(scope="module")
def entries():
    names = ("encoder", "cross_kv", "step")
    return [e for e in Bundle.open(default_bundle()).manifest.programs if e.spec.name in names]


def settings_of(entries, threads=None, **options):
    named = {f"onnxruntime.{name.replace('_', '-')}": text for name, text in options.items()}
    run = RunOptions(threads=threads, options=named)
    runners = get_target("onnxruntime").load(default_bundle(), entries, run)
    return {name: runner._session.get_session_options() for name, runner in runners.items()}


def threads_of(entries, threads=None, **options):
    found = settings_of(entries, threads, **options)
    return {name: settings.intra_op_num_threads for name, settings in found.items()}


def spins(entries, **options):
    """Name of a program -> how long its threads wait actively, in microseconds; "": until there is work."""
    found = {}
    for name, settings in settings_of(entries, 1, **options).items():
        allowed = settings.get_session_config_entry("session.intra_op.allow_spinning") == "1"
        try:
            spun = settings.get_session_config_entry("session.intra_op.spin_duration_us")
        except RuntimeError:  # not set
            spun = ""
        found[name] = spun if allowed else "0"
    return found


def test_the_decoder_has_its_own_number_of_threads(entries):
    assert threads_of(entries, 2, decoder_threads="1") == {"encoder": 2, "cross_kv": 1, "step": 1}
    assert threads_of(entries, None, decoder_threads="1")["encoder"] == usable_cores()
    assert threads_of(entries, 2) == {"encoder": 2, "cross_kv": 2, "step": 2}


def test_threads_wait_actively_for_long_on_request_and_never_those_of_the_encoder(entries):
    assert spins(entries) == {"encoder": "20", "cross_kv": "20", "step": "20"}
    assert spins(entries, spin="on") == {"encoder": "20", "cross_kv": "", "step": ""}


def test_threads_of_older_versions_never_wait_actively(entries, monkeypatch):
    """They would do so until there is work: the number of microseconds is unknown to them."""
    monkeypatch.setattr(onnx_runner, "BRIEF_SPIN_SINCE", (99, 0))

    assert spins(entries) == {"encoder": "0", "cross_kv": "0", "step": "0"}
