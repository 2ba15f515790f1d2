"""The target `openvino`: its files, precisions and devices, and when and how it runs programs."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from openvino import opset13
from torch import Tensor, nn

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError, LoweringError, UsageError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import ProgramEntry
from whisperport.program.profiling import ProfileOptions
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import DecodeOptions, Decoder, decode_together, decode_window, load_engine
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.openvino import target as openvino_target
from whisperport.targets.cpu.openvino.audio_length import with_any_audio
from whisperport.targets.cpu.openvino.runtime import Device, OpenVinoRunner, start
from whisperport.targets.cpu.openvino.target import DeviceOptions
from whisperport.verification.array_comparison import compare
from whisperport.verification.clips import Clip
from whisperport.verification.tolerances import GATES

from ...extent import EVERYTHING
from ...micro import DIMS

OPENVINO = get_target("openvino")
ONE_THREAD = RunOptions(threads=1)
X = np.random.default_rng(0).standard_normal((1, 128)).astype(np.float32)

INTERRUPTED = """
import os, signal, sys
from whisperport.targets.cpu.openvino import target as openvino_target
from whisperport.targets.cpu.openvino.runtime import Device, start

first, second = start(Device()), start(Device())
loaded = [core.compile_model(core.read_model(*sys.argv[1:]), "CPU") for core in (first, second)]
del loaded[0], first
del loaded[0], second
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""


