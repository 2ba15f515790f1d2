"""The compiler is missing, too old, out of memory or killed: what is reported, and what is kept.

Only the moment of a failure is made here: driver, compiler and simulator are the real ones.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from whisperport.bundle import Bundle
from whisperport.compilation.compile import CompileOptions, compile
from whisperport.compilation.compile_errors import compile_error
from whisperport.errors import LoweringError, MissingPackageError
from whisperport.targets import RunOptions, get_target
from whisperport.targets.qualcomm import stages
from whisperport.targets.qualcomm.compiler import provider_options
from whisperport.toolchain import Installed, Job, Stage, kit, prepare, run_driver

CHIP = "sm8650"
TARGET = get_target(CHIP)
ONE = RunOptions(threads=1)
OPTIONS = CompileOptions(threads=1, options={f"{CHIP}.emulate": "1"})
STAGES = Path(stages.__file__).read_text(encoding="utf-8")

needs_simulator = pytest.mark.skipif(
    TARGET.run_mode(ONE) != "simulator" or TARGET.compiler.installed({}) is None,
    reason="the simulator needs onnxruntime-qnn on x86-64",
)


@pytest.fixture(scope="module")
def export_once(micro_bundle_on: Callable[[str, str], Path]) -> Path:
    """The micro model with one small program on the NPU."""
    return micro_bundle_on(CHIP, "cross_kv")


@pytest.fixture
def exported_bundle(export_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(export_once, tmp_path / "bundle"))


def changed_script(folder: Path, before: str, inserted: str) -> Path:
    """Write the stage script with a line inserted before the first place of a text."""
    assert before in STAGES
    script = folder / "stages.py"
    script.write_text(STAGES.replace(before, inserted + before, 1), encoding="utf-8")
    return script


# The compiler is missing, or of another version ----------------------------------------------------------


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """An interpreter without any packages, in an environment of its own."""
    made = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    return made / "bin" / "python"


def packages(python: Path) -> Path:
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    return folder


def test_without_the_compiler_a_work_folder_is_prepared_and_the_error_says_what_to_do(
    exported_bundle, monkeypatch
):
    monkeypatch.delenv("WHISPERPORT_TOOLCHAIN_QUALCOMM", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    before = Bundle.open(exported_bundle).manifest

    with pytest.raises(MissingPackageError, match="not compiled yet") as missing:
        compile(exported_bundle, OPTIONS)

    work = exported_bundle.with_name("bundle.compile") / CHIP
    assert "No module named 'onnxruntime_qnn'" in missing.value.why
    assert 'pip install "whisperport[qualcomm]"' in missing.value.hint
    assert str(work) in missing.value.hint
    assert {path.name for path in (work / "cross_kv").iterdir()} >= {"cross_kv.onnx"}
    assert (work / "compile.py").is_file()
    assert Bundle.open(exported_bundle).manifest == before


def test_an_interpreter_without_the_compiler_is_named_before_anything_is_computed(
    exported_bundle, other_python
):
    chosen = CompileOptions(toolchains={"qualcomm": str(other_python)}, threads=1)

    with pytest.raises(MissingPackageError, match="cannot be used") as missing:
        compile(exported_bundle, chosen)

    assert "No module named 'onnxruntime'" in missing.value.why
    assert "--toolchain qualcomm=" in missing.value.hint
    assert not exported_bundle.with_name("bundle.compile").exists()


def test_an_interpreter_with_an_older_compiler_is_rejected_with_both_versions(
    exported_bundle, other_python
):
    folder = packages(other_python)
    folder.joinpath("onnxruntime.py").write_text(
        "__version__ = '1.24.2'\nregister_execution_provider_library = print\n"
    )
    folder.joinpath("onnxruntime_qnn.py").write_text("__version__ = '2.6.1'\n")
    chosen = CompileOptions(toolchains={"qualcomm": str(other_python)}, threads=1)

    with pytest.raises(LoweringError, match=f"does not support `{CHIP}`") as refused:
        compile(exported_bundle, chosen)

    assert "needs onnxruntime-qnn 2.7 or later; version 2.6.1 is installed" in refused.value.why
    assert "--toolchain qualcomm=" in refused.value.hint


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


KILLED = "os.kill(os.getpid(), 9)\n"
MOMENTS = {
    "compile": "        kit.write_json(",  # the compiler has written its file
    "simulate": "    kit.run_samples(",  # it is loaded in the simulator
}


@needs_simulator
@pytest.mark.parametrize("stage", MOMENTS)
def test_a_killed_compiler_is_named_and_the_next_compile_continues(
    exported_bundle, tmp_path, monkeypatch, stage
):
    """The process is killed in the middle of a stage, as the system does if memory runs out."""
    moment = MOMENTS[stage]
    indent = moment[: len(moment) - len(moment.lstrip())]
    script = changed_script(tmp_path, moment, f"{indent}import os\n{indent}{KILLED}")
    before = Bundle.open(exported_bundle).manifest
    seen: list[str] = []

    with monkeypatch.context() as patch:
        patch.setattr(type(TARGET.compiler), "script", script)
        with pytest.raises(LoweringError, match="ended without a result") as failed:
            compile(exported_bundle, OPTIONS)

    program = exported_bundle.with_name("bundle.compile") / CHIP / "cross_kv"
    assert "memory ran out" in failed.value.why
    assert f"{stage}.log" in failed.value.hint
    assert Bundle.open(exported_bundle).manifest == before
    assert (program / "cross_kv.qnn").exists() == (stage == "simulate")

    made = compile(exported_bundle, OPTIONS, progress=seen.append).bundle

    kept = "cross_kv: compile is already finished"
    assert (kept in seen) == (stage == "simulate")
    assert not list(program.glob("partial.*"))
    assert json.loads((program / "built.json").read_text())["nodes"]
    assert made.manifest.status("cross_kv") == "simulated here"
