"""What whisperport asks of the compiler, what it says if that fails, and bundles in its simulator.

The last need rknn-toolkit2 2.5.0 in an interpreter of its own, which the variable
WHISPERPORT_TOOLCHAIN_ROCKCHIP names, and take some minutes: nothing is faked there.
"""

import os
import re
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from whisperport.build.compile.compile import Compiled, CompileOptions, compile
from whisperport.errors import UsageError, VerificationError
from whisperport.program.bundle import Bundle
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.progress import reporting
from whisperport.targets import get_target
from whisperport.targets.compiler import CompileRequest
from whisperport.targets.target_options import parse_options
from whisperport.targets.toolchain import kit
from whisperport.targets.vendors.rockchip import stages
from whisperport.targets.vendors.rockchip.compiler import MISCOMPILING_RULE

from ....micro import DIMS
from .rknn_bytes import SPEC, rknn_bytes

COMPILER = get_target("rk3588").compiler
OPTIONS = COMPILER.options()


def plan(precision: str = "fp16", **options: str) -> Any:
    compiler = COMPILER.in_precision(precision)
    chosen = parse_options(compiler.options, options, "rk3588")
    need = compiler.emulation(SPEC, chosen)
    request = CompileRequest(
        spec=SPEC,
        dims=DIMS,
        options=chosen,
        folder=Path("step"),
        files=("step.onnx",),
        arrays=("x.npy", "mask.npy") if compiler.calibration(SPEC, DIMS, chosen) else (),
        emulation=tuple(f"{name}.npy" for name in need.inputs) if need else (),
    )
    return compiler.plan(request)


# What it is asked for --------------------------------------------------------------------------------


def test_the_rule_that_computes_wrong_results_is_turned_off_unless_asked():
    assert plan().settings["disable_rules"] == [MISCOMPILING_RULE]
    assert plan(**{"disable-rules": "none"}).settings["disable_rules"] == []
    assert plan(**{"disable-rules": "a_rule,b2"}).settings["disable_rules"] == ["a_rule", "b2"]


@pytest.mark.parametrize("rules", ["", "a, b", "a;b", ",", "../x"])
def test_another_text_than_names_of_rules_is_a_usage_error(rules):
    with pytest.raises(UsageError, match="disable-rules"):
        plan(**{"disable-rules": rules})


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", ""), ("w8a8", "w8a8"), ("w16a16", "w16a16i_dfp")]
)
def test_only_a_quantized_program_is_calibrated(precision, dtype):
    planned = plan(precision)

    assert planned.settings["quantized_dtype"] == dtype
    assert bool(planned.settings["calibration"]) == bool(dtype)
    (stage,) = planned.stages
    assert ("x.npy" in stage.reads) == bool(dtype)
    assert "step.rknn" in stage.writes


def test_without_simulation_the_stage_reads_and_writes_nothing_of_it():
    planned = plan(emulate="0")

    assert planned.stages[0].reads == ("step.onnx",)
    assert planned.settings["simulated_outputs"] == []
    assert COMPILER.emulation(SPEC, OPTIONS).kind == "simulated"


# The stage, with a fake of the SDK ---------------------------------------------------------------------


LISTED = """custom_quantize_layers: {}
quantize_parameters:
    x:
        dtype: float32
    sum-rs:
        dtype: int8
    sum_2_mm_tp_sw:
        dtype: int8
    'node_norm#1':
        dtype: int8
    sums:
        dtype: int8
    _mm:
        dtype: int8
"""


