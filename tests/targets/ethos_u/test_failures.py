"""What `compile` reports when the toolchain is wrong, fails, or is killed: it runs in a real process.

The packages of the toolchain are replaced by small ones, whose first call fails. The driver, the stage
script and everything in whisperport are the real ones.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from whisperport.compilation.compile import CompileOptions, compile
from whisperport.errors import LoweringError, UsageError

from .small_packages import interpreter

# `torch.export.load` of the quantize stage is the first call of the SDK.
TORCH = "import os, signal\nclass export:\n    @staticmethod\n    def load(path):\n        {0}\n"
OTHER_MODULES = {
    "executorch/backends/arm/ethosu.py": "EthosUCompileSpec = None",
    "executorch/backends/arm/quantizer.py": "EthosUQuantizer = None",
    "torchao/quantization/pt2e/quantize_pt2e.py": "convert_pt2e = prepare_pt2e = None",
}


@pytest.fixture
def toolchain(tmp_path: Path) -> Callable[..., Path]:
    """Make an interpreter with packages of these versions, whose `torch.export.load` runs a statement."""

    def make(statement: str = "pass", **versions: str) -> Path:
        files = {**OTHER_MODULES, "torch.py": TORCH.format(statement)}
        return interpreter(tmp_path, files, versions, "-S")

    return make


@pytest.fixture
def run(micro_on_npu: Path, tmp_path: Path) -> Callable[..., None]:
    """Compile the micro model; the bundle must not change."""

    def start(python: Path, work: Path = tmp_path / "work", **options: str) -> None:
        chosen = CompileOptions(
            calibration=micro_on_npu.with_name("calibration.npy"),
            work=work,
            threads=1,
            toolchains={"ethos-u": os.fspath(python)},
            options={
                "ethos-u85.emulate": "0",
                **{f"ethos-u85.{name}": value for name, value in options.items()},
            },
        )
        before = (micro_on_npu / "manifest.json").read_bytes()
        try:
            compile(micro_on_npu, chosen)
        finally:
            assert (micro_on_npu / "manifest.json").read_bytes() == before

    return start


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder for several failures: the calibration set is computed once."""
    return tmp_path_factory.mktemp("work")


def test_a_toolchain_of_another_version_is_rejected_before_anything_is_computed(
    run, toolchain, tmp_path
):
    with pytest.raises(LoweringError, match="does not support `ethos-u85`") as wrong:
        run(toolchain(ethos_u_vela="4.5.0"))

    assert "ethos-u-vela 5.1 is needed; version 4.5.0 is installed" in wrong.value.why
    assert "--toolchain ethos-u=" in wrong.value.hint
    assert not (tmp_path / "work").exists()


def test_an_interpreter_without_the_packages_is_named_before_anything_is_computed(run, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)

    with pytest.raises(LoweringError, match="cannot be used") as missing:
        run(bare)

    assert "executorch" in missing.value.why
    assert not (tmp_path / "work").exists()


def test_a_chip_that_does_not_exist_is_rejected_before_audio_is_processed(run, toolchain, tmp_path):
    with pytest.raises(UsageError, match=r"`ethos-u85.macs` cannot be `300`") as wrong:
        run(toolchain(), macs="300")

    assert "256, 128, 512, 1024, 2048" in wrong.value.hint
    assert not list((tmp_path / "work").rglob("*.npy"))


@pytest.mark.parametrize(
    ("statement", "happened", "why"),
    [
        (
            "raise MemoryError('cannot allocate 9 GiB')",
            "ran out of memory",
            "cannot allocate 9 GiB",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended without a result", "memory ran out"),
        ("os._exit(3)", "ended without a result", "exit status 3"),
        ("raise RuntimeError('no such operator')", "failed", "no such operator"),
    ],
    ids=["out of memory", "killed", "exit", "exception"],
)
def test_a_compiler_that_fails_is_reported_with_its_stage_and_log(
    run, toolchain, work, statement, happened, why
):
    with pytest.raises(LoweringError, match=happened) as failed:
        run(toolchain(statement), work)

    log = work / "ethos-u85" / "encoder" / "quantize.log"
    assert "encoder, quantize: " in failed.value.why
    assert why in failed.value.why
    assert str(log) in failed.value.hint
    assert log.is_file()
