"""Bundles for Ethos-U: the compiler's estimate, and their graphs, run in the compiler's environment."""

import json
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.apps.bench.acceptance import how_programs_run
from whisperport.apps.cli.main import main
from whisperport.build.compile.artifacts import Artifact, put_artifacts
from whisperport.build.inspect import InspectOptions, inspect
from whisperport.build.plan import PlanOptions, plan
from whisperport.errors import BundleError, LoweringError, MissingPackageError, UsageError
from whisperport.model.trace.program import Program, trace
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.checks import Check
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets import RunOptions, get_target
from whisperport.targets.toolchain import variable
from whisperport.targets.vendors.ethos_u import stages
from whisperport.targets.vendors.ethos_u.compiler import read_estimate, summary
from whisperport.verification.evidence import with_evidence
from whisperport.verification.precision import precisions
from whisperport.verification.report import Report

from ....embedded import default_bundle
from ...test_compiled_files import pte

# Exported bundles, without the compiler: what they hold, and what runs here.

TARGET = get_target("ethos-u85")
EMULATED = RunOptions(threads=1, options={"ethos-u85.emulate": "on"})


def scaled(value: float = 2.0) -> Program:
    import torch

    class Scaled(torch.nn.Module):
        def forward(self, pair: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return pair[0] * value, pair[1] + pair[0]

    pair = [torch.zeros(1, 3), torch.zeros(1, 3)]
    return trace("scaled", Scaled(), (pair,), ["double", "sum"])


@pytest.fixture
def entry(tmp_path: Path) -> Any:
    (made,) = TARGET.lower([scaled()], tmp_path)
    return made


def test_a_lowered_program_is_one_file_of_torch_export_in_float32(entry, tmp_path):
    assert entry.files == ("ethos-u85/scaled.pt2",)
    assert TARGET.emulated_precision("w8a16") == "fp32"
    assert (tmp_path / entry.files[0]).read_bytes()[:2] == b"PK"


def test_a_lowered_program_has_no_paths_of_this_machine(entry, tmp_path):
    here = str(Path(__file__).parent).encode()
    with zipfile.ZipFile(tmp_path / entry.files[0]) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())

    assert any(here in node.meta["stack_trace"].encode() for node in calls(scaled()))
    assert b"scaled" in content
    assert here not in content


def calls(program: Program) -> list[Any]:
    return [node for node in program.exported.graph.nodes if node.op == "call_function"]


def test_inputs_and_outputs_of_an_emulated_program_keep_their_names_and_order(entry, tmp_path):
    runner = TARGET.load(tmp_path, [entry], EMULATED)["scaled"]
    first, second = (tensor.name for tensor in entry.spec.inputs)
    given = {first: np.full((1, 3), 3, np.float32), second: np.full((1, 3), 10, np.float32)}

    outputs = runner.run(given)

    assert list(outputs) == ["double", "sum"]
    np.testing.assert_array_equal(outputs["double"], np.full((1, 3), 6))
    np.testing.assert_array_equal(outputs["sum"], np.full((1, 3), 13))
    np.testing.assert_array_equal(given[first], np.full((1, 3), 3))


def test_a_compiled_program_does_not_run_here_and_the_error_says_where(entry, tmp_path):
    (tmp_path / "ethos-u85" / "scaled.pte").write_bytes(b"compiled")
    compiled = replace(entry, files=("ethos-u85/scaled.pte", *entry.files))

    with pytest.raises(UsageError, match="do not run on this machine") as refused:
        TARGET.load(tmp_path, [compiled], RunOptions())

    assert "delegate" in refused.value.why
    page = "docs/how-to/ethos-u85.md"
    assert page in refused.value.hint
    assert (Path(__file__).parents[4] / page).is_file()


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x04.", bytes(4000)])
def test_a_damaged_lowered_file_is_rejected(entry, tmp_path, content):
    (tmp_path / entry.files[0]).write_bytes(content)

    with pytest.raises(BundleError, match=r"cannot read the lowered program scaled.pt2"):
        TARGET.load(tmp_path, [entry], EMULATED)


