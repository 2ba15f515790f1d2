"""The plan of the compiler, the check of its files, its errors, and the stage script without its SDK.

Where the variable of the toolchain is set, a random model of a few kilobytes is compiled for real, and run.
"""

import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from whisperport.build.compile.compile import CompileOptions as BundleOptions
from whisperport.build.compile.compile import compile
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.dims import Dims
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets import RunOptions, get_target
from whisperport.targets.compiler import CompileRequest
from whisperport.targets.toolchain import variable
from whisperport.targets.vendors.ethos_u import stages
from whisperport.targets.vendors.ethos_u.chips import NPUS, U55, U65, U85
from whisperport.targets.vendors.ethos_u.compiler import VERSIONS, CompileOptions, EthosUCompiler

from ....extent import EVERYTHING
from ....micro import DIMS
from .conftest import NPU_PROGRAMS

MEL, FEATURES = (1, 8, 20), (1, 10, 16)
ENCODER = ProgramSpec("encoder", (TensorSpec("mel", MEL),), (TensorSpec("features", FEATURES),))
INSTALLED = "executorch 1.5.1, ethos-u-vela 5.1.0, tosa-tools 2026.5.0, torch 2.13.0+cpu"


def request(folder: Path, dims: Dims = DIMS, **options) -> CompileRequest:
    return CompileRequest(
        spec=ENCODER,
        dims=dims,
        options=CompileOptions(**options),
        folder=folder,
        files=("encoder.pt2",),
        arrays=("calibration_mel.npy",),
        samples=2,
        emulation=("emulated_mel.npy",) if options.get("emulate", 2) else (),
    )


# What is asked of the compiler ----------------------------------------------------------------------


@pytest.fixture(params=NPUS, ids=lambda npu: npu.name)
def npu(request):
    return request.param


def test_the_stages_quantize_compile_and_run_the_graph_that_was_compiled(tmp_path):
    plan = EthosUCompiler(U85).plan(request(tmp_path))

    assert [stage.name for stage in plan.stages] == ["quantize", "compile", "emulate"]
    quantize, compiled, emulate = plan.stages
    assert quantize.reads == ("encoder.pt2", "calibration_mel.npy")
    assert compiled.reads == quantize.writes
    assert plan.artifact in compiled.writes
    assert set(emulate.reads) - {"emulated_mel.npy"} < set(compiled.writes)
    assert plan.settings["emulated_inputs"] == {"mel": "emulated_mel.npy"}
    assert set(stages.STAGES) == {stage.name for stage in plan.stages}


def test_without_emulation_nothing_is_run_and_nothing_is_compared(tmp_path):
    compiler = EthosUCompiler(U85)

    plan = compiler.plan(request(tmp_path, emulate=0))

    assert [stage.name for stage in plan.stages] == ["quantize", "compile"]
    assert compiler.emulation(ENCODER, CompileOptions(emulate=0)) is None


def test_what_the_reference_model_computes_is_never_called_a_simulation():
    need = EthosUCompiler(U85).emulation(ENCODER, CompileOptions())

    assert need.kind == "emulated"  # the TOSA graph is not the command stream
    assert need.decides


@pytest.mark.parametrize("precision", U85.precisions)
def test_a_program_is_quantized_in_its_own_precision(tmp_path, precision):
    settings = EthosUCompiler(U85).in_precision(precision).plan(request(tmp_path)).settings

    assert settings["precision"] == precision


@pytest.mark.parametrize(
    ("npu", "option", "value"),
    [
        (U85, "macs", 32),
        (U65, "macs", 128),
        (U55, "memory_mode", "Dedicated_Sram_384KB"),
        (U65, "system_config", "Ethos_U85_SYS_DRAM_Mid"),
        (U65, "driver", "linux"),
    ],
    ids=str,
)
def test_what_an_npu_does_not_have_is_a_usage_error_that_lists_what_it_has(
    tmp_path, npu, option, value
):
    with pytest.raises(UsageError, match=str(value)) as refused:
        EthosUCompiler(npu).plan(request(tmp_path, **{option: value}))

    assert f"{npu.name}.{option.replace('_', '-')}" in refused.value.what
    assert "expected one of" in refused.value.hint


# What the compiler wrote ----------------------------------------------------------------------------


