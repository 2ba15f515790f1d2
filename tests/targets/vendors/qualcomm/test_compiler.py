"""Bundles with programs on the NPU: compiled by the vendor's compiler, run in the vendor's simulator.

Nothing is faked: the package onnxruntime-qnn has both. The model is a random one of a few kilobytes. Then
the compiler is missing, too old, out of memory or killed; only the moment of that is made here.
"""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.build.compile.compiling import compile_error
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.inspect import InspectOptions, inspect
from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.program.bundle import Bundle
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions, get_target
from whisperport.targets.toolchain import Installed, Job, Stage, kit, prepare, run_driver
from whisperport.targets.vendors.qualcomm import runtime, stages
from whisperport.targets.vendors.qualcomm.chips import CHIPS, INT16, Chip
from whisperport.targets.vendors.qualcomm.compiler import provider_options
from whisperport.targets.vendors.qualcomm.context import Context
from whisperport.targets.vendors.qualcomm.quantization import quantize_in_place
from whisperport.verification import GATES, compare
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip
from whisperport.verification.evidence import with_evidence
from whisperport.verification.project_evidence import project_evidence
from whisperport.verification.report import Report

from ....docs.pages import ROOT
from ....extent import EVERYTHING

# Bundles with programs on the NPU: compiled by the vendor's compiler, run in the vendor's simulator.
#
# Nothing is faked: the package onnxruntime-qnn has both. The model is a random one of a few kilobytes.


# All programs are on the NPU. Calibrating one more of them takes many seconds.
PRECISIONS = {
    "encoder": "fp16",
    "cross_kv": "w8a16",
    "prefill_4": "fp16",
    "prefill_64": "fp16",
    "step": "w8a16",
    "align": "fp16",
}
CHIP = "sm8650"
ONE = RunOptions(threads=1)
EMULATED = RunOptions(threads=1, options={f"{CHIP}.emulate": "on"})

needs_simulator = pytest.mark.skipif(
    get_target(CHIP).run_mode(ONE) != "simulator"
    or get_target(CHIP).compiler.installed({}) is None,
    reason="the simulator needs onnxruntime-qnn on x86-64",
)


def _noise(seed: int) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(3200)).astype(np.float32)


# For the calibration: 66 windows of 8 mel bins and 20 frames.
SPECTROGRAMS = np.random.default_rng(2).uniform(-1, 1, (66, 1, 8, 20)).astype(np.float32)
CLIPS = (Clip("hiss", "so", _noise(0)), Clip("more", "", _noise(1)))


@pytest.fixture(scope="module")
def export_once(
    micro_checkpoint: Any, micro_programs: tuple[Any, ...], tmp_path_factory: Any
) -> Path:
    """Export the micro model with all programs on the NPU, some of them quantized."""
    from whisperport.model.trace import variants

    work = tmp_path_factory.mktemp("qualcomm")
    np.save(work / "calibration.npy", SPECTROGRAMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "whisper_programs", lambda *_, **__: iter(micro_programs))
        options = ExportOptions(
            clips=CLIPS,
            precisions=PRECISIONS,
            run=ONE,
            calibration=work / "calibration.npy",
            allow_unverified=True,  # random weights give words of chance; a quantized model has others
        )
        return export(micro_checkpoint, CHIP, work / "bundle", options).folder


@pytest.fixture(scope="module")
def compiled(export_once: Path) -> Bundle:
    """The exported bundle, compiled and simulated."""
    bundle = shutil.copytree(export_once, export_once.with_name("compiled"))
    # Random weights give words of chance.
    return compile(bundle, CompileOptions(threads=1, allow_unverified=True)).bundle


@pytest.fixture
def exported_bundle(export_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(export_once, tmp_path / "bundle"))


# What export leaves --------------------------------------------------------------------------------


def test_an_exported_bundle_says_that_nothing_was_compiled_or_simulated(exported_bundle):
    manifest = Bundle.open(exported_bundle).manifest

    assert {entry.spec.name for entry in manifest.programs} == set(PRECISIONS)
    for entry in manifest.programs:
        assert {one.kind for one in entry.evidence} == {"emulated"}
        assert manifest.status(entry.spec.name) == "checked against vendor documentation"
    with pytest.raises(BundleError, match=r"is not compiled for `sm8650` yet") as missing:
        get_target(CHIP).load(exported_bundle, manifest.programs, ONE)
    assert "whisperport compile BUNDLE" in missing.value.hint