def test_inspect_shows_what_the_npu_runs_and_does_not_run_a_compiled_program(
    micro_on_npu: Path, tmp_path: Path
) -> None:
    opened = Bundle.open(Path(shutil.copytree(micro_on_npu, tmp_path / "bundle")))
    spec = opened.manifest.program("encoder").spec
    path = pte(tmp_path, spec)
    facts = TARGET.compiler.check(path, spec)
    made = put_artifacts(opened, {"encoder": Artifact(path=path, suffix=".pte", facts=facts)})

    found = inspect(made.folder, InspectOptions(programs=("encoder",), repeat=1))

    assert found.skipped == ("encoder",)
    (plan,) = found.plans
    assert plan.engines == {"NPU subgraphs": 1, "CPU conversions": 2}


def test_new_keys_and_values_get_the_range_of_those_in_the_cache():
    import torch

    class Range(torch.nn.Module):
        def __init__(self, low: float, high: float) -> None:
            super().__init__()
            self.min_val, self.max_val = torch.tensor(low), torch.tensor(high)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.min_val = torch.minimum(x.min(), self.min_val)
            self.max_val = torch.maximum(x.max(), self.max_val)
            return x

    graph = torch.fx.Graph()
    for name in ("x", "self_k_0"):
        graph.call_module(f"of_{name}", (graph.placeholder(name),))
    made = [graph.call_module(f"of_{name}", (next(iter(graph.nodes)),)) for name in "abc"]
    graph.output([made])
    seen = {
        "of_x": (-9, 9),
        "of_self_k_0": (-3, 5),
        "of_a": (-1, 1),
        "of_b": (-4, 4),
        "of_c": (0, 0),
    }
    modules = {name: Range(*limits) for name, limits in seen.items()}
    prepared = torch.fx.GraphModule(modules, graph)
    settings = {"inputs": ["x", "self_k_0"], "outputs": ["logits", "new_k_0", "new_v_0"]}

    stages._widen_new_state(prepared, settings)

    found = {name: (float(one.min_val), float(one.max_val)) for name, one in modules.items()}
    assert found == {**seen, "of_b": (-4, 5)}


# Read the compiler's estimate: the columns of a real summary, and damaged ones.

COMPILER = get_target("ethos-u85").compiler

# Written by Vela 5.1.0 for the encoder of the embedded model in w8a16, without the columns of accesses.
NAMES = (
    "experiment,network,accelerator_configuration,system_config,memory_mode,core_clock,inference_time,"
    "sram_memory_used,dram_memory_used,on_chip_flash_memory_used,off_chip_flash_memory_used,nn_macs,"
    "cycles_total"
)
VALUES = (
    "default,out,Ethos_U85_256,Ethos_U85_SYS_DRAM_Mid,Sram_Only,1000000000.0,0.129062986,18469.75,0.0,"
    "1501.84375,0.0,3699024000,129062986"
)


def read(tmp_path, text):
    path = tmp_path / "estimate.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_estimate(path)


def test_an_estimate_is_in_seconds_and_bytes_and_says_for_which_memory(tmp_path):
    assert read(tmp_path, f"{NAMES}\n{VALUES}\n") == {
        "estimated_s": 0.129062986,
        "cycles": 129062986,
        "clock_hz": 1e9,
        "sram_bytes": 18469.75 * 1024,
        "dram_bytes": 0,
        "on_chip_flash_bytes": 1501.84375 * 1024,
        "off_chip_flash_bytes": 0,
        "macs": 3699024000,
        "system_config": "Ethos_U85_SYS_DRAM_Mid",
        "memory_mode": "Sram_Only",
    }