class Products(nn.Module):
    """Products of both orders: x·wᵀ, and a weight as the first factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)
        self.first = nn.Parameter(torch.randn(64, 128))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first @ torch.relu(self.linear(x)).transpose(0, 1)).transpose(0, 1)


@pytest.fixture(scope="module")
def products() -> Program:
    """A program whose channels have very different scales, in float16 values."""
    torch.manual_seed(0)
    module = Products()
    with torch.no_grad():
        module.linear.weight *= torch.logspace(-2, 1, 128)[:, None]
        for parameter in module.parameters():
            parameter.copy_(parameter.half().float())
    return trace("products", module, (torch.zeros(1, 128),), ["y"])


@pytest.fixture(scope="module")
def lowered(
    products: Program, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, ProgramEntry]]:
    """Precision -> the folder and the entry of the program; do not write to the folders."""
    found = {}
    for precision in OPENVINO.spec.runs.precisions:
        folder = tmp_path_factory.mktemp(precision)
        target = OPENVINO.with_precisions({"products": precision})
        (entry,) = target.lower([products], folder)
        found[precision] = folder, entry
    return found


@pytest.fixture(scope="module")
def expected(products: Program) -> np.ndarray:
    with torch.no_grad():
        return products.exported.module(check_guards=False)(torch.from_numpy(X)).numpy()


def run(folder: Path, entry: ProgramEntry, options: RunOptions = ONE_THREAD) -> np.ndarray:
    return OPENVINO.load(folder, [entry], options)[entry.spec.name].run({"x": X})["y"]


def test_fp16_keeps_results_of_float16_values(lowered, expected) -> None:
    # Sums of 128 products in float32, in another order; bfloat16 would differ by 1e-3.
    for precision in ("fp32", "fp16"):
        found = run(*lowered[precision])
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("precision", "smallest", "largest"),
    [("fp16", 0.45, 0.55), ("w8", 0.2, 0.3), ("bf16", 0.45, 0.55)],
)
def test_a_precision_has_smaller_weights_and_results_within_its_tolerance(
    lowered, expected, precision: str, smallest: float, largest: float
) -> None:
    sizes = {p: (folder / entry.files[1]).stat().st_size for p, (folder, entry) in lowered.items()}

    found = run(*lowered[precision])

    assert smallest < sizes[precision] / sizes["fp32"] < largest
    # In w8, one scale for a complete weight would lose the small channels: 0.01 to 10 here.
    assert compare("y", found, expected, GATES[precision])
    assert lowered[precision][1].precision == precision


@pytest.mark.parametrize(
    ("capabilities", "precision", "asked_for"),
    [
        (["FP32", "BF16"], "bf16", "bf16"),
        (["FP32", "BF16"], "fp16", "f32"),
        (["FP32", "BF16"], "fp32", "f32"),
        (["FP32", "FP16"], "bf16", "f32"),  # without its instructions, bfloat16 is only less exact
    ],
)
def test_bfloat16_is_asked_for_where_the_program_is_in_it_and_the_device_has_it(
    lowered, monkeypatch: pytest.MonkeyPatch, capabilities, precision: str, asked_for: str
) -> None:
    def of_device(device: str, name: str) -> list[str]:
        assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
        return capabilities

    folder, entry = lowered[precision]
    core = SimpleNamespace(read_model=start(Device()).read_model, get_property=of_device)
    monkeypatch.setattr(openvino_target, "start", lambda _: core)
    core.compile_model = lambda _model, _device, properties: properties

    runner = OPENVINO.load(folder, [entry], ONE_THREAD)["products"]

    assert runner._compiled["INFERENCE_PRECISION_HINT"] == asked_for


def test_equal_weights_of_several_programs_are_stored_once(
    products: Program, lowered, tmp_path: Path
) -> None:
    folder, alone = lowered["fp32"]
    same = replace(products, spec=replace(products.spec, name="same"))

    entries = OPENVINO.lower([products, same], tmp_path)

    assert {entry.files[1] for entry in entries} == {alone.files[1]}
    size = (tmp_path / alone.files[1]).stat().st_size
    assert size == (folder / alone.files[1]).stat().st_size


def test_a_single_file_is_read_without_whisperport(products: Program, tmp_path: Path) -> None:
    entry, facts = OPENVINO.lower_file(products, tmp_path / "any.xml")

    assert entry.files == ("any.xml", "any.bin")
    assert facts["delegated"] > 0
    path = tmp_path / entry.files[0]
    measured = OPENVINO.profiler.profile([path], ProfileOptions(repeat=1, threads=1))
    assert measured.nodes


class Counting:
    """An `openvino.Core` that counts what is compiled."""

    def __init__(self, core: Any) -> None:
        self._core, self.compiled = core, 0

    def read_model(self, *files: Path) -> Any:
        return self._core.read_model(*files)

    def compile_model(self, *arguments: Any) -> Any:
        self.compiled += 1
        return self._core.compile_model(*arguments)


@pytest.fixture
def counted(lowered) -> tuple[Counting, Runner]:
    folder, entry = lowered["fp32"]
    device = Device(threads=1, streams=2)
    core = Counting(start(device))
    files = (folder / file for file in entry.files)
    return core, OpenVinoRunner(core, entry.spec, *files, device, device.properties())


def test_a_program_is_compiled_once_at_its_first_run(counted) -> None:
    core, runner = counted
    assert core.compiled == 0

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: runner.run({"x": X})["y"], range(16)))

    assert core.compiled == 1
    for one in found:
        np.testing.assert_array_equal(one, found[0])


def test_threads_that_run_a_program_at_the_same_time_keep_their_inputs_apart(counted) -> None:
    _, runner = counted
    inputs = [X * factor for factor in range(8)]
    alone = [runner.run({"x": x})["y"] for x in inputs]

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda x: runner.run({"x": x})["y"], inputs * 4))

    for found, right in zip(together, alone * 4, strict=True):
        np.testing.assert_array_equal(found, right)


def test_a_read_only_array_is_read(counted) -> None:
    _, runner = counted
    fixed = X.copy()
    fixed.flags.writeable = False

    np.testing.assert_array_equal(runner.run({"x": fixed})["y"], runner.run({"x": X})["y"])


def test_an_interrupt_after_two_loads_is_no_segmentation_fault(lowered) -> None:
    # A second `openvino.Core` that outlives the first leaves the thread a signal stack that is not mapped.
    folder, entry = lowered["fp32"]
    files = [str(folder / file) for file in entry.files]

    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *files], capture_output=True, text=True, check=False
    )

    assert (ran.returncode, ran.stdout) == (0, "KeyboardInterrupt\n")


def test_a_device_that_is_absent_is_named(lowered) -> None:
    folder, entry = lowered["fp32"]
    options = RunOptions(options={"openvino.device": "GPU.7"})

    with pytest.raises(LoweringError, match=r"no device `GPU\.7`") as absent:
        OPENVINO.load(folder, [entry], options)

    assert "CPU" in absent.value.why


@pytest.mark.parametrize("device", ["cpu", "TPU", "AUTO:GPU,CPU", "GPU.", "CPU\n"])
def test_a_name_that_is_no_device_of_openvino_is_a_usage_error(device: str) -> None:
    with pytest.raises(UsageError, match=r"openvino\.device"):
        DeviceOptions(device=device)


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        (("x",), ("y", "z"), "it has 1 inputs and 1 outputs; expected 1 and 2"),
        (("w",), ("y",), "expected `w`"),
        (("x",), ("z",), "expected `z`"),
    ],
)
def test_another_signature_than_the_manifests_is_explained(lowered, inputs, outputs, words) -> None:
    folder, entry = lowered["fp32"]
    spec = ProgramSpec(
        "products",
        tuple(TensorSpec(name, (1, 128)) for name in inputs),
        tuple(TensorSpec(name, (1, 64)) for name in outputs),
    )

    with pytest.raises(BundleError, match="another signature") as other:
        OPENVINO.load(folder, [replace(entry, spec=spec)], ONE_THREAD)

    assert words in other.value.why


def test_a_program_that_lists_no_weights_is_rejected(lowered) -> None:
    folder, entry = lowered["fp32"]

    with pytest.raises(BundleError, match="lists 1 files"):
        OPENVINO.load(folder, [replace(entry, files=entry.files[:1])], ONE_THREAD)


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="exports seven programs; `step_B` is verified there too")
def test_texts_decoded_together_are_those_decoded_alone(
    micro_checkpoint: Any, quick_tracing: None, tmp_path: Path
) -> None:
    hiss = (0.1 * np.random.default_rng(0).standard_normal(3200)).astype(np.float32)
    # OpenVINO 2026.4.1 crashes when it compiles `step_2` of this small model for one thread on a processor
    # with AVX2 only (its snippets; the embedded model's is compiled).
    threads = RunOptions(threads=2)
    options = ExportOptions(batch=2, clips=[Clip("hiss", "so they say", hiss)], run=threads)
    bundle = export(micro_checkpoint, "openvino", tmp_path / "micro", options)
    engine = load_engine(bundle, threads)
    random = np.random.default_rng(0)
    shape = engine.dims.n_mels, engine.dims.n_frames
    features = [engine.encode(random.standard_normal(shape).astype(np.float32)) for _ in range(3)]
    decode = DecodeOptions(language="en", max_tokens=8)

    alone = [decode_window(Decoder(engine), one, decode) for one in features]
    together = decode_together(engine, features, [decode] * 3)

    assert bundle.manifest.verified
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert any(one.tokens for one in alone)


# Audio of any length.


@pytest.fixture(scope="module")
def audio_programs(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The encoder and `cross_kv` of the micro model: the folder and the entries."""
    folder, names = tmp_path_factory.mktemp("audio"), ["encoder", "cross_kv"]
    return folder, OPENVINO.lower(list(whisper_programs(Parts(micro, [(0, 0)]), names)), folder)