def test_the_mask_is_bounded_in_both_precisions(export_once):
    manifest = Bundle.open(export_once).manifest

    for name, precision in PRECISIONS.items():
        placement = manifest.program(name).placement
        assert placement.precision == precision
        has_mask = any(tensor.name == "mask" for tensor in manifest.program(name).spec.inputs)
        assert placement.mask == (-64 if has_mask else -30000)


# The compiler and the simulator ----------------------------------------------------------------------


@needs_simulator
def test_every_program_is_compiled_simulated_and_compared(compiled):
    manifest = compiled.manifest

    for entry in manifest.programs:
        assert entry.files == (f"{CHIP}/{entry.spec.name}.qnn", f"{CHIP}/{entry.spec.name}.onnx")
        assert entry.facts.compiled_for == "sm8650, HTP v75"
        assert re.fullmatch(r"\d+\.\d+\.\d+", entry.facts.compiler)
        assert set(entry.facts.plan) == {"HTP"}  # no node runs on the CPU
        kinds = {one.kind: one for one in manifest.evidence(entry.spec.name)}
        assert {"compiled", "simulated"} <= set(kinds), entry.spec.name
        assert set(kinds["simulated"].files) == {f"{CHIP}/{entry.spec.name}.qnn"}
        arrays = [one for one in kinds["simulated"].checks if one.level == "arrays"]
        assert arrays
        for one in arrays:
            assert one.what.endswith(", simulated")
            assert one.passed, one
        assert min(one.value["sqnr_db"] for one in arrays) > GATES[entry.precision].min_sqnr_db
        if entry.spec.name != "encoder":  # whose words are of chance, too
            assert manifest.status(entry.spec.name) == "simulated here"


@needs_simulator
def test_the_loaded_programs_compute_in_float16_what_the_lowered_ones_compute(compiled):
    bundle, target = compiled, get_target(CHIP)
    entries = [one for one in bundle.manifest.programs if one.precision == "fp16"]
    simulated = target.load(bundle.folder, entries, ONE)
    emulated = target.load(bundle.folder, entries, EMULATED)
    random = np.random.default_rng(5)

    for name, runner in simulated.items():
        inputs = {
            tensor.name: random.standard_normal(tensor.shape).astype(tensor.dtype)
            for tensor in runner.spec.inputs
        }
        found, expected = runner.run(inputs), emulated[name].run(inputs)
        for output, array in expected.items():
            compared = compare(output, found[output], array, GATES["fp16"])
            assert compared, f"{name}: {output}: {compared.reason}"
        changed = [output for output, array in expected.items() if (array != found[output]).any()]
        assert changed, f"{name} was not computed in float16"


@needs_simulator
def test_a_run_in_the_simulator_is_evidence_of_a_simulation_and_not_of_a_run(compiled):
    bundle = compiled
    report = Report(subject="", checks=(), machine={}, versions={}, seconds=0)

    by_options = {
        "simulated": with_evidence(bundle.manifest, report, {}),
        "emulated": with_evidence(bundle.manifest, report, EMULATED.options),
    }

    for kind, manifest in by_options.items():
        assert manifest.program("step").evidence[-1].kind == kind


@needs_simulator
def test_inspect_says_which_nodes_the_npu_runs(compiled):
    bundle = compiled

    found = inspect(bundle.folder, InspectOptions(repeat=1))

    assert {plan.program for plan in found.plans} == set(PRECISIONS)
    assert all(set(plan.engines) == {"HTP"} for plan in found.plans)
    assert min(plan.engines["HTP"] for plan in found.plans) > 5


@needs_simulator
def test_without_simulation_the_bundle_claims_none_and_finished_stages_are_kept(
    exported_bundle, tmp_path
):
    off, seen = {f"{CHIP}.emulate": "0"}, []
    made = compile(exported_bundle, CompileOptions(options=off, threads=1)).bundle
    assert made.manifest.status("step") == "compiled here"
    state = json.loads((tmp_path / "bundle.compile" / CHIP / "state.json").read_text())
    assert all(set(finished) == {"compile"} for finished in state.values())

    with reporting(seen.append):
        compile(exported_bundle, CompileOptions(options=off, threads=1))

    assert f"{CHIP}: all stages are already finished" in seen