def test_users_read_an_estimate_with_its_memory_and_that_nothing_was_measured(tmp_path):
    text = summary(read(tmp_path, f"{NAMES}\n{VALUES}\n"))

    assert text == (
        "Vela estimates 129.1 ms at 1000 MHz, and 18.91 MB of SRAM, 1.538 MB of flash, with "
        "Ethos_U85_SYS_DRAM_Mid and Sram_Only; nothing was measured"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        NAMES,
        f"{NAMES}\n{VALUES}\n{VALUES}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'nan')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'inf')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', '-1')}\n",
        f"{NAMES}\n{VALUES.replace('0.129062986', 'fast')}\n",
        f"{NAMES.replace('cycles_total', 'cycles')}\n{VALUES}\n",
        f"{NAMES}\ndefault,out\n",
        b"\xff\x00" * 100,
        "x" * 200_000,
        f'{NAMES}\n"{VALUES}',
    ],
)
def test_a_damaged_summary_gives_no_estimate(tmp_path, text):
    assert read(tmp_path, text) == {}


def test_a_missing_summary_gives_no_estimate(tmp_path):
    assert read_estimate(tmp_path / "estimate.csv") == {}
    assert read_estimate(tmp_path) == {}


def test_the_plan_of_a_compiled_bundle_lists_what_the_compiler_estimated(
    tmp_path, capsys, monkeypatch
):
    """The bundle is the embedded one, as if its encoder was compiled."""
    bundle = estimated_bundle(tmp_path, read(tmp_path, f"{NAMES}\n{VALUES}\n"))

    made = plan(bundle)
    monkeypatch.setattr(sys, "argv", ["whisperport", "plan", str(bundle)])
    with pytest.raises(SystemExit) as ended:
        main()

    assert made
    assert not ended.value.code
    assert (made.target, made.precision, made.machines) == ("ethos-u85", "w8a16", ())
    (one,) = made.compiled
    assert (one.program, one.estimate.seconds, one.estimate.cycles) == (
        "encoder",
        0.129062986,
        129062986,
    )
    assert one.estimate.memory_bytes == {"SRAM": 18469.75 * 1024, "flash": 1501.84375 * 1024}
    assert "1000 MHz, Ethos_U85_SYS_DRAM_Mid, Sram_Only" in one.estimate.conditions
    printed = capsys.readouterr().out
    assert "estimates of ExecuTorch 1.5 with Vela 5.1; nothing was run or measured" in printed
    assert "encoder  129.1 ms  129.1 M  18.91 MB of SRAM, 1.538 MB of flash" in printed
    assert plan(
        bundle, PlanOptions(target="aws-neuron", batch=2)
    ).machines  # an option asks for a target's machines


@pytest.mark.parametrize(
    "estimate",
    [{}, [], 1, {"cycles": "many"}, "changed", {"estimated_s": -1}, {"estimated_s": 10**400}],
    ids=lambda value: str(value)[:24],
)
def test_a_manifest_with_another_estimate_has_none(tmp_path, estimate):
    whole = read(tmp_path, f"{NAMES}\n{VALUES}\n")
    changed = {**whole, **estimate} if isinstance(estimate, dict) and estimate else estimate

    assert COMPILER.estimate({"estimate": whole}) is not None
    assert COMPILER.estimate({"estimate": changed}) is None
    assert COMPILER.estimate({}) is None


def estimated_bundle(folder: Path, estimate: dict[str, Any]) -> Path:
    opened = Bundle.open(Path(shutil.copytree(default_bundle(), folder / "bundle")))
    file = folder / "encoder.pte"
    file.write_bytes(b"compiled")
    programs = tuple(
        replace(one, placement=Placement("ethos-u85", "w8a16"))
        if one.spec.name == "encoder"
        else one
        for one in opened.manifest.programs
    )
    placed = replace(opened, manifest=replace(opened.manifest, programs=programs))
    artifact = Artifact(path=file, suffix=".pte", facts={"estimate": estimate})
    return put_artifacts(placed, {"encoder": artifact}).folder


# The quantized graphs of a bundle, run in the compiler's environment

# An interpreter whose packages of the toolchain are small ones that a test writes.