class Ranked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x * 2)[0]


@pytest.mark.skipif(not EVERYTHING, reason="importing ExecuTorch takes seconds; make test-all")
def test_a_compiled_program_is_described_with_its_signature_and_what_runs_where():
    exir = pytest.importorskip("executorch.exir")
    exported = torch.export.export(Ranked(), (torch.zeros(2, 3),))
    finished = exir.to_edge_transform_and_lower({"encoder": exported}).to_executorch()

    assert stages.described(finished.executorch_program) == {
        "subgraphs": 0,
        "undelegated": [
            "dim_order_ops::_to_dim_order_copy.out",
            "aten::mul.out",
            "aten::sort.values",
        ],
        "inputs": ["[2, 3] float32"],
        "outputs": ["[2, 3] float32"],
    }


# The stage script, without its SDK ------------------------------------------------------------------


def test_the_versions_that_were_tried_are_supported():
    assert stages.check(INSTALLED, {"versions": VERSIONS}) == ""


@pytest.mark.parametrize(
    ("installed", "why"),
    [
        (
            INSTALLED.replace("vela 5.1.0", "vela 4.5.0"),
            "ethos-u-vela 5.1 is needed; version 4.5.0",
        ),
        (INSTALLED.replace("executorch 1.5.1", "executorch 1.2.0"), "executorch 1.5 is needed"),
        (INSTALLED.replace("torch 2.13.0", "torch 2.9.1"), "torch 2.13 is needed; version 2.9.1"),
        ("executorch 1.5.1", "ethos-u-vela 5.1 is needed; version unknown"),
    ],
)
def test_other_versions_are_rejected_by_name(installed, why):
    assert why in stages.check(installed, {"versions": VERSIONS})


@pytest.fixture
def reference_model(monkeypatch):
    """A reference model that returns its inputs, the last one first."""
    fake = types.ModuleType("tosa_reference_model")
    fake.GraphStatus = types.SimpleNamespace(TOSA_VALID="valid")
    fake.status = "valid"
    fake.given = []

    def run(graph, inputs, *, verbosity):
        fake.given[:] = inputs
        return list(reversed(inputs)), fake.status

    fake.run = run
    monkeypatch.setitem(sys.modules, "tosa_reference_model", fake)
    return fake


def tensor(name: str, scale: float, zero_point: int = 0, dtype: str = "int16") -> dict:
    low, high = (-32767, 32767) if dtype == "int16" else (-128, 127)
    return {
        "name": name,
        "scale": scale,
        "zero_point": zero_point,
        "low": low,
        "high": high,
        "dtype": dtype,
    }


def test_inputs_reach_the_graph_by_name_in_its_own_order_as_integers(reference_model):
    described = {
        "inputs": [tensor("mask", 2.0, 3, "int8"), tensor("x", 0.5)],
        "outputs": [{**tensor("", 0.25, 1), "index": 0}, {**tensor("", 1.0), "index": 1}],
    }
    x, mask = np.array([[1.0, -2.25]], np.float32), np.array([-64.0, 1e9, -1e9], np.float32)

    first, second = stages.run_graph(b"", described, {"x": x, "mask": mask})

    given_mask, given_x = reference_model.given
    assert (given_mask.dtype, given_x.dtype) == (np.int8, np.int16)
    np.testing.assert_array_equal(given_mask, [-29, 127, -128])  # clipped, not wrapped
    np.testing.assert_array_equal(given_x, [[2, -4]])  # half to even
    np.testing.assert_array_equal(first, [[0.25, -1.25]])
    np.testing.assert_array_equal(second, [-29, 127, -128])
    assert first.dtype == np.float32


def test_a_graph_that_the_reference_model_rejects_is_an_error(reference_model):
    reference_model.status = "unpredictable"
    described = {"inputs": [tensor("x", 0.5)], "outputs": [{**tensor("", 1.0), "index": 0}]}

    with pytest.raises(stages.OtherGraphError, match="unpredictable"):
        stages.run_graph(b"", described, {"x": np.zeros((1, 2), np.float32)})


VARIABLE = variable("ethos-u")
PYTHON = os.environ.get(VARIABLE, "")
ONE = RunOptions(threads=1)
EMULATED = RunOptions(threads=1, options={"ethos-u85.emulate": "on"})
TOSA = RunOptions(threads=1, options={"ethos-u85.emulate": "quantized"})