@pytest.mark.parametrize("positions", [1, 4, DIMS.n_audio_ctx])
def test_a_short_window_gives_what_torch_computes_with_as_many_positions(
    audio_programs: Any, short_features: Callable[..., np.ndarray], positions: int
) -> None:
    runners = OPENVINO.load(*audio_programs, RunOptions(threads=1, short_windows=True))
    random = np.random.default_rng(0)
    mel = random.standard_normal((1, DIMS.n_mels, 2 * positions)).astype(np.float32)

    features = runners["encoder"].run({"mel": mel})["features"]
    cross_kv = runners["cross_kv"].run({"features": features})

    np.testing.assert_allclose(features, short_features(mel), atol=1e-5)
    for name, array in cross_kv.items():
        assert array.shape[runners["cross_kv"].free_axes[name]] == positions


def test_without_short_windows_a_model_has_one_length(audio_programs: Any) -> None:
    for runner in OPENVINO.load(*audio_programs, ONE_THREAD).values():
        assert not runner.free_axes


def test_a_model_whose_result_does_not_follow_the_audio_stays_static(audio_programs: Any) -> None:
    folder, (entry, _) = audio_programs
    model = start(Device()).read_model(*(folder / file for file in entry.files))
    twice = opset13.concat([model.output(0).get_node().input_value(0)] * 2, 2)
    longer = openvino.Model([opset13.result(twice)], model.get_parameters())
    for changed in (longer, padded(model)):
        assert with_any_audio(changed, entry.spec)[1] == {}


def padded(model: Any) -> Any:
    """The model with a row of zeros after its result."""
    zeros = opset13.constant(np.zeros((1, 1, DIMS.n_audio_state), np.float32))
    source = model.output(0).get_node().input_value(0)
    joined = opset13.concat([source, zeros.output(0)], 1)
    return openvino.Model([opset13.result(joined)], model.get_parameters())
