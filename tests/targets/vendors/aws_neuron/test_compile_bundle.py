"""`compile` of a bundle: without the SDK, with a wrong one, and with a fake that compiles nothing."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.program.bundle import Bundle
from whisperport.system.progress import reporting
from whisperport.targets.vendors.aws_neuron.compiler import NeuronCompiler

from ....extent import EVERYTHING

HERE = Path(__file__).parent
NAME = "aws-neuron"


@pytest.fixture
def bundle(exported: Callable[..., Bundle], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported(NAME, "one layer").folder, tmp_path / "bundle"))


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompileOptions:
    """This interpreter as the toolchain, with the fake SDK and a `neuronx-cc` that nothing starts."""
    sdk = tmp_path / "sdk"
    sdk.mkdir()
    shutil.copy(HERE / "fake_torch_neuronx.py", sdk / "torch_neuronx.py")
    shutil.copy(HERE / "signatures.json", sdk)
    (sdk / "neuronx-cc").write_text("#!/bin/false\n")
    (sdk / "neuronx-cc").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(sdk))
    monkeypatch.setenv("PATH", str(sdk), prepend=os.pathsep)
    return CompileOptions(work=tmp_path / "work", toolchains={NAME: sys.executable})


def test_without_the_sdk_a_folder_for_another_machine_is_left(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match="torch-neuronx is not installed here") as raised:
        compile(bundle, CompileOptions(work=tmp_path / "work"))

    assert "--toolchain aws-neuron=/path/to/python" in raised.value.hint
    assert "no device" in raised.value.hint
    work = tmp_path / "work" / NAME
    assert {"job.json", "compile.py", "stages.py"} <= {path.name for path in work.iterdir()}
    folders = [path for path in work.iterdir() if path.is_dir()]
    names = {entry.spec.name for entry in Bundle.open(bundle).manifest.programs}
    assert {folder.name for folder in folders} == names
    weights = [folder / "fp32.safetensors" for folder in folders]
    assert len({path.stat().st_ino for path in weights}) == 1, "the weights are stored once"
    assert weights[0].stat().st_ino != (bundle / NAME / "fp32.safetensors").stat().st_ino
    assert all((folder / "neuron_modules.py").is_file() for folder in folders)


def test_an_sdk_for_another_torch_is_an_error_before_the_work_begins(
    bundle: Path, options: CompileOptions
) -> None:
    with pytest.raises(LoweringError, match="does not support `aws-neuron`") as raised:
        compile(bundle, options)

    assert f"torch {torch.__version__} is installed" in raised.value.why
    assert "expected torch 2.9" in raised.value.why
    assert not (options.work / NAME).exists()


@pytest.mark.skipif(not EVERYTHING, reason="make test-all: it traces every program")
def test_what_a_fake_wrote_is_rejected_and_the_bundle_stays(
    bundle: Path, options: CompileOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (bundle / "manifest.json").read_bytes()
    settings = {"torch": [torch.__version__.rpartition(".")[0]]}
    monkeypatch.setattr(NeuronCompiler, "settings", lambda _self: settings)
    said: list[str] = []

    failure = pytest.raises(BundleError, match="not a file that AWS's torch-neuronx compiled")
    with failure as raised, reporting(said.append):
        compile(bundle, options)

    assert "without a Neuron graph" in raised.value.why
    assert (bundle / "manifest.json").read_bytes() == before
    programs = [entry.spec.name for entry in Bundle.open(bundle).manifest.programs]
    assert [line for line in said if line.endswith(": compile")] == [
        f"{name}: compile" for name in programs
    ]
    evidence: list[Any] = [
        one.kind for entry in Bundle.open(bundle).manifest.programs for one in entry.evidence
    ]
    assert "compiled" not in evidence