VERSIONS = {
    "executorch": "1.5.1",
    "ethos_u_vela": "5.1.0",
    "tosa_tools": "2026.5.0",
    "torch": "2.13.0",
}


def interpreter(
    folder: Path, files: Mapping[str, str], versions: Mapping[str, str], options: str = ""
) -> Path:
    """Write the packages, and a command that runs this Python with them.

    Args:
        folder: for the packages and the command.
        files: path of a module -> its text.
        versions: distribution -> version, in addition to `VERSIONS`.
        options: of the interpreter.
    """
    packages = folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    for file, text in files.items():
        path = packages / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name, version in {**VERSIONS, **versions}.items():
        described = packages / f"{name}-{version}.dist-info" / "METADATA"
        described.parent.mkdir()
        described.write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} {options} "$@"\n')
    python.chmod(0o755)
    return python


# The quantized graphs of a bundle, run in the compiler's environment.
#
# The reference model is replaced by a small package: its graph is the name of what it computes. The
# process, the driver, the stage script and everything in whisperport are the real ones.

TOSA = RunOptions(options={"ethos-u85.emulate": "quantized"})
TORCH = RunOptions(options={"ethos-u85.emulate": "on"})
MODEL = """
import enum, os
class GraphStatus(enum.Enum):
    TOSA_VALID = 0
    TOSA_ERROR = 1
def run(graph, inputs, *, verbosity):
    if graph == b"dies":
        os._exit(5)
    if graph == b"error":
        return [], GraphStatus.TOSA_ERROR
    assert graph == b"sum and first"
    first, second = inputs
    return [first + second, first], GraphStatus.TOSA_VALID
"""
X, Y = TensorSpec("x", (1, 3)), TensorSpec("y", (1, 3))
SPEC = ProgramSpec("toy", (X, Y), (TensorSpec("sum", (1, 3)), TensorSpec("same", (1, 3))))
INPUTS = {"x": np.float32([[1, 2.26, -3]]), "y": np.float32([[0.5, 0, 1e9]])}


def tensor(scale: float, **more: Any) -> dict[str, Any]:
    limits = {"zero_point": 0, "low": -32767, "high": 32767, "dtype": "int16"}
    return {"scale": scale, **limits, **more}


# The graph has the inputs in another order than the program.
TENSORS = {
    "inputs": [tensor(0.5, name="y"), tensor(0.5, name="x")],
    "outputs": [tensor(0.5, index=0), tensor(0.5, index=1)],
}


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., ProgramEntry]:
    """Write the files that `compile` puts into a bundle for one program."""

    def make(graph: bytes = b"sum and first", tensors: bytes | None = None) -> ProgramEntry:
        folder = tmp_path / "ethos-u85"
        folder.mkdir(exist_ok=True)
        described = json.dumps(TENSORS).encode() if tensors is None else tensors
        files = {".pte": b"", ".pt2": b"", ".tosa": graph, ".json": described}
        for suffix, content in files.items():
            (folder / f"toy{suffix}").write_bytes(content)
        return ProgramEntry(
            spec=SPEC,
            placement=Placement("ethos-u85", "w8a16"),
            method="toy",
            files=tuple(f"ethos-u85/toy{suffix}" for suffix in files),
        )

    return make


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(**versions: str) -> None:
        python = interpreter(tmp_path, {"tosa_reference_model.py": MODEL}, versions)
        monkeypatch.setenv(variable("ethos-u"), str(python))

    return use


def test_a_graph_gets_integers_by_name_and_its_outputs_are_numbers_again(made, toolchain, tmp_path):
    toolchain()

    runner = TARGET.load(tmp_path, [made()], TOSA)["toy"]
    outputs = runner.run(INPUTS)

    np.testing.assert_array_equal(outputs["same"], np.float32([[0.5, 0, 16383.5]]))  # cut off
    # 2.26 is 4.52 steps of 0.5, so 5; -6 + 32767 is 32761.
    np.testing.assert_array_equal(outputs["sum"], np.float32([[1.5, 2.5, 16380.5]]))


