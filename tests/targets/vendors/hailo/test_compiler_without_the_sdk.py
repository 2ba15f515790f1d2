"""The calls of Hailo's compiler are compared with recorded signatures; the SDK is not installed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from whisperport.errors import BundleError, UsageError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.compiler import CompileRequest
from whisperport.targets.toolchain import Failure, Job, driver, has_unfinished_stages, prepare
from whisperport.targets.vendors.hailo.chips import HAILO8, HAILO8L, HAILO10H
from whisperport.targets.vendors.hailo.compiler import HailoCompiler, check_hef
from whisperport.targets.vendors.hailo.model_script import (
    ScriptOptions,
    SixteenBit,
    model_script,
    samples_needed,
)

from ....micro import whisper_dims
from .fake_sdk import FakeSdk
from .hef_file import encoder_hef, hef_bytes

# The calls of Hailo's compiler are compared with recorded signatures; the SDK is not installed.

STAGES = [
    *("ClientRunner", "translate_onnx_model", "save_har"),
    *("ClientRunner", "load_model_script", "optimize", "save_har"),
    *("ClientRunner", "compile", "save_har"),
]
ENCODER = ProgramSpec(
    "encoder", (TensorSpec("mel", (1, 80, 1, 200)),), (TensorSpec("features", (1, 100, 64)),)
)


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> FakeSdk:
    fake = FakeSdk({"encoder": b"a HEF", "uncached_decoder": b"another HEF"})
    monkeypatch.setitem(sys.modules, "hailo_sdk_client", fake)
    return fake


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return _prepared(tmp_path / "bundle.compile")


def _prepared(
    work: Path,
    spec: ProgramSpec = ENCODER,
    width: int = 384,
    onnx: bytes = b"onnx",
    value: float = 1.0,
    emulated: np.ndarray | None = None,
    sixteen_bit: SixteenBit = "nothing",
) -> Path:
    """Make a work folder as `compile` prepares it for the driver."""
    folder = work / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{spec.name}.onnx").write_bytes(onnx)
    arrays = tuple(f"input_layer{i}.npy" for i in range(1, len(spec.inputs) + 1))
    for array in arrays:
        np.save(folder / array, np.full((2, 1, 8, 3), value, np.float32))
    if emulated is not None:
        np.save(folder / "emulated_input_layer1.npy", emulated)
    compiler = HailoCompiler(HAILO8L)
    plan = compiler.plan(
        CompileRequest(
            spec=spec,
            dims=whisper_dims(width, 4),
            options=ScriptOptions(sixteen_bit=sixteen_bit),
            folder=folder,
            files=(f"{spec.name}.onnx",),
            arrays=arrays,
            samples=2,
            emulation=() if emulated is None else ("emulated_input_layer1.npy",),
        )
    )
    job = Job(name=spec.name, stages=plan.stages, settings=plan.settings)
    prepare(work, compiler.script, compiler.settings(), [job])
    return work


def _run(work: Path) -> list[dict[str, Any]]:
    """Run the driver; return its events."""
    events: list[dict[str, Any]] = []
    driver.run(work, lambda event, **facts: events.append({"event": event, **facts}))
    return events


def _stopped(work: Path) -> dict[str, Any]:
    """Run a job that cannot be finished; return the driver's last event."""
    events: list[dict[str, Any]] = []
    with pytest.raises(driver.StopError):
        driver.run(work, lambda event, **facts: events.append({"event": event, **facts}))
    return events[-1]


def test_without_the_sdk_every_stage_is_called_as_recorded_and_in_order(work, sdk):
    _run(work)
    assert sdk.names() == STAGES
    given = dict(sdk.calls)
    assert given["ClientRunner.translate_onnx_model"]["model_name"] == "encoder"
    assert given["ClientRunner.optimize"]["calib_data"].shape == (2, 1, 8, 3)
    assert [call["hw_arch"] for name, call in sdk.calls if name == "ClientRunner"] == [
        *("hailo8l", None, None)
    ]
    assert (work / "encoder" / "encoder.hef").read_bytes() == b"a HEF"
    for har in ("parsed", "optimized", "compiled"):
        assert (work / "encoder" / f"{har}.har").is_file()


def test_without_the_sdk_a_decoders_set_is_given_by_the_names_of_layers(tmp_path, sdk):
    features, rows = TensorSpec("features", (1, 4, 5)), TensorSpec("embeddings", (1, 5, 2, 1))
    decoder = ProgramSpec(
        "uncached_decoder", (features, rows), (TensorSpec("logits_0", (1, 2, 7)),)
    )

    _run(_prepared(tmp_path / "work", decoder))

    assert set(dict(sdk.calls)["ClientRunner.optimize"]["calib_data"]) == {
        "uncached_decoder/input_layer1",
        "uncached_decoder/input_layer2",
    }