@needs_simulator
def test_a_chip_without_floating_point_rejects_a_program_in_float_by_the_names_of_its_nodes(
    exported_bundle, monkeypatch
):
    """`export` rejects this; here the real compiler is asked what it says about such a program."""
    from whisperport.targets.vendors.qualcomm.chips import CHIPS
    from whisperport.targets.vendors.qualcomm.compiler import QnnCompiler

    target = get_target(CHIP)
    qcm6490 = next(chip for chip in CHIPS if chip.name == "qcm6490")
    monkeypatch.setattr(target, "compiler", QnnCompiler(qcm6490))

    with pytest.raises(LoweringError, match="does not support the program") as refused:
        compile(exported_bundle, CompileOptions(options={f"{CHIP}.emulate": "0"}, threads=1))

    assert re.search(r"\d+ nodes are not supported: .*LayerNormalization", refused.value.why)
    assert "compile.log" in refused.value.hint
    assert Bundle.open(exported_bundle).manifest.status("encoder") != "compiled here"


# What is missing, or does not fit ------------------------------------------------------------------


@needs_simulator
@pytest.mark.parametrize("target", ["sm8550", "qcm6490"])
def test_a_file_for_another_chip_is_rejected_before_it_is_loaded(compiled, target):
    bundle = compiled

    with pytest.raises(BundleError, match=f"for another chip than `{target}`") as refused:
        get_target(target).load(bundle.folder, [bundle.manifest.program("step")], ONE)

    assert "compiled for chip 57 with HTP v75" in refused.value.why


@needs_simulator
def test_a_device_library_that_is_not_there_is_an_error_and_not_a_run_on_the_cpu(
    compiled, tmp_path
):
    bundle = compiled
    run = RunOptions(options={f"{CHIP}.library": str(tmp_path / "libQnnHtp.so")})

    with pytest.raises(BundleError, match="cannot load") as refused:
        get_target(CHIP).load(bundle.folder, bundle.manifest.programs[:1], run)

    assert f"{CHIP}.library" in refused.value.hint


def test_without_the_package_an_error_says_what_to_install(exported_bundle, monkeypatch):
    import sys

    manifest = Bundle.open(exported_bundle).manifest
    (entry, *_) = manifest.programs
    compiled = f"{CHIP}/encoder.qnn"
    (exported_bundle / compiled).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)

    with pytest.raises(MissingPackageError, match="cannot run the compiled programs") as missing:
        get_target(CHIP).load(exported_bundle, [replace(entry, files=(compiled,))], ONE)

    assert 'pip install "whisperport[qualcomm]"' in missing.value.hint
    assert f"{CHIP}.emulate=on" in missing.value.hint


@pytest.mark.parametrize("answer", ["", "best", "works", "not"])
def test_the_provider_is_asked_before_a_file_is_loaded(
    exported_bundle, monkeypatch, caplog, answer
):
    """Only an NPU answers; here its answers are given."""
    (entry, *_) = Bundle.open(exported_bundle).manifest.programs
    compiled = f"{CHIP}/encoder.qnn"
    context = Context(
        soc_model=None, architecture=75, compiler="", context_bytes=1, compatibility="v2:6"
    )
    monkeypatch.setattr(runtime, "check_context", lambda *_: context)
    monkeypatch.setattr(runtime, "_npus", lambda ort, devices: devices[:1])
    monkeypatch.setattr(
        runtime,
        "compatibility",
        lambda npus, stated: answer * (len(npus) == 1 and stated == "v2:6"),
    )
    (exported_bundle / compiled).write_bytes(b"")

    with pytest.raises(BundleError) as rejected:
        get_target(CHIP).load(exported_bundle, [replace(entry, files=(compiled,))], ONE)

    at_load = "cannot load encoder.qnn"  # the file is empty
    assert (
        "cannot run encoder.qnn on this NPU" if answer == "not" else at_load
    ) in rejected.value.what
    assert ("compile the bundle again" in caplog.text) == (answer == "works")