with_the_toolchain = pytest.mark.skipif(not PYTHON, reason=f"needs the compiler: set {VARIABLE}")


@pytest.fixture(scope="module")
def compiled(micro_on_npu: Path) -> Bundle:
    bundle = shutil.copytree(micro_on_npu, micro_on_npu.with_name("compiled"))
    options = BundleOptions(
        calibration=micro_on_npu.with_name("calibration.npy"), threads=1, allow_unverified=True
    )
    return compile(bundle, options).bundle


@with_the_toolchain
def test_each_program_is_one_subgraph_and_its_graph_agrees_with_float32(compiled):
    for name in NPU_PROGRAMS:
        entry = compiled.manifest.program(name)
        assert entry.facts.compiled_for == "ethos-u85-256"
        assert entry.facts.plan["NPU subgraphs"] == 1
        assert b"COP1" in compiled.path(entry.files[0]).read_bytes()  # without an operating system
        assert entry.facts.target_facts["estimate"]["estimated_s"] > 0
        assert entry.facts.notes[0].startswith("Vela estimates")
        assert compiled.manifest.status(name) == "compiled here"
        (run,) = (
            one
            for one in compiled.manifest.evidence(name)
            if one.kind == "emulated" and any(file.endswith(".tosa") for file in one.files)
        )
        arrays = [check for check in run.checks if "sqnr_db" in check.value]
        # Inputs in another order or of another scale give 3 dB and less.
        assert min(float(check.value["sqnr_db"]) for check in arrays) > 20


@with_the_toolchain
def test_a_compiled_program_does_not_run_here_and_is_emulated(compiled):
    target = get_target("ethos-u85")
    entries = [compiled.manifest.program(name) for name in NPU_PROGRAMS]

    with pytest.raises(UsageError, match="do not run on this machine"):
        target.load(compiled.folder, entries, ONE)
    assert set(target.load(compiled.folder, entries, EMULATED)) == set(NPU_PROGRAMS)


@with_the_toolchain
def test_a_loaded_graph_computes_what_the_stage_computed(compiled):
    runners = get_target("ethos-u85").load(
        compiled.folder, [compiled.manifest.program(name) for name in NPU_PROGRAMS], TOSA
    )
    for name, runner in runners.items():
        folder = compiled.folder.with_name("compiled.compile") / "ethos-u85" / name
        inputs = {
            tensor.name: np.load(folder / f"emulated_{tensor.name}.npy")[0]
            for tensor in runner.spec.inputs
        }

        for output, array in runner.run(inputs).items():
            expected = np.load(folder / f"emulated_output_{output}.npy")[0]
            np.testing.assert_array_equal(array, expected, strict=True)


@with_the_toolchain
def test_a_compiled_file_has_no_paths_of_this_machine(compiled):
    for name in NPU_PROGRAMS:
        for file in compiled.manifest.program(name).files:
            content = compiled.path(file).read_bytes()
            assert str(compiled.folder.parent).encode() not in content
            assert str(Path(PYTHON).parents[1]).encode() not in content


@with_the_toolchain
def test_defaults_are_names_that_executorch_and_vela_know():
    script = (
        "import json, sys\n"
        "from executorch.backends.arm.ethosu import EthosUCompileSpec as S\n"
        "names = sys.argv[1:]\n"
        "print(json.dumps([S._default_system_config_and_memory_mode(n, None, None) for n in names]))\n"
    )
    done = subprocess.run(
        [PYTHON, "-c", script, *(npu.name for npu in NPUS)],
        capture_output=True,
        text=True,
        check=True,
    )

    for npu, (system, mode) in zip(NPUS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert system == npu.system_configs[0]
        assert mode in npu.memory_modes


@with_the_toolchain
def test_the_compilers_own_table_has_every_number_of_mac_units():
    script = (
        "from ethosu.vela.architecture_features import Accelerator as A; print(A.member_list())"
    )
    done = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, check=True)

    assert all(npu.accelerator(macs) in done.stdout for npu in NPUS for macs in npu.macs)
    assert replace(U85, name="ethos-u95").accelerator(256) not in done.stdout
