"""Compile a random model of a few kilobytes with the real compiler, and run its graph.

Skipped where the variable of the toolchain is not set: it needs an environment of its own.
"""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions, get_target
from whisperport.targets.toolchain import variable
from whisperport.targets.vendors.ethos_u.chips import NPUS, U85

from .conftest import NPU_PROGRAMS

VARIABLE = variable("ethos-u")
PYTHON = os.environ.get(VARIABLE, "")
ONE = RunOptions(threads=1)
EMULATED = RunOptions(threads=1, options={"ethos-u85.emulate": "on"})
TOSA = RunOptions(threads=1, options={"ethos-u85.emulate": "quantized"})

pytestmark = pytest.mark.skipif(not PYTHON, reason=f"needs the compiler: set {VARIABLE}")


@pytest.fixture(scope="module")
def compiled(micro_on_npu: Path) -> Bundle:
    bundle = shutil.copytree(micro_on_npu, micro_on_npu.with_name("compiled"))
    options = CompileOptions(
        calibration=micro_on_npu.with_name("calibration.npy"), threads=1, allow_unverified=True
    )
    return compile(bundle, options).bundle


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


def test_a_compiled_program_does_not_run_here_and_is_emulated(compiled):
    target = get_target("ethos-u85")
    entries = [compiled.manifest.program(name) for name in NPU_PROGRAMS]

    with pytest.raises(UsageError, match="do not run on this machine"):
        target.load(compiled.folder, entries, ONE)
    assert set(target.load(compiled.folder, entries, EMULATED)) == set(NPU_PROGRAMS)


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


def test_a_compiled_file_has_no_paths_of_this_machine(compiled):
    for name in NPU_PROGRAMS:
        for file in compiled.manifest.program(name).files:
            content = compiled.path(file).read_bytes()
            assert str(compiled.folder.parent).encode() not in content
            assert str(Path(PYTHON).parents[1]).encode() not in content


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


def test_the_compilers_own_table_has_every_number_of_mac_units():
    script = (
        "from ethosu.vela.architecture_features import Accelerator as A; print(A.member_list())"
    )
    done = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, check=True)

    assert all(npu.accelerator(macs) in done.stdout for npu in NPUS for macs in npu.macs)
    assert replace(U85, name="ethos-u95").accelerator(256) not in done.stdout
