"""The compiler is missing, too old, out of memory or killed: what is reported, and what is kept.

Only the moment of a failure is made here: driver, compiler and simulator are the real ones.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from whisperport.build.compile.compiling import compile_error
from whisperport.targets import RunOptions, get_target
from whisperport.targets.toolchain import Installed, Job, Stage, kit, prepare, run_driver
from whisperport.targets.vendors.qualcomm import stages
from whisperport.targets.vendors.qualcomm.chips import CHIPS, INT16, Chip
from whisperport.targets.vendors.qualcomm.compiler import provider_options
from whisperport.targets.vendors.qualcomm.quantization import quantize_in_place
from whisperport.verification import GATES, compare

# The compiler is missing, too old, out of memory or killed: what is reported, and what is kept.
#
# Only the moment of a failure is made here: driver, compiler and simulator are the real ones.

CHIP = "sm8650"
TARGET = get_target(CHIP)
ONE = RunOptions(threads=1)
STAGES = Path(stages.__file__).read_text(encoding="utf-8")

needs_simulator = pytest.mark.skipif(
    TARGET.run_mode(ONE) != "simulator" or TARGET.compiler.installed({}) is None,
    reason="the simulator needs onnxruntime-qnn on x86-64",
)


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
