"""The runtime for boards, with a fake of the vendor's package: its calls, results and errors."""

import gc
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import BundleError, LoweringError, MissingPackageError, UsageError
from whisperport.targets.vendors.rockchip import runtime
from whisperport.targets.vendors.rockchip.chips import CHIPS
from whisperport.targets.vendors.rockchip.runtime import load_rknn_files

from .rknn_bytes import SPEC, description, rknn_bytes

Compute = Callable[[Sequence[np.ndarray]], list[np.ndarray] | None]


class FakeLite(types.ModuleType):
    """A fake `rknnlite.api`, with the signatures of rknn-toolkit-lite2 2.5.0; `calls` lists all calls.

    It computes nothing of a file: a test says what comes out. A call with other arguments than the real
    package has is a TypeError.
    """

    def __init__(self, compute: Compute) -> None:
        super().__init__("rknnlite.api")
        self.calls: list[tuple[str, Any]] = []
        self.codes = {"load_rknn": 0, "init_runtime": 0}
        fake = self

        class RKNNLite:
            """The class of the real package, with its own names and defaults."""

            def __init__(self, verbose=False, verbose_file=None):
                pass

            def load_rknn(self, path, key_path=None):
                fake.calls.append(("load_rknn", path))
                return fake.codes["load_rknn"]

            def init_runtime(self, target=None, device_id=None, async_mode=False, core_mask=0):
                fake.calls.append(("init_runtime", core_mask))
                return fake.codes["init_runtime"]

            def inference(
                self,
                inputs,
                data_type=None,
                data_format=None,
                inputs_pass_through=None,
                get_frame_id=False,
                reuse_outputs=False,
            ):
                fake.calls.append(("inference", (data_format, reuse_outputs)))
                assert all(array.flags.c_contiguous for array in inputs)
                return compute(inputs)

            def release(self):
                fake.calls.append(("release", None))

        self.RKNNLite = RKNNLite

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


BY_NAME = {chip.name: chip for chip in CHIPS}
X = np.arange(8, dtype=np.float32).reshape(1, 1, 8)
MASK = np.zeros((1, 1, 5), np.float32)


def doubled(inputs: Any) -> list[np.ndarray]:
    """Return logits in float16 and without the first axis, as a runtime may do."""
    return [np.full(70, 2 * inputs[0].sum(), np.float16)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLite:
    module = FakeLite(doubled)
    monkeypatch.setitem(sys.modules, "rknnlite", module)
    monkeypatch.setitem(sys.modules, "rknnlite.api", module)
    return module


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.rknn"
    path.write_bytes(rknn_bytes(description(chips=list(BY_NAME))))
    return path


def load(file: Path, chip: str = "rk3588", cores: str = "auto") -> Any:
    return load_rknn_files(BY_NAME[chip], [SPEC], {"step": file}, cores)["step"]


def test_a_program_runs_with_arrays_in_c_order_and_returns_float32(fake, file):
    runner = load(file)

    found = runner.run({"x": np.asfortranarray(X), "mask": MASK})

    assert found["logits"].dtype == np.float32
    assert found["logits"].shape == (1, 70)
    assert (found["logits"] == 2 * X.sum()).all()
    assert fake.calls == [
        ("load_rknn", str(file)),
        ("init_runtime", 0),
        ("inference", (["nchw", "nchw"], False)),  # outputs of an earlier run are not overwritten
    ]


def test_the_npu_is_released_when_nobody_has_the_runner(fake, file):
    runner = load(file)
    del runner
    gc.collect()

    assert fake.names()[-1] == "release"


@pytest.mark.parametrize(
    ("chip", "cores", "mask"),
    [("rk3588", "0-2", 7), ("rk3588", "2", 4), ("rk3576", "0-1", 3), ("rk3568", "auto", 0)],
)
def test_the_core_mask_is_that_of_the_chosen_cores(fake, file, chip, cores, mask):
    load(file, chip, cores)

    assert ("init_runtime", mask) in fake.calls


@pytest.mark.parametrize(("chip", "cores"), [("rk3576", "2"), ("rk3576", "0-2"), ("rk3568", "1")])
def test_cores_that_the_chip_does_not_have_are_a_usage_error(fake, file, chip, cores):
    with pytest.raises(UsageError, match=f"cannot be `{cores}`") as refused:
        load(file, chip, cores)

    assert "auto, 0" in refused.value.hint
    assert not fake.calls


@pytest.mark.parametrize("call", ["load_rknn", "init_runtime"])
def test_a_call_that_fails_is_named_and_the_npu_is_released(fake, file, call):
    fake.codes[call] = -1

    with pytest.raises(LoweringError, match="cannot load step") as failed:
        load(file)

    assert f"{call} returned -1" in failed.value.why
    assert "librknnrt.so" in failed.value.hint
    assert fake.names()[-1] == "release"


@pytest.mark.parametrize("outputs", [None, [], [np.zeros(70), np.zeros(1)]])
def test_missing_outputs_are_an_error(fake, file, monkeypatch, outputs):
    runner = load(file)
    monkeypatch.setattr(
        type(runner._session), "inference", lambda self, inputs, data_format: outputs
    )

    with pytest.raises(LoweringError, match="`step` failed on the NPU"):
        runner.run({"x": X, "mask": MASK})


def test_without_the_package_an_error_says_what_to_install(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "rknnlite", None)

    with pytest.raises(MissingPackageError, match="rknn-toolkit-lite2 is not installed") as missing:
        load(file)

    assert 'pip install "whisperport[rockchip]"' in missing.value.hint
    assert "rk3588.emulate=on" in missing.value.hint


def test_a_damaged_file_is_rejected_before_the_package_is_needed(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "rknnlite", None)
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(BundleError, match="is not a compiled file"):
        load(file)


@pytest.mark.parametrize(
    ("names", "chip", "is_right"),
    [
        (b"radxa,rock-5b\0rockchip,rk3588\0", "rk3588", True),
        (b"radxa,rock-5c\0rockchip,rk3588s\0", "rk3588", True),
        (b"radxa,rock-3a\0rockchip,rk3568\0", "rk3588", False),
        (
            b"raspberrypi,5-model-b\0brcm,bcm2712\0",
            "rk3588",
            True,
        ),  # not known: the runtime decides
    ],
)
def test_a_board_with_another_chip_is_named(
    fake, file, tmp_path, monkeypatch, names, chip, is_right
):
    board = tmp_path / "compatible"
    board.write_bytes(names)
    monkeypatch.setattr(runtime, "BOARD", board)

    if is_right:
        load(file, chip)
        return
    with pytest.raises(LoweringError, match=f"does not have the chip `{chip}`") as refused:
        load(file, chip)
    assert "rk3568" in refused.value.why