class FakeSdk:
    """The calls of rknn-toolkit2 2.5.0 that the stage makes, by their names and keywords."""

    codes: dict[str, int]
    log: Path
    seen: list[tuple[str, Any]]
    outputs: list[np.ndarray] | None

    def __init__(self, verbose: bool = False) -> None:
        pass

    def _called(self, name: str, given: Any) -> int:
        self.seen.append((name, given))
        code = self.codes.get(name, 0)
        if code:
            with self.log.open("a") as log:
                log.write(f"\x1b[1;31mE\x1b[0m \x1b[1;31m{name}: not supported!\x1b[0m\n")
        return code

    def config(self, *, target_platform, optimization_level, disable_rules, quantized_dtype="w8a8"):
        return self._called("config", (target_platform, tuple(disable_rules), quantized_dtype))

    def load_onnx(self, model):
        return self._called("load_onnx", Path(model).name)

    def hybrid_quantization_step1(self, dataset):
        Path("step.quantization.cfg").write_text(LISTED)
        for name in ("step.model", "step.data"):
            Path(name).write_text(name)
        return self._called("step1", len(Path(dataset).read_text().splitlines()))

    def hybrid_quantization_step2(self, model_input, data_input, model_quantization_cfg):
        assert Path(model_input).read_text() == "step.model"
        assert Path(data_input).read_text() == "step.data"
        return self._called("step2", Path(model_quantization_cfg).read_text())

    def build(self, do_quantization=True, dataset=None):
        lines = Path(dataset).read_text().splitlines() if dataset else []
        shapes = [[np.load(path).shape for path in line.split(" ")] for line in lines]
        return self._called("build", (do_quantization, shapes))

    def export_rknn(self, export_path):
        code = self._called("export_rknn", Path(export_path).name)
        if not code and self.codes.get("writes", 1):
            Path(export_path).write_bytes(rknn_bytes())
        return code

    def init_runtime(self):
        return self._called("init_runtime", None)

    def inference(self, inputs, data_format):
        self._called("inference", ([array.shape for array in inputs], data_format))
        return self.outputs

    def release(self):
        self._called("release", None)


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeSdk]:
    fake = type("Fake", (FakeSdk,), {})
    fake.codes, fake.log, fake.seen = {}, tmp_path / "compile.log", []
    fake.outputs = [np.ones((1, 70), np.float16)]
    package, api = types.ModuleType("rknn"), types.ModuleType("rknn.api")
    api.RKNN = fake
    monkeypatch.setitem(sys.modules, "rknn", package)
    monkeypatch.setitem(sys.modules, "rknn.api", api)
    monkeypatch.setattr(stages, "version", lambda: "2.5.0")
    for array, shape in (("x", (1, 1, 8)), ("mask", (1, 1, 5))):
        np.save(tmp_path / f"{array}.npy", np.zeros((3, *shape), np.float32))
        np.save(tmp_path / f"simulated_{array}.npy", np.zeros((2, *shape), np.float32))
    (tmp_path / "step.onnx").write_bytes(b"")
    return fake


def run_stage(folder: Path, planned: Any) -> None:
    job = kit.Job(folder, "step", dict(planned.settings), COMPILER.settings())
    stages.STAGES["compile"](job, kit)


def test_the_stage_builds_quantized_and_simulates_every_sample(sdk, tmp_path):
    before = os.getcwd()
    run_stage(tmp_path, plan("w16a16"))

    calls = dict(sdk.seen)
    assert calls["config"] == ("rk3588", (MISCOMPILING_RULE,), "w16a16i_dfp")
    assert calls["build"] == (True, [[(1, 1, 8), (1, 1, 5)]] * 3)
    assert calls["inference"] == ([(1, 1, 8), (1, 1, 5)], ["nchw", "nchw"])
    assert np.load(tmp_path / "simulated_output_logits.npy").shape == (2, 1, 70)
    assert (tmp_path / "step.rknn").read_bytes() == rknn_bytes()
    assert os.getcwd() == before
    assert not list(tmp_path.glob("building-*"))  # files of the compiler's own


def test_what_8_bits_ruin_is_built_in_float16_by_the_compilers_names(sdk, tmp_path):
    planned = plan("w8a8")
    run_stage(
        tmp_path, replace(planned, settings={**planned.settings, "in_float": ["sum", "node_norm"]})
    )

    calls = dict(sdk.seen)
    assert calls["step1"] == 3
    in_float = "\n    sum-rs: float16\n    'node_norm#1': float16"
    assert calls["step2"] == LISTED.replace(" {}", in_float)
    assert "build" not in calls


