"""A `hailo_sdk_client` of the recorded signatures: it compiles nothing, and checks what it is given."""

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .recorded_signatures import COMPILER, bind

# A fake HAR says what was done, and to which network.
PARSED, OPTIMIZED, COMPILED = "parsed", "optimized", "compiled"


class FakeSdk(types.ModuleType):
    """The module; `calls` is what was asked of it. `hefs` is what compiling gives, by network."""

    def __init__(self, hefs: Mapping[str, bytes], version: str = "3.31.0") -> None:
        super().__init__("hailo_sdk_client")
        self.hefs, self.__version__ = dict(hefs), version
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failures: dict[str, BaseException] = {}
        self.ClientRunner = lambda *a, **k: FakeRunner(self, *a, **k)

    def called(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        arguments = bind(COMPILER, name, *args, **kwargs)
        self.calls.append((name, arguments))
        if name in self.failures:
            raise self.failures[name]
        return arguments

    def names(self) -> list[str]:
        return [name.removeprefix("ClientRunner.") for name, _ in self.calls]


class FakeRunner:
    def __init__(self, sdk: FakeSdk, *args: Any, **kwargs: Any) -> None:
        self._sdk = sdk
        given = sdk.called("ClientRunner", *args, **kwargs)
        assert (given["hw_arch"] is None) != (given["har"] is None)
        self._done, self._network = "", ""
        if given["har"] is not None:
            self._done, self._network = Path(given["har"]).read_text().split()
        assert given["hw_arch"] in (None, "hailo8", "hailo8l", "hailo10h")

    def translate_onnx_model(self, *args: Any, **kwargs: Any) -> None:
        given = self._sdk.called("ClientRunner.translate_onnx_model", *args, **kwargs)
        assert type(given["onnx_path"]) is str
        assert Path(given["onnx_path"]).is_file()
        assert "." not in given["model_name"]
        self._done, self._network = PARSED, given["model_name"]

    def load_model_script(self, *args: Any, **kwargs: Any) -> None:
        given = self._sdk.called("ClientRunner.load_model_script", *args, **kwargs)
        assert type(given["script"]) is str
        assert Path(given["script"]).read_text().startswith("model_optimization_flavor(")
        assert self._done == PARSED

    def optimize(self, *args: Any, **kwargs: Any) -> None:
        given = self._sdk.called("ClientRunner.optimize", *args, **kwargs)
        assert Path(given["work_dir"]).is_dir()
        data = given["calib_data"]
        for array in data.values() if isinstance(data, dict) else [data]:
            assert isinstance(array, np.ndarray)
            assert array.dtype == np.float32
            assert array.ndim == 4, "3-D data breaks the decomposition of layer norms"
            assert array.flags.c_contiguous
        self._done = OPTIMIZED

    def compile(self, *args: Any, **kwargs: Any) -> bytes:
        self._sdk.called("ClientRunner.compile", *args, **kwargs)
        assert self._done == OPTIMIZED
        self._done = COMPILED
        return self._sdk.hefs[self._network]

    def save_har(self, *args: Any, **kwargs: Any) -> None:
        given = self._sdk.called("ClientRunner.save_har", *args, **kwargs)
        assert type(given["path"]) is str
        assert given["path"].endswith(".har")
        Path(given["path"]).write_text(f"{self._done} {self._network}")