@pytest.mark.parametrize(
    ("graph", "why"),
    [(b"error", "TOSA_ERROR"), (b"other", "AssertionError"), (b"dies", "exit status 5")],
)
def test_a_graph_that_fails_is_an_error_that_names_the_program(
    made, toolchain, tmp_path, graph, why
):
    toolchain()
    runner = TARGET.load(tmp_path, [made(graph)], TOSA)["toy"]

    with pytest.raises(BundleError, match="`toy`") as failed:
        runner.run(INPUTS)

    assert "the TOSA reference model" in failed.value.what
    assert why in failed.value.why


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        json.dumps({**TENSORS, "inputs": TENSORS["inputs"][:1]}).encode(),
        json.dumps({**TENSORS, "outputs": []}).encode(),
        json.dumps(TENSORS).replace("int16", "object").encode(),
        json.dumps(TENSORS).replace('"index": 1', '"index": 9').encode(),
    ],
    ids=["empty", "deep", "fewer inputs", "no outputs", "another type", "no such output"],
)
def test_a_damaged_description_of_the_tensors_is_an_error(made, toolchain, tmp_path, content):
    toolchain()

    with pytest.raises(BundleError):
        TARGET.load(tmp_path, [made(tensors=content)], TOSA)["toy"].run(INPUTS)


def test_a_program_without_its_graph_says_that_it_must_be_compiled(made, tmp_path):
    entry = made()

    for missing in (".tosa", ".json"):
        kept = tuple(file for file in entry.files if not file.endswith(missing))
        with pytest.raises(BundleError, match="no quantized graph of `toy`") as failed:
            TARGET.load(tmp_path, [replace(entry, files=kept)], TOSA)
        assert "whisperport compile" in failed.value.hint


def test_a_missing_environment_says_what_to_set(made, tmp_path, monkeypatch):
    monkeypatch.delenv(variable("ethos-u"), raising=False)

    with pytest.raises(MissingPackageError, match="reference model is not installed") as missing:
        TARGET.load(tmp_path, [made()], TOSA)

    assert "WHISPERPORT_TOOLCHAIN_ETHOS_U" in missing.value.why
    assert "emulate=on" in missing.value.hint


def test_an_environment_of_another_version_is_rejected(made, toolchain, tmp_path):
    toolchain(ethos_u_vela="4.5.0")

    with pytest.raises(LoweringError, match="cannot be used") as wrong:
        TARGET.load(tmp_path, [made()], TOSA)

    assert "ethos-u-vela 5.1 is needed" in wrong.value.why


def test_a_run_of_the_graph_is_an_emulation_in_the_precision_of_the_compiled_file():
    opened = Bundle.open(default_bundle())
    entry = opened.manifest.program("step")
    compiled = replace(
        entry,
        placement=Placement("ethos-u85", "w8a16"),
        files=("ethos-u85/step.pte", *entry.files),
        facts=ProgramFacts(compiler="version 1"),
    )
    files = {**opened.manifest.files, compiled.files[0]: opened.manifest.files[entry.files[0]]}
    manifest = replace(opened.manifest, programs=(compiled,), files=files)
    check = Check(
        level="arrays", program="step", what="logits", value={"dB": 40.0}, rule="", passed=True
    )

    evidence = (
        with_evidence(manifest, Report(subject="", checks=(check,)), TOSA.options)
        .program("step")
        .evidence
    )

    assert evidence[-1].kind == "emulated"  # the TOSA graph is not the NPU's command stream
    assert set(evidence[-1].files) == set(entry.files)
    assert evidence[-1].runtime == {TARGET.compiler.title: "version 1"}
    assert how_programs_run(manifest, TOSA.options) == {"step": "emulated on the CPU"}
    changed = replace(opened, manifest=manifest)
    assert precisions(changed, TOSA) == {"step": "w8a16"}
    assert precisions(changed, TORCH) == {"step": "fp32"}