@pytest.mark.parametrize("in_float", [[], ["sum"]])
def test_what_the_simulator_starts_from_is_kept(sdk, tmp_path, in_float):
    planned = plan("w8a8", keep="on", emulate="0")
    run_stage(tmp_path, replace(planned, settings={**planned.settings, "in_float": in_float}))

    assert planned.keep == ("step.model", "step.data", "step.cfg")
    assert set(planned.keep) < set(planned.stages[0].writes)
    assert [(tmp_path / name).read_text() for name in planned.keep[:2]] == [*planned.keep[:2]]
    listed = (tmp_path / "step.cfg").read_text()
    assert listed == dict(sdk.seen)["step2"]
    assert (listed == LISTED) != bool(in_float)
    assert not list(tmp_path.glob("building-*"))
    for off in (plan("w8a8"), plan("w16a16", keep="on"), plan(keep="on")):
        assert off.keep == ()
        assert len(off.stages[0].writes) == 3


def test_only_an_encoder_in_8_bits_is_examined(tmp_path):
    graph = onnx.parser.parse_graph(
        """two (float[1,4,8] mel) => (float[1,4,8] features)
        <float[8] b = {1,1,1,4000,1,1,1,1}>
        { [scale] massive = Mul(mel, b)  [turn] turned = Transpose(massive)  h = Abs(turned)
          [back] features = Transpose(h)  [other] unused = Abs(mel) }"""
    )
    opset = onnx.helper.make_opsetid("", 19)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset]), tmp_path / "encoder.onnx")
    np.save(tmp_path / "mel.npy", np.ones((2, 1, 4, 8), np.float32))
    mel = (TensorSpec("mel", (1, 4, 8)),)
    encoder = ProgramSpec("encoder", mel, (TensorSpec("features", (1, 4, 8)),))
    request = CompileRequest(
        spec=encoder,
        dims=DIMS,
        options=OPTIONS,
        folder=tmp_path,
        files=("encoder.onnx",),
        arrays=("mel.npy",),
    )

    hybrid = COMPILER.in_precision("w8a8").plan(request)
    off = replace(request, options=replace(OPTIONS, hybrid=False))

    names = {"scale", "massive", "turn", "turned", "h"}  # without the empty one
    assert set(hybrid.settings["in_float"]) == names
    assert hybrid.notes[0].startswith("in float16 instead, with the operators that read it: ")
    assert "channel 3 reaches 4000" in hybrid.notes[0]
    for without in (off, replace(request, arrays=())):
        precision = "w8a8" if without is off else "fp16"
        assert COMPILER.in_precision(precision).plan(without).settings["in_float"] == ()


def test_float_programs_are_built_without_a_data_set(sdk, tmp_path):
    run_stage(tmp_path, plan(emulate="0"))

    assert dict(sdk.seen)["build"] == (False, [])
    assert "inference" not in dict(sdk.seen)


@pytest.mark.parametrize("call", ["config", "load_onnx", "build", "export_rknn"])
def test_a_return_code_is_an_error_with_the_compilers_own_words(sdk, tmp_path, call):
    sdk.codes[call] = -1

    with pytest.raises(stages.RejectedError, match=f"{call} returned -1: {call}: not supported!"):
        run_stage(tmp_path, plan())

    assert not (tmp_path / "step.rknn").exists()


def test_a_file_that_was_not_written_is_an_error(sdk, tmp_path):
    sdk.codes["writes"] = 0

    with pytest.raises(kit.NotWrittenError, match=r"step\.rknn"):
        run_stage(tmp_path, plan())


@pytest.mark.parametrize("outputs", [None, [], [np.zeros(1)] * 2])
def test_a_simulator_with_other_outputs_is_an_error(sdk, tmp_path, outputs):
    sdk.outputs = outputs

    with pytest.raises(kit.SimulationError, match="expected 1"):
        run_stage(tmp_path, plan())

    assert not (tmp_path / "step.rknn").exists()


def test_errors_that_the_compiler_prints_and_ignores_become_a_note(sdk, tmp_path):
    line = "E RKNN: [17:07:53.728] Unkown op target: 0\n"
    sdk.log.write_text("I rknn building ...\n" + line + line + "I rknn building done.\n")
    run_stage(tmp_path, plan())

    (note,) = COMPILER.check(tmp_path / "step.rknn", SPEC)["notes"]

    assert "2 times" in note
    assert "'RKNN: Unkown op target: 0'" in note