def test_without_the_sdk_the_quantized_program_is_emulated_between_optimizing_and_compiling(
    tmp_path, sdk
):
    work = _prepared(
        tmp_path / "work", onnx=_scaling(), emulated=np.float32([[[[-3, 7]]], [[[1, 2]]]])
    )

    _run(work)

    assert sdk.names() == [
        *STAGES[:7],
        *("ClientRunner", "infer_context", "infer"),
        *STAGES[7:],
    ]
    given = dict(sdk.calls)
    assert given["ClientRunner.infer_context"] == {"inference_context": "quantized"}
    assert given["ClientRunner.infer"]["dataset"].shape == (2, 1, 1, 2)
    made = np.load(work / "encoder" / "emulated_output_features.npy")
    np.testing.assert_allclose(made.reshape(2, 2), [[-6, 14], [2, 4]], atol=14 / 127)
    assert (made != 2 * given["ClientRunner.infer"]["dataset"].reshape(made.shape)).any()


def test_an_emulator_that_fails_names_the_option_that_compiles_without_it(tmp_path, sdk):
    work = _prepared(tmp_path / "work", emulated=np.zeros((1, 1, 1, 2), np.float32))
    sdk.failures["ClientRunner.infer"] = RuntimeError("no TensorFlow")

    failure_event = _stopped(work)

    assert failure_event["stage"] == "emulate"
    failure = Failure(
        kind="failed", message=failure_event["message"], program="encoder", stage="emulate"
    )
    assert "`--option hailo8l.emulate=0`" in HailoCompiler(HAILO8L).explain(failure)[1]
    assert HailoCompiler(HAILO8L).emulation(ENCODER, ScriptOptions(emulate=0)) is None


def test_a_convolution_that_8_bits_ruin_is_found_in_the_parsed_graph_and_has_16_bits(tmp_path, sdk):
    work = _prepared(tmp_path / "work", onnx=_two_convolutions(), sixteen_bit="adds")

    _run(work)

    given = [call for name, call in sdk.calls if name == "ClientRunner.load_model_script"]
    assert given[1] == {
        "script": "quantization_param(conv2, precision_mode=a16_w16)",
        "append": True,
    }


def _two_convolutions() -> bytes:
    """Make an ONNX program of two convolutions; one of the second's four channels is massive."""
    graph = onnx.parser.parse_graph(
        """two (float[1,3,1,8] mel) => (float[1,2,1,8] first, float[1,4,1,8] second)
        <float[2,3,1,1] a = {1,1,1,1,1,1}, float[4,3,1,1] b = {1,1,1,1,1,1,1,1,1,4000,1,1}>
        { [one] first = Conv(mel, a)  [two] second = Conv(mel, b) }"""
    )
    opset = onnx.helper.make_opsetid("", 17)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


def _scaling() -> bytes:
    """Make an ONNX program that doubles its input."""
    node = onnx.helper.make_node("Add", ["x", "x"], ["y"])
    tensors = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2, 1, 1])
        for name in "xy"
    ]
    graph = onnx.helper.make_graph([node], "doubles", tensors[:1], tensors[1:])
    opset = onnx.helper.make_opsetid("", 17)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)
    return model.SerializeToString()


