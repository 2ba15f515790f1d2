"""The quantized graphs of a bundle, run in the compiler's environment."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.apps.bench.acceptance import how_programs_run
from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.checks import Check
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets import RunOptions, get_target
from whisperport.targets.toolchain import variable
from whisperport.verification.evidence import with_evidence
from whisperport.verification.precision import precisions
from whisperport.verification.report import Report

from ....embedded import default_bundle

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

TARGET = get_target("ethos-u85")
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
