"""The calls of HailoRT are compared with recorded signatures; neither device nor runtime is available."""

import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import (
    BundleError,
    ForkError,
    LoweringError,
    MissingPackageError,
)
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.vendors.hailo import runtime
from whisperport.targets.vendors.hailo.chips import HAILO8, HAILO8L, HAILO10H
from whisperport.targets.vendors.hailo.runtime import load_hefs

from ....docs.pages import ROOT
from .fake_platform import FakeHef, FakePlatform, failed

HEF = Path("encoder.hef")
DECODER_HEF = Path("uncached_decoder.hef")
ENCODER = ProgramSpec(
    "encoder",
    (TensorSpec("mel", (1, 3, 1, 8)),),
    (TensorSpec("features", (1, 4, 5)),),
)


def _decoder(layout: tuple[int, int]) -> ProgramSpec:
    return ProgramSpec(
        "uncached_decoder",
        (TensorSpec("features", (1, 4, 5)), TensorSpec("embeddings", (1, 5, *layout))),
        tuple(TensorSpec(f"logits_{i}", (1, 2, 7)) for i in range(4)),
    )


def _encoder_hef() -> FakeHef:
    """Compute each feature as the sum of its frames' bins, in the chip's order."""

    def compute(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (mel,) = given.values()
        pairs = mel.reshape(1, 4, 6).sum(axis=2, keepdims=True)
        return {"net/normalization9": np.repeat(pairs, 5, axis=2)}

    return FakeHef({"net/input_layer1": (1, 8, 3)}, {"net/normalization9": (1, 4, 5)}, compute)


def _decoder_hef(embeddings: tuple[int, ...], extra: bool = False) -> FakeHef:
    names = ["net/conv30", "net/conv4", "net/conv12", "net/conv1"]  # the compiler's order

    def compute(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {name.split("/")[1]: array for name, array in given.items()}
        assert given["input_layer1"].shape == (1, 4, 5)
        return {name: np.full((1, 2, 7), i, np.float32) for i, name in enumerate(names)}

    outputs = dict.fromkeys(names, (1, 2, 7))
    if extra:
        outputs = {"net/ew_add3": (1, 2, 5), **outputs}
    inputs = {"net/input_layer1": (1, 4, 5), "net/input_layer2": embeddings}
    return FakeHef(inputs, outputs, compute)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakePlatform]:
    # A chip that another test's error still holds is not this one's.
    monkeypatch.setattr(runtime, "_open", weakref.WeakValueDictionary())

    def make(**options: Any) -> FakePlatform:
        hefs = options.pop("hefs", {HEF: _encoder_hef()})
        fake = FakePlatform(hefs, **options)
        monkeypatch.setitem(sys.modules, "hailo_platform", fake)
        return fake

    return make


def _load_encoder(chip: Any = HAILO8L) -> Any:
    return load_hefs(chip, [ENCODER], {"encoder": HEF})["encoder"]


@pytest.mark.parametrize("chip", [HAILO8L, HAILO10H], ids=lambda chip: chip.name)
def test_without_a_device_the_encoder_is_fed_and_read_as_recorded(platform, chip):
    fake = platform()
    mel = np.arange(24, dtype=np.float32).reshape(1, 3, 1, 8)

    features = _load_encoder(chip).run({"mel": mel})["features"]

    frames = mel[0, :, 0, :].T  # (8, 3): frame by frame
    expected = frames.reshape(4, 6).sum(axis=1)
    assert features.shape == (1, 4, 5)
    assert (features[0] == expected[:, None]).all()
    timeout = next(call for name, call in fake.calls if name == "ConfiguredInferModel.run")
    assert timeout["timeout"] == 10_000


@pytest.mark.parametrize("mel", [(1, 8, 3), (8, 1, 3), (8, 3)], ids=str)
@pytest.mark.parametrize("features", [(1, 4, 5), (4, 1, 5), (4, 5)], ids=str)
def test_without_a_device_streams_may_have_their_axes_of_length_1_anywhere(platform, mel, features):
    def compute(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        pairs = given["net/input_layer1"].reshape(4, 6).sum(axis=1, keepdims=True)
        return {"net/normalization9": np.repeat(pairs, 5, axis=1).reshape(features)}

    hef = FakeHef({"net/input_layer1": mel}, {"net/normalization9": features}, compute)
    given = np.arange(24, dtype=np.float32).reshape(1, 3, 1, 8)
    platform()
    expected = _load_encoder().run({"mel": given})["features"]
    platform(hefs={HEF: hef})

    made = load_hefs(HAILO8, [ENCODER], {"encoder": HEF}, service=True)["encoder"].run(
        {"mel": given}
    )

    np.testing.assert_array_equal(made["features"], expected)


def test_without_a_device_streams_in_another_order_of_values_are_refused_with_the_shapes(platform):
    transposed = {"net/input_layer1": (3, 1, 8)}, {"net/normalization9": (1, 4, 5)}
    platform(hefs={HEF: FakeHef(*transposed, lambda given: given)})

    with pytest.raises(BundleError, match="does not have the shapes") as refused:
        _load_encoder()

    assert "(3, 1, 8)" in refused.value.why
    assert "(1, 8, 3)" in refused.value.why


def test_without_a_device_the_scheduler_and_the_shared_group_are_asked_for(platform):
    fake = platform()
    runner = _load_encoder()
    params = next(call["params"] for name, call in fake.calls if name == "VDevice")
    assert (params.scheduling_algorithm, params.group_id) == ("round robin", "SHARED")
    assert not hasattr(params, "multi_process_service")  # a service of its own would be needed
    assert "ConfiguredInferModel.activate" not in fake.names()  # invalid beside a scheduler
    del runner


def test_without_a_device_the_service_is_asked_to_share_the_chip_where_that_was_wanted(platform):
    fake = platform()
    runners = load_hefs(HAILO8L, [ENCODER], {"encoder": HEF}, service=True)
    params = next(call["params"] for name, call in fake.calls if name == "VDevice")
    assert (params.multi_process_service, params.group_id) == (True, "SHARED")
    alone = load_hefs(HAILO8L, [ENCODER], {"encoder": HEF})
    assert fake.names().count("VDevice") == 2  # never the one by the other's way
    del runners, alone


def test_without_a_device_results_stay_when_the_runner_runs_again(platform):
    platform()
    runner = _load_encoder()
    first = runner.run({"mel": np.ones((1, 3, 1, 8), np.float32)})["features"]
    kept = first.copy()
    runner.run({"mel": np.zeros((1, 3, 1, 8), np.float32)})
    assert (first == kept).all()


def test_without_a_device_a_read_only_input_is_copied_for_the_chip(platform):
    platform(hefs={DECODER_HEF: _decoder_hef((2, 1, 5))})
    runner = load_hefs(HAILO8, [_decoder((2, 1))], {"uncached_decoder": DECODER_HEF})[
        "uncached_decoder"
    ]
    features = np.zeros((1, 4, 5), np.float32)
    features.setflags(write=False)
    runner.run({"features": features, "embeddings": np.zeros((1, 5, 2, 1), np.float32)})


@pytest.mark.parametrize(
    ("layout", "shape"), [((2, 1), (2, 1, 5)), ((1, 2), (1, 2, 5))], ids=["old", "new"]
)
@pytest.mark.parametrize("extra", [False, True], ids=["four outputs", "others beside them"])
def test_without_a_device_both_generations_of_decoders_give_their_pieces_in_order(
    platform, layout, shape, extra
):
    hef = _decoder_hef(shape, extra)
    seen = []
    compute = hef.compute
    hef.compute = lambda given: seen.append(given["net/input_layer2"].copy()) or compute(given)
    platform(hefs={DECODER_HEF: hef})
    runner = load_hefs(HAILO8, [_decoder(layout)], {"uncached_decoder": DECODER_HEF})[
        "uncached_decoder"
    ]
    embeddings = np.arange(10, dtype=np.float32).reshape(1, 5, *layout)

    outputs = runner.run({"features": np.zeros((1, 4, 5), np.float32), "embeddings": embeddings})

    assert [float(outputs[f"logits_{i}"].max()) for i in range(4)] == [0, 1, 2, 3]
    rows = embeddings.reshape(5, 2).T  # (S, d), whatever the layout
    assert (seen[0].reshape(2, 5) == rows).all()


def test_without_a_device_one_virtual_device_serves_all_and_is_released_with_the_last(platform):
    fake = platform(hefs={HEF: _encoder_hef(), DECODER_HEF: _decoder_hef((2, 1, 5))})
    specs, hefs = [ENCODER, _decoder((2, 1))], {"encoder": HEF, "uncached_decoder": DECODER_HEF}
    runners = load_hefs(HAILO8, specs, hefs)
    again = load_hefs(HAILO8, specs, hefs)
    assert fake.names().count("VDevice") == 1

    del runners
    gc.collect()
    assert "VDevice.release" not in fake.names()

    del again
    gc.collect()
    assert fake.names()[-1] == "VDevice.release"
    assert fake.names().count("VDevice.release") == 1
    assert fake.names().count("closed") == 4  # each model before the device


def test_without_a_device_a_fork_is_told_to_load_again(platform, monkeypatch):
    fake = platform()
    runner = _load_encoder()
    monkeypatch.setattr(runtime.os, "getpid", lambda: -1)
    with pytest.raises(ForkError, match="`encoder` cannot be used in a fork"):
        runner.run({"mel": np.zeros((1, 3, 1, 8), np.float32)})
    del runner
    gc.collect()
    assert "VDevice.release" not in fake.names()  # it is the parent's
    monkeypatch.undo()
    assert os.getpid() > 0


@pytest.mark.parametrize("chip", [HAILO8, HAILO10H], ids=lambda chip: chip.name)
def test_a_missing_runtime_says_which_one_the_chip_needs(monkeypatch, chip):
    monkeypatch.setitem(sys.modules, "hailo_platform", None)
    with pytest.raises(MissingPackageError) as caught:
        _load_encoder(chip)
    assert f"HailoRT {'5' if chip is HAILO10H else '4'}.x" in caught.value.hint
    package = "hailo-h10-all" if chip is HAILO10H else "hailo-all"
    assert f"`sudo apt install {package}`" in caught.value.hint


@pytest.mark.parametrize(
    ("python", "has", "has_not"),
    [
        ((3, 11), "numpy<2", "does not support"),
        ((3, 13), "does not support Python 3.13", "numpy<2"),
    ],
)
def test_numpy_1_is_asked_for_only_where_it_can_be_installed(
    monkeypatch, tmp_path, python, has, has_not
):
    (tmp_path / "hailo_platform.py").write_text(
        'raise ImportError("numpy.core.multiarray failed to import")'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(runtime.sys, "version_info", (*python, 2, "final", 0))

    with pytest.raises(MissingPackageError) as caught:
        _load_encoder()

    assert has in caught.value.hint
    assert has_not not in caught.value.hint


def test_no_page_asks_for_numpy_1_on_every_python():
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    texts |= {path: path.read_text(encoding="utf-8") for path in ROOT.glob("*.*") if path.is_file()}
    asked = [line for text in texts.values() for line in text.splitlines() if "numpy<2" in line]

    assert asked
    assert all("python_version < '3.13'" in line for line in asked), asked


def test_without_a_device_the_absent_chip_is_named_before_anything_is_opened(platform):
    fake = platform(devices=())
    with pytest.raises(LoweringError, match="no Hailo chip was found"):
        _load_encoder()
    assert "VDevice" not in fake.names()


@pytest.mark.parametrize(
    ("call", "error", "kind", "says"),
    [
        ("VDevice", failed("HAILO_DEVICE_IN_USE"), LoweringError, "in use"),
        ("VDevice", failed("HAILO_OUT_OF_PHYSICAL_DEVICES"), LoweringError, "in use"),
        ("VDevice", failed("HAILO_DRIVER_NOT_INSTALLED"), LoweringError, "driver"),
        (
            "InferModel.configure",
            failed("HAILO_HEF_NOT_COMPATIBLE_WITH_DEVICE"),
            BundleError,
            "the HEF is for another chip",
        ),
        (
            "VDevice.create_infer_model",
            failed("HAILO_INVALID_DEVICE_ARCHITECTURE"),
            BundleError,
            "the HEF is for another chip",
        ),
        (
            "VDevice.create_infer_model",
            type("HailoRTInvalidHEFException", (Exception,), {})("Invalid HEF. See hailort.log"),
            BundleError,
            "cannot read the HEF",
        ),
        ("HEF", failed("HAILO_INTERNAL_FAILURE"), LoweringError, "HailoRT reported an error"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, Exception) else "",
)
def test_without_a_device_each_failure_of_loading_is_one_clear_error(
    platform, call, error, kind, says
):
    fake = platform()
    fake.failures[call] = error
    with pytest.raises(kind, match=says) as caught:
        _load_encoder()
    assert caught.value.hint
    assert caught.value.__cause__ is error


def test_without_a_device_a_run_that_does_not_come_back_says_so(platform):
    fake = platform()
    runner = _load_encoder()
    fake.failures["ConfiguredInferModel.run"] = type("HailoRTTimeout", (Exception,), {})(
        "Received a timeout"
    )
    with pytest.raises(LoweringError, match="within 10 s"):
        runner.run({"mel": np.zeros((1, 3, 1, 8), np.float32)})