@needs_simulator
def test_the_provider_is_not_asked_about_the_simulator(compiled, monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr(runtime, "compatibility", lambda npus, stated: asked.extend(npus) or "")

    get_target(CHIP).load(compiled.folder, compiled.manifest.programs[:1], ONE)

    assert not asked


# The embedded model on the NPU keeps its accuracy and its words.
#
# `make test-all` compiles it and decodes complete clips with every program in the vendor's simulator.
# `make test` reads what `make evidence` recorded.


# Lowest SQNR of `encoder` and `step` in dB. Measured with onnxruntime-qnn 2.7.0:
# in fp16 against float32, 53.3 and 55.1; in w8a16, 34.5 and 33.5.
LOWEST_DB = {"fp16": 50.0, "w8a16": 33.0}
CLIPS_AT = {"fp16": ("02-espeak-british.flac",), "w8a16": ()}  # (): all of the reference


def test_the_recorded_simulation_is_accurate_and_has_equal_tokens() -> None:
    (simulated,) = (one for one in project_evidence(CHIP) if one.kind == "simulated")
    file = ROOT / "benchmarks" / "results" / "chips.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["npu"]["rows"]
    (row,) = (r for r in rows if (r["target"], r["precision"]) == (CHIP, "fp16"))

    counted = {check.level: check.value for check in simulated.checks}
    checks = [check for program in row["programs"] for check in program["checks"]]

    assert {"arrays", "tokens"} <= set(counted)
    assert all(value["passed"] == value["compared"] > 0 for value in counted.values())
    for name in ("encoder", "step"):
        of_program = [c for c in checks if c["program"] == name]
        found = [c["value"] for c in of_program if c["what"].endswith(", simulated")]
        assert min(value["sqnr_db"] for value in found) >= LOWEST_DB["fp16"], name
    free = [check["value"] for check in checks if check["what"].endswith(", free")]
    assert free
    for value in free:
        assert value["n_same"] == value["n_expected"] == value["n_actual"] > 5


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="make test-all: minutes of simulation")
@pytest.mark.skipif(
    get_target(CHIP).run_mode(ONE) != "simulator"
    or get_target(CHIP).compiler.installed({}) is None,
    reason="the simulator needs onnxruntime-qnn on x86-64",
)
@pytest.mark.parametrize("precision", LOWEST_DB)
def test_complete_clips_are_decoded_in_the_simulator(
    precision: str, exported: Any, tmp_path: Path
) -> None:
    exported_bundle = exported(CHIP, "default", precision=precision)
    folder = shutil.copytree(exported_bundle.folder, tmp_path / "bundle")
    off = CompileOptions(options={f"{CHIP}.emulate": "0"}, threads=1)
    bundle = compile(folder, off).bundle
    assert {entry.target for entry in bundle.manifest.programs} == {CHIP}
    assert all(set(entry.facts.plan) == {"HTP"} for entry in bundle.manifest.programs)

    report = verify(bundle, run=ONE, clips=CLIPS_AT[precision])

    assert report, report.failures()
    for program in ("encoder", "step"):
        arrays = [one for one in report.checks if (one.level, one.program) == ("arrays", program)]
        assert min(one.value["sqnr_db"] for one in arrays) >= LOWEST_DB[precision], program
    (words,) = (one for one in report.checks if one.level == "words")
    assert words.value["wer"] == words.value["reference_wer"] == 0
    free = [one for one in report.checks if one.what.endswith(", free")]
    assert len(free) == words.value["clips"] == (len(CLIPS_AT[precision]) or 6)
    if precision == "fp16":
        assert all(one.value["n_same"] == one.value["n_expected"] for one in free)


# The compiler is missing, too old, out of memory or killed: what is reported, and what is kept.
#
# Only the moment of a failure is made here: driver, compiler and simulator are the real ones.

TARGET = get_target(CHIP)
STAGES = Path(stages.__file__).read_text(encoding="utf-8")


def changed_script(folder: Path, before: str, inserted: str) -> Path:
    """Write the stage script with a line inserted before the first place of a text."""
    assert before in STAGES
    script = folder / "stages.py"
    script.write_text(STAGES.replace(before, inserted + before, 1), encoding="utf-8")
    return script


# The compiler is missing, or of another version ----------------------------------------------------------


def packages(python: Path) -> Path:
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    return folder


def test_an_onnxruntime_without_plugins_is_named(monkeypatch):
    import onnxruntime

    monkeypatch.delattr(onnxruntime, "register_execution_provider_library")

    reason = stages.check("2.7.0", TARGET.compiler.settings())

    assert f"onnxruntime {onnxruntime.__version__}" in reason


# The compiler runs out of memory, or is killed -----------------------------------------------------------