# A bundle without the SDK ------------------------------------------------------------------------------


PLACED = {"encoder": "rk3588", "step": "rk3588"}

with_the_sdk = pytest.mark.skipif(
    COMPILER.installed({}) is None,
    reason="rknn-toolkit2 is not installed; WHISPERPORT_TOOLCHAIN_ROCKCHIP names its interpreter",
)


@pytest.fixture
def copied(exported: Callable[..., Bundle], tmp_path: Path) -> Callable[..., Path]:
    """Return `copied(placement, precisions)`: a bundle of the embedded model, exported once."""

    def copy(placement: dict[str, str], **options: Any) -> Path:
        made = exported("onnxruntime", "default", placement=placement, **options)
        return Path(shutil.copytree(made.folder, tmp_path / "bundle"))

    return copy


def run(bundle: Path, **options: Any) -> Compiled:
    # The few shipped recordings are enough for a test.
    return compile(bundle, CompileOptions(threads=1, force=True, **options))


def smallest_db(compiled: Compiled) -> dict[str, float]:
    """Return program -> the smallest SQNR of its outputs, in dB."""
    return {
        program.name: min(c.value["sqnr_db"] for c in program.emulation if c.level == "arrays")
        for program in compiled.programs
    }


@with_the_sdk
def test_encoder_and_step_in_float16_lose_little_and_the_words_are_equal(copied):
    bundle = copied(PLACED)

    made = run(bundle)

    assert all(decibels >= 60 for decibels in smallest_db(made).values()), smallest_db(made)
    manifest = Bundle.open(bundle).manifest
    for program in made.programs:
        assert manifest.status(program.name) == "simulated here"
        assert manifest.program(program.name).files[0] == f"rk3588/{program.name}.rknn"
        assert manifest.program(program.name).facts.target_facts["disabled_rules"] == [
            MISCOMPILING_RULE
        ]
    assert {c.level for c in made.programs[0].emulation} == {"arrays", "tokens", "words"}
    assert all(c.passed for program in made.programs for c in program.emulation)

    seen: list[str] = []
    with reporting(seen.append):
        compile(bundle, CompileOptions(threads=1))
    assert "rk3588: all stages are already finished" in seen


@with_the_sdk
def test_with_the_rule_left_on_the_simulator_shows_it_and_the_bundle_is_not_written(copied):
    bundle = copied({"step": "rk3588"})
    before = Bundle.open(bundle).manifest

    with pytest.raises(VerificationError, match="disagree with their reference") as refused:
        run(bundle, options={"rk3588.disable-rules": "none"})

    assert re.search(
        r"step, \w+, simulated \(arrays\): SQNR -?\d+\.\d dB is below \d", refused.value.why
    )
    assert Bundle.open(bundle).manifest == before
    assert not list(bundle.rglob("*.rknn"))


@with_the_sdk
def test_integers_of_16_bits_lose_little(copied):
    placement = {"encoder": "rk3576", "step": "rk3576"}
    bundle = copied(placement, precisions=dict.fromkeys(placement, "w16a16"))

    made = run(bundle)

    # 48 dB were seen in `step`, 57 in the encoder
    assert all(decibels >= 45 for decibels in smallest_db(made).values()), smallest_db(made)
    assert all(c.passed for program in made.programs for c in program.emulation)
    assert {program.samples for program in made.programs} == {32}


@with_the_sdk
def test_an_encoder_of_8_bits_is_accepted_only_with_what_they_ruin_in_float16(copied):
    bundle = copied({"encoder": "rk3568"}, precisions={"encoder": "w8a8"})
    before = Bundle.open(bundle).manifest

    with pytest.raises(VerificationError) as refused:
        run(bundle, options={"rk3568.hybrid": "off"})

    assert re.search(r"encoder, .*, simulated \(arrays\): .* dB is below \d", refused.value.why)
    assert Bundle.open(bundle).manifest == before

    made = run(bundle)

    assert smallest_db(made)["encoder"] > 20
    (note, *_) = Bundle.open(bundle).manifest.program("encoder").facts.notes
    assert note.startswith("in float16 instead")
