"""The compiler is missing, too old, out of memory or killed: what is reported, and what is kept.

Only the moment of a failure is made here: driver, compiler and simulator are the real ones.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from whisperport.build.compile.compiling import compile_error
from whisperport.targets import RunOptions, get_target
from whisperport.targets.toolchain import Installed, Job, Stage, kit, prepare, run_driver
from whisperport.targets.vendors.qualcomm import stages
from whisperport.targets.vendors.qualcomm.compiler import provider_options

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

    failure = run_driver(Path(sys.executable), work, lambda _: None)

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
