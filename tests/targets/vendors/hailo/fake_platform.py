"""A fake `hailo_platform` that checks calls against the recorded signatures.

Other calls fail as they would with the real package.

It computes nothing of a HEF. Each fake HEF has shapes, and a function that says what comes out.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .recorded_signatures import RUNTIME, VDEVICE_PARAMS, bind

Arrays = dict[str, np.ndarray]


class HailoRTException(Exception):  # noqa: N818  # theirs
    """An exception like HailoRT's, whose message contains the status."""


def failed(status: str) -> HailoRTException:
    return HailoRTException(f"libhailort failed with error: 1 ({status})")


@dataclass
class FakeHef:
    """Streams in NHWC without the batch, outputs in the compiler's order."""

    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, tuple[int, ...]]
    compute: Callable[[Arrays], Arrays]


class FakePlatform(types.ModuleType):
    """The fake module; `calls` lists all calls in order."""

    def __init__(self, hefs: Mapping[Path, FakeHef], devices: Sequence[str] = ("0000:01:00.0",)):
        super().__init__("hailo_platform")
        self.hefs = {str(path): hef for path, hef in hefs.items()}
        self.devices, self.failures = list(devices), {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.FormatType = types.SimpleNamespace(FLOAT32="float32", AUTO="auto")
        self.HailoSchedulingAlgorithm = types.SimpleNamespace(ROUND_ROBIN="round robin")
        self.Device = types.SimpleNamespace(scan=self._scan)
        self.VDevice = lambda *a, **k: FakeVDevice(self, *a, **k)
        self.VDevice.create_params = self._params
        self.HEF = lambda *a, **k: FakeHefObject(self, *a, **k)

    def called(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        arguments = bind(RUNTIME, name, *args, **kwargs)
        self.calls.append((name, arguments))
        if name in self.failures:
            raise self.failures[name]
        return arguments

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def _scan(self, *args: Any, **kwargs: Any) -> list[str]:
        self.called("Device.scan", *args, **kwargs)
        return self.devices

    def _params(self, *args: Any, **kwargs: Any) -> "FakeParams":
        self.called("VDevice.create_params", *args, **kwargs)
        return FakeParams()


class FakeParams:
    """Accepts only the members that VDeviceParams has."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in VDEVICE_PARAMS, f"VDeviceParams has no {name}"
        object.__setattr__(self, name, value)


class FakeVDevice:
    def __init__(self, platform: FakePlatform, *args: Any, **kwargs: Any) -> None:
        self._platform = platform
        self.params = platform.called("VDevice", *args, **kwargs)["params"]

    def create_infer_model(self, *args: Any, **kwargs: Any) -> "FakeModel":
        source = self._platform.called("VDevice.create_infer_model", *args, **kwargs)["hef_source"]
        assert type(source) is str, "HailoRT takes a path as str, and bytes as the file itself"
        return FakeModel(self._platform, self._platform.hefs[source])

    def release(self, *args: Any, **kwargs: Any) -> None:
        self._platform.called("VDevice.release", *args, **kwargs)


class FakeHefObject:
    def __init__(self, platform: FakePlatform, *args: Any, **kwargs: Any) -> None:
        source = platform.called("HEF", *args, **kwargs)["hef_source"]
        assert type(source) is str
        self._platform, self._hef = platform, platform.hefs[source]

    def get_sorted_output_names(self, *args: Any, **kwargs: Any) -> list[str]:
        self._platform.called("HEF.get_sorted_output_names", *args, **kwargs)
        return list(self._hef.outputs)


class FakeModel:
    def __init__(self, platform: FakePlatform, hef: FakeHef) -> None:
        self._platform, self.hef = platform, hef
        self.formats = dict.fromkeys([*hef.inputs, *hef.outputs], "auto")
        # Neither is in the compiler's order: HailoRT sorts them by name.
        self.input_names = sorted(hef.inputs, reverse=True)
        self.output_names = sorted(hef.outputs, reverse=True)

    def input(self, *args: Any, **kwargs: Any) -> "FakeStream":
        name = self._platform.called("InferModel.input", *args, **kwargs)["name"]
        return FakeStream(self, name, self.hef.inputs[name])

    def output(self, *args: Any, **kwargs: Any) -> "FakeStream":
        name = self._platform.called("InferModel.output", *args, **kwargs)["name"]
        return FakeStream(self, name, self.hef.outputs[name])

    def configure(self, *args: Any, **kwargs: Any) -> "FakeConfigured":
        self._platform.called("InferModel.configure", *args, **kwargs)
        return FakeConfigured(self._platform, self)


@dataclass
class FakeStream:
    model: FakeModel
    name: str
    size: tuple[int, ...]

    @property
    def shape(self) -> list[int]:
        return list(self.size)

    def set_format_type(self, *args: Any, **kwargs: Any) -> None:
        arguments = self.model._platform.called("InferStream.set_format_type", *args, **kwargs)
        self.model.formats[self.name] = arguments["type"]


@dataclass
class FakeConfigured:
    platform: FakePlatform
    model: FakeModel
    entered: int = 0

    def __enter__(self) -> "FakeConfigured":
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.entered -= 1
        self.platform.calls.append(("closed", {}))

    def create_bindings(self, *args: Any, **kwargs: Any) -> "FakeBindings":
        self.platform.called("ConfiguredInferModel.create_bindings", *args, **kwargs)
        assert self.entered == 1, "a configured model is used inside of its context"
        return FakeBindings(self.platform)

    def run(self, *args: Any, **kwargs: Any) -> None:
        arguments = self.platform.called("ConfiguredInferModel.run", *args, **kwargs)
        assert isinstance(arguments["timeout"], int), "milliseconds"
        hef = self.model.hef
        assert set(self.model.formats.values()) == {"float32"}
        for bindings in arguments["bindings"]:
            given = {name: bindings.bound(name, shape) for name, shape in hef.inputs.items()}
            made = {name: bindings.bound(name, shape) for name, shape in hef.outputs.items()}
            for name, array in hef.compute(given).items():
                made[name][...] = array


@dataclass
class FakeBindings:
    platform: FakePlatform
    streams: dict[str, "FakeBound"] = field(default_factory=dict)

    def input(self, *args: Any, **kwargs: Any) -> "FakeBound":
        return self._stream(self.platform.called("Bindings.input", *args, **kwargs)["name"])

    def output(self, *args: Any, **kwargs: Any) -> "FakeBound":
        return self._stream(self.platform.called("Bindings.output", *args, **kwargs)["name"])

    def _stream(self, name: str) -> "FakeBound":
        return self.streams.setdefault(name, FakeBound(self.platform))

    def bound(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        buffer = self.streams[name].buffer
        assert buffer is not None, f"{name} has no buffer"
        assert buffer.shape == shape, name
        return buffer


@dataclass
class FakeBound:
    platform: FakePlatform
    buffer: np.ndarray | None = None

    def set_buffer(self, *args: Any, **kwargs: Any) -> None:
        buffer = self.platform.called("BoundStream.set_buffer", *args, **kwargs)["buffer"]
        # infer_model_api.cpp takes `mutable_data()` and `nbytes()`, and never asks for the dtype.
        assert buffer.dtype == np.float32
        assert buffer.flags.c_contiguous, "Buffer must be C_CONTIGUOUS"
        assert buffer.flags.writeable, "pybind's mutable_data() refuses a read-only array"
        self.buffer = buffer

    def get_buffer(self, *args: Any, **kwargs: Any) -> np.ndarray:
        self.platform.called("BoundStream.get_buffer", *args, **kwargs)
        assert self.buffer is not None
        return self.buffer
