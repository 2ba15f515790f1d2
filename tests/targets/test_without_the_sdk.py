"""What `compile` and `load` say where a vendor's SDK is missing, or is another one."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions, get_target
from whisperport.targets.toolchain import variable

PROGRAM = "cross_kv"  # the smallest
# Target -> what the user must install, and the lowered file.
CHIPS = {
    "rk3588": ("pip install rknn-toolkit2", ".onnx"),
    "sm8650": ('pip install "whisperport[qualcomm]"', ".onnx"),
    "genio720": ("NeuroPilot SDK", ".tflite"),
}


@pytest.fixture(scope="module", params=CHIPS)
def bundle(request: pytest.FixtureRequest, micro_bundle_on: Callable[[str, str], Path]) -> Path:
    return micro_bundle_on(request.param, PROGRAM)


@pytest.fixture
def chip(bundle: Path) -> str:
    return Bundle.open(bundle).manifest.program(PROGRAM).target


@pytest.fixture(autouse=True)
def nothing_is_installed(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = get_target(chip).compiler
    assert compiler is not None
    for name in (variable(compiler.toolchain), *compiler.variables):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, compiler.sdk, None)


def test_a_work_folder_is_prepared_and_the_error_says_what_to_do(
    bundle: Path, chip: str, tmp_path: Path
) -> None:
    before, work = (bundle / "manifest.json").read_bytes(), tmp_path / "work"
    how, suffix = CHIPS[chip]

    with pytest.raises(MissingPackageError, match="not compiled yet") as missing:
        compile(bundle, CompileOptions(work=work, threads=1))

    assert variable(get_target(chip).compiler.toolchain) in missing.value.hint
    assert how in missing.value.hint
    assert (work / chip / PROGRAM / f"{PROGRAM}{suffix}").is_file()
    assert (work / chip / "compile.py").is_file()
    assert (bundle / "manifest.json").read_bytes() == before


def test_an_sdk_that_is_none_is_named_before_anything_is_computed(
    bundle: Path, chip: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)
    compiler = get_target(chip).compiler
    given = tmp_path if compiler.is_command else python
    options = CompileOptions(toolchains={compiler.toolchain: str(given)}, work=tmp_path / "work")

    with pytest.raises(LoweringError, match="cannot be used") as missing:
        compile(bundle, options)

    assert missing.value.why
    assert f"--toolchain {compiler.toolchain}=" in missing.value.hint
    assert not (tmp_path / "work").exists()


def test_a_bundle_that_is_not_compiled_says_so(bundle: Path, chip: str) -> None:
    manifest = Bundle.open(bundle).manifest

    with pytest.raises(BundleError, match=f"is not compiled for `{chip}` yet") as missing:
        get_target(chip).load(bundle, [manifest.program(PROGRAM)], RunOptions())

    assert "whisperport compile BUNDLE" in missing.value.hint
    assert f"{chip}.emulate=on" in missing.value.hint
    assert {one.kind for one in manifest.evidence(PROGRAM)} <= {"emulated", "partitioned"}