def write_product(path: Path, size: int) -> None:
    """Write the product of a vector and a square matrix as an ONNX file."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, size])],
        [numpy_helper.from_array(np.zeros((size, size), np.float32), "w")],
    )
    opset = [helper.make_opsetid("", 20)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)


@needs_simulator
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")
def test_a_compiler_without_memory_says_so(tmp_path):
    """The real compiler, which is loaded already, reads a model of 64 MiB with 16 MiB of memory left."""
    limit = """\
    if model.stem == "large":
        import resource
        _session(model.with_name("small.onnx"), options, {})
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, used + 2**24))
"""
    script = changed_script(tmp_path, "    # Without `enable_fallback=0`", limit)
    work = tmp_path / "work"
    (work / "large").mkdir(parents=True)
    write_product(work / "large" / "large.onnx", 4096)
    write_product(work / "large" / "small.onnx", 16)
    options = TARGET.compiler.options()
    job = Job(
        name="large",
        stages=(Stage("compile", ("large.onnx",), ("large.qnn", "built.json")),),
        settings={
            "model": "large.onnx",
            "artifact": "large.qnn",
            "options": provider_options(TARGET.chip, options),
        },
    )
    prepare(work, script, TARGET.compiler.settings(), [job])

    failure = run_driver(Path(sys.executable), work)

    installed = Installed(Path(sys.executable), Path(sys.executable))
    error = compile_error(TARGET, failure, work, installed)
    assert "ran out of memory" in error.what
    assert "bad_alloc" in error.why
    assert "compile.log" in error.hint
    assert not list((work / "large").glob("*.qnn"))


def test_the_memory_error_of_the_vendors_own_library_is_recognized(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        # The text of onnxruntime-qnn 2.7.0 with an address space of 1.1 GB.
        raise RuntimeError("Failed to finalize QNN graph. Error: QNN_COMMON_ERROR_MEM_ALLOC: …")

    monkeypatch.setattr(stages, "_session", fail)
    own = {"model": "a.onnx", "artifact": "a.qnn", "options": {}}

    with pytest.raises(MemoryError, match="MEM_ALLOC"):
        stages.STAGES["compile"](kit.Job(tmp_path, "a", own, {}), kit)


# A matmul of two activations in w8a16, quantized as `export` does, in the vendor's simulator.

needs_the_simulator = pytest.mark.skipif(
    get_target("sm8650").run_mode(RunOptions()) != "simulator"
    or get_target("sm8650").compiler.installed({}) is None,
    reason="the simulator needs onnxruntime-qnn on x86-64",
)
CHIP_NAMED = {chip.name: chip for chip in CHIPS}
SHAPE = {"a": (2, 4, 64), "b": (2, 64, 48), "y": (2, 4, 48)}


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal((8, *SHAPE[name])).astype(np.float32) for name in "ab"}


def quantized(folder: Path, chip: Chip, arrays: dict[str, np.ndarray]) -> Path:
    """Write y = (a * a) @ b, quantized for a chip: `a * a` is computed by an operator."""
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in SHAPE.items()
    }
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["squared"], name="square"),
        helper.make_node("MatMul", ["squared", "b"], ["y"], name="product"),
    ]
    graph = helper.make_graph(nodes, "product", [values["a"], values["b"]], [values["y"]])
    opset = [helper.make_opsetid("", 20)]
    path = folder / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    files = {name: folder / f"{name}.npy" for name in arrays}
    quantize_in_place(path, files, chip.architecture.operand, target=chip.name, extra="qualcomm")
    return path


def simulated_db(path: Path, chip: Chip, arrays: dict[str, np.ndarray]) -> float:
    """Return the SQNR of the simulated matmul of the first sample in dB."""
    options = provider_options(chip, get_target(chip.name).compiler.options())
    feed = {name: array[0] for name, array in arrays.items()}
    (found,) = stages._session(path, options, {}).run(None, feed)
    expected = np.square(feed["a"]) @ feed["b"]
    return compare("y", found, expected, GATES["w8a16"]).sqnr_db


@needs_the_simulator
def test_a_matmul_of_activations_keeps_16_bits_where_the_npu_can(tmp_path, arrays):
    path = quantized(tmp_path, CHIP_NAMED["sm8650"], arrays)

    assert simulated_db(path, CHIP_NAMED["sm8650"], arrays) > 60  # measured: 69.8


@needs_the_simulator
def test_without_16_bits_the_second_operand_has_8_bits_of_a_narrow_range(tmp_path, arrays):
    path = quantized(tmp_path, CHIP_NAMED["qcm6490"], arrays)

    types = {one.name: one.data_type for one in onnx.load(path).graph.initializer}
    assert types["b_zero_point_convert"] == TensorProto.UINT8
    assert types["b_zero_point"] == TensorProto.UINT16
    assert simulated_db(path, CHIP_NAMED["qcm6490"], arrays) > 35  # measured: 37.9


def test_weights_have_a_scale_per_channel_so_that_a_massive_one_ruins_no_other(tmp_path):
    random = np.random.default_rng(0)
    weights = random.standard_normal((64, 48)).astype(np.float32)
    weights[0, 7] = 2000
    x = random.standard_normal((8, 1, 16, 64)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"], name="product"),
            helper.make_node("Add", ["product", "b"], ["y"], name="sum"),
        ],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 48])],
        [
            onnx.numpy_helper.from_array(weights, "w"),
            onnx.numpy_helper.from_array(np.zeros(48, np.float32), "b"),
        ],
    )
    path = tmp_path / "linear.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    np.save(tmp_path / "x.npy", x)

    quantize_in_place(path, {"x": tmp_path / "x.npy"}, INT16, target="sm8650", extra="qualcomm")

    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x[0]})
    others = np.arange(48) != 7
    expected = (x[0] @ weights)[..., others]
    assert compare("y", found[..., others], expected, GATES["w8a16"]).sqnr_db > 30


@needs_the_simulator
def test_v69_still_multiplies_few_rows_wrongly(tmp_path, arrays):
    """If this fails, the vendor has corrected its library: set `min_rows` of v69 to 1."""
    path = quantized(tmp_path, CHIP_NAMED["sm8450"], arrays)

    assert simulated_db(path, CHIP_NAMED["sm8450"], arrays) < 10  # measured: 1.5


@pytest.mark.parametrize("program", ["step", "step_4", "prefill_4"])
def test_v69_rejects_w8a16_for_programs_of_few_rows(program):
    target = get_target("sm8450")

    rejected = target.unsupported(program, "w8a16")

    assert rejected is not None
    assert "v69" in rejected.why
    assert f"--precision {program}=fp16" in rejected.hint
    assert target.unsupported(program, "fp16") is None
    assert get_target("sm8550").unsupported(program, "w8a16") is None


@pytest.mark.parametrize("program", ["encoder", "cross_kv", "prefill_64", "align", "prefill_x"])
def test_v69_accepts_w8a16_for_programs_of_many_rows(program):
    assert get_target("sm8450").unsupported(program, "w8a16") is None


def test_a_program_with_integer_inputs_is_calibrated(tmp_path):
    """A calibration set has floats only, also of positions."""
    random = np.random.default_rng(0)
    x = random.standard_normal((4, 1, 8)).astype(np.float32)
    weights = random.standard_normal((8, 8)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["n"], ["number"], name="cast", to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x", "w"], ["rows"], name="rows"),
            helper.make_node("Add", ["rows", "number"], ["y"], name="sum"),
        ],
        "sum",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8]),
            helper.make_tensor_value_info("n", TensorProto.INT32, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    path = tmp_path / "sum.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "n.npy", np.array([[3], [0], [2], [1]], np.float32))
    files = {name: tmp_path / f"{name}.npy" for name in ("x", "n")}

    quantize_in_place(path, files, INT16, target="sm8650", extra="qualcomm")

    number = np.array([3], np.int32)
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x[0], "n": number})
    assert compare("y", found, x[0] @ weights + 3, GATES["w8a16"]).sqnr_db > 30


def test_nodes_without_a_name_are_told_apart(tmp_path):
    """Keys and values are converted for the matmul that reads them, and for no other node."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8, 8])
        for name in ("a", "b", "y", "z")
    ]
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["y"]),
        helper.make_node("Relu", ["b"], ["z"]),
    ]
    graph = helper.make_graph(nodes, "product", values[:2], values[2:])
    path = tmp_path / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    random = np.random.default_rng(0)
    files = {name: tmp_path / f"{name}.npy" for name in "ab"}
    for file in files.values():
        np.save(file, random.standard_normal((4, 2, 8, 8)).astype(np.float32))

    quantize_in_place(path, files, INT16, target="sm8650", extra="qualcomm")

    quantized = onnx.load(path).graph
    types = {one.name: one.data_type for one in quantized.initializer}
    makers = {node.output[0]: node for node in quantized.node}
    (matmul,) = (node for node in quantized.node if node.op_type == "MatMul")
    (other,) = (node for node in quantized.node if node.op_type == "Relu")
    assert types[makers[matmul.input[1]].input[2]] == TensorProto.INT16
    assert types[makers[other.input[0]].input[2]] == TensorProto.UINT16