def test_a_missing_sdk_is_reported_and_a_script_does_the_same_elsewhere(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "hailo_sdk_client", None)
    assert _stopped(work)["event"] == "missing"

    # The script alone, with a compiler beside it and nothing of whisperport.
    (work / "hailo_sdk_client.py").write_text(STAND_ALONE)
    packages = [path for path in sys.path if "site-packages" in path]
    done = subprocess.run(
        [sys.executable, "-S", "-c", ALONE, work, *packages],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert "encoder: optimize\n" in done.stdout
    assert done.stdout.endswith("run `whisperport compile` again\n")
    assert (work / "encoder" / "encoder.hef").read_bytes() == b"made alone"
    assert not has_unfinished_stages(work)  # the SDK is not asked for


def test_the_signal_to_noise_ratios_of_its_log_are_read():
    """Two lines of the log in the notebook that the parser cites, and one line from a forum."""
    log = (
        "[info] Output layers signal-to-noise ratio (SNR): measures the quantization noise\n"
        "[info] \twhisper_tiny_encoder/output_layer1 SNR:\t9.179 dB\n"
        "[info] wakeword/output_layer2 SNR: 44.04 dB\n"
    )
    measured = HailoCompiler(HAILO8L).accuracy("optimize", log)
    assert measured == {
        "whisper_tiny_encoder/output_layer1": 9.179,
        "wakeword/output_layer2": 44.04,
    }
    assert HailoCompiler(HAILO8L).accuracy("compile", log) == {}


# What was compiled.


def _check(tmp_path: Path, content: bytes, chip: Any = HAILO8L) -> Any:
    path = tmp_path / "encoder.hef"
    path.write_bytes(content)
    return check_hef(path, chip, ENCODER)


@pytest.mark.parametrize(("architecture", "chip"), [(1, HAILO8L), (103, HAILO8), (3, HAILO10H)])
def test_a_hef_for_another_chip_is_refused(tmp_path, architecture, chip):
    with pytest.raises(BundleError, match="another chip") as refused:
        _check(tmp_path, encoder_hef(architecture), chip)
    assert "`whisperport export CHECKPOINT --target …`" in refused.value.hint
    assert "whisperport compile BUNDLE" in refused.value.hint


@pytest.mark.parametrize("mel", [(1, 200, 80), (200, 1, 80), (200, 80, 1)], ids=str)
@pytest.mark.parametrize("features", [(1, 100, 64), (100, 1, 64), (100, 64, 1)], ids=str)
def test_a_hef_may_have_its_axes_of_length_1_anywhere(tmp_path, mel, features):
    _check(tmp_path, hef_bytes(3, {"net/input_layer1": mel}, {"net/normalization9": features}))


@pytest.mark.parametrize(
    ("mel", "features"),
    [((1, 80, 200), (1, 100, 64)), ((1, 200, 80), (64, 1, 100)), ((2, 100, 80), (1, 100, 64))],
)
def test_a_hef_with_its_values_in_another_order_is_refused_with_the_shapes(tmp_path, mel, features):
    content = hef_bytes(3, {"net/input_layer1": mel}, {"net/normalization9": features})
    with pytest.raises(BundleError, match="does not compute `encoder`") as refused:
        _check(tmp_path, content)
    assert str(mel if mel != (1, 200, 80) else features) in refused.value.why
    assert "(1, 200, 80)" in refused.value.why or "(1, 100, 64)" in refused.value.why


@pytest.mark.parametrize(
    ("layout", "stream", "fits"),
    [
        ((8, 1), (8, 1, 64), True),
        ((1, 8), (1, 8, 64), True),
        ((8, 1), (1, 8, 64), False),  # that HEF adds the positions again
        ((1, 8), (8, 1, 64), False),  # that HEF adds none
    ],
)
@pytest.mark.parametrize("features", [(1, 100, 64), (100, 1, 64)], ids=str)
def test_the_shape_of_the_embeddings_alone_must_be_the_very_one(
    tmp_path, layout, stream, fits, features
):
    decoder = ProgramSpec(
        "uncached_decoder",
        (TensorSpec("features", (1, 100, 64)), TensorSpec("embeddings", (1, 64, *layout))),
        (TensorSpec("logits_0", (1, 8, 70)),),
    )
    inputs = {"net/input_layer1": features, "net/input_layer2": stream}
    path = tmp_path / "uncached_decoder.hef"
    path.write_bytes(hef_bytes(3, inputs, {"net/conv1": (1, 8, 70)}))
    if fits:
        check_hef(path, HAILO8L, decoder)
        return
    with pytest.raises(BundleError, match="does not compute `uncached_decoder`"):
        check_hef(path, HAILO8L, decoder)


ALONE = """
import runpy, sys
sys.path[:0] = sys.argv[1:]
runpy.run_path(sys.argv[1] + "/compile.py", run_name="__main__")
assert "whisperport" not in sys.modules
"""
STAND_ALONE = """
from pathlib import Path
__version__ = "3.31.0"
class ClientRunner:
    def __init__(self, hw_arch=None, har=None): pass
    def translate_onnx_model(self, onnx_path, model_name): pass
    def save_har(self, path): Path(path).write_text(path)
    def load_model_script(self, script): pass
    def optimize(self, calib_data, work_dir=None): assert calib_data.ndim == 4
    def compile(self): return b"made alone"
"""


# Model scripts have the commands of the vendor's scripts; no compiler has read them.

CHIPS = ("hailo8", "hailo8l", "hailo10h")

# hailocs/hailo-whisper@ebe7a85, conversion/optimization/tiny/hailo8l/encoder_model_script_tiny.alls,
# and base/hailo8/decoder_model_script_base_matmul_split.alls, without comments; sorted.
TINY_ENCODER = {
    "model_optimization_flavor(optimization_level=2, compression_level=0)",
    "post_quantization_optimization(finetune, policy=enabled, dataset_size=3340, epochs=6, "
    "learning_rate=0.00001, batch_size=8)",
    "pre_quantization_optimization(ew_add_fusing, policy=disabled)",
    "pre_quantization_optimization(matmul_correction, layers={matmul*}, "
    "correction_type=zp_comp_block)",
    "model_optimization_config(calibration, batch_size=8, calibset_size=1024)",
    "quantization_param({ew_add*}, precision_mode=a16_w16)",
    "quantization_param(ew_add1, precision_mode=a8_w8)",
    "pre_quantization_optimization(matmul_equalization, layers={matmul*}, matmul_bias=enabled)",
    "performance_param(optimize_for_batch=1)",
    "model_optimization_config(checker_cfg, policy=enabled)",
}
TINY_CONVS = {4, 6, 8, 10, 12, 14, 16, 18, 5, 9, 13, 17}
BASE_DECODER = {
    "model_optimization_flavor(optimization_level=2, compression_level=0)",
    "model_optimization_config(calibration, batch_size=4, calibset_size=256)",
    "post_quantization_optimization(finetune, policy=enabled, dataset_size=1024, epochs=4, "
    "learning_rate=0.00001)",
    "model_optimization_config(checker_cfg, policy=enabled)",
    "quantization_param({ew_add*}, precision_mode=a16_w16)",
    "performance_param(optimize_for_batch=1)",
    "resources_param(max_utilization=0.8)",
}


def _convs(layers: set[int]) -> set[str]:
    return {f"quantization_param(conv{n}, precision_mode=a16_w16)" for n in layers}


def _lines(*arguments: object, **options: object) -> set[str]:
    lines = model_script(*arguments, **options).splitlines()
    assert len(set(lines)) == len(lines)
    return set(lines)


def test_the_script_of_tinys_encoder_holds_the_vendors_commands_but_for_single_layers():
    assert _lines("hailo8l", 384) == TINY_ENCODER


def test_the_published_layers_are_named_only_if_asked_for():
    options = ScriptOptions(sixteen_bit="published-layers")
    assert _lines("hailo8l", 384, options) == TINY_ENCODER | _convs(TINY_CONVS)
    assert _lines("hailo8l", 512, options) >= _convs(TINY_CONVS | {20, 21, 22, 24, 25, 26})


def test_published_layers_are_refused_for_a_graph_they_were_not_counted_in():
    with pytest.raises(UsageError, match="width 128"):
        model_script("hailo8", 128, ScriptOptions(sixteen_bit="published-layers"))


def test_the_script_of_bases_decoder_holds_the_vendors_commands():
    assert _lines("hailo8", 512, program="uncached_decoder") == BASE_DECODER
    published = ScriptOptions(sixteen_bit="published-layers")
    lines = _lines("hailo8", 512, published, program="uncached_decoder")
    assert lines == BASE_DECODER | _convs(set(range(12, 49, 2)))


@pytest.mark.parametrize("program", ["encoder", "uncached_decoder"])
def test_the_10h_adds_its_own_treatment_of_norms(program):
    ten, eight = (_lines(chip, 512, program=program) for chip in ("hailo10h", "hailo8"))
    assert {line.split("(")[1].split(",")[0] for line in ten - eight} == {
        "layer_norm_decomposition"
    }


def test_the_10h_leaves_tinys_decoder_more_room():
    assert "resources_param(max_utilization=0.7)" in _lines(
        "hailo10h", 384, program="uncached_decoder"
    )
    assert "resources_param(max_utilization=0.8)" in _lines(
        "hailo8", 384, program="uncached_decoder"
    )


@pytest.mark.parametrize("chip", CHIPS)
def test_options_change_what_they_name_and_nothing_else(chip):
    usual = _lines(chip, 384)
    level = _lines(chip, 384, ScriptOptions(compiler_optimization_level="max"))
    assert level - usual == {
        "performance_param(compiler_optimization_level=max, optimize_for_batch=1)"
    }
    without = _lines(chip, 384, ScriptOptions(finetune=False))
    assert {line.split("(")[0] for line in usual - without} == {"post_quantization_optimization"}
    assert not any(
        "a16" in line for line in _lines(chip, 384, ScriptOptions(sixteen_bit="nothing"))
    )


def test_no_more_samples_are_asked_for_than_there_are():
    script = model_script("hailo8", 384, samples=100)
    assert "dataset_size=100," in script
    assert "calibset_size=100)" in script
    assert "batch_size=1, calibset_size=1)" in model_script("hailo8", 384, samples=1)


def test_samples_needed_are_those_of_the_longest_reader():
    assert samples_needed(384) == 3340
    assert samples_needed(512) == 2048
    assert samples_needed(384, ScriptOptions(finetune=False)) == 1024
    assert samples_needed(384, program="uncached_decoder") == 1024
