"""A fake `hailo_sdk_client` that checks calls against the recorded signatures; it compiles nothing.

Its emulator runs the ONNX file that was parsed, with inputs and outputs rounded to 8 bits.

`FakeSdk` is the module itself, for this process. `InstalledSdk` installs one for another process, where
it is found and run as the real one would be: by the interpreter that a toolchain names.
"""

import base64
import json
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .recorded_signatures import COMPILER, bind

# A fake HAR says what was done, to which network, and of which ONNX file.
PARSED, OPTIMIZED, COMPILED = "parsed", "optimized", "compiled"
KILL = "kill"  # in place of a failure's class: the process is killed


class FakeSdk(types.ModuleType):
    """The fake module; `calls` lists all calls, and `hefs` maps a network to its compiled file."""

    def __init__(self, hefs: Mapping[str, bytes], version: str = "3.31.0") -> None:
        super().__init__("hailo_sdk_client")
        self.hefs, self.__version__ = dict(hefs), version
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failures: dict[str, BaseException] = {}
        self.levels = 127  # that the emulator rounds to, on each side of zero
        self.ClientRunner = lambda *a, **k: FakeRunner(self, *a, **k)
        self.InferenceContext = types.SimpleNamespace(
            SDK_NATIVE="native", SDK_QUANTIZED="quantized", SDK_HAILO_HW="hardware"
        )

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
        self._done = self._network = self._onnx = self._context = ""
        if given["har"] is not None:
            self._done, self._network, self._onnx = Path(given["har"]).read_text().split()
        assert given["hw_arch"] in (None, "hailo8", "hailo8l", "hailo10h")

    def translate_onnx_model(self, *args: Any, **kwargs: Any) -> None:
        given = self._sdk.called("ClientRunner.translate_onnx_model", *args, **kwargs)
        assert type(given["onnx_path"]) is str
        assert Path(given["onnx_path"]).is_file()
        assert "." not in given["model_name"]
        self._done, self._network = PARSED, given["model_name"]
        self._onnx = given["onnx_path"]

    def load_model_script(self, *args: Any, **kwargs: Any) -> None:
        given = self._sdk.called("ClientRunner.load_model_script", *args, **kwargs)
        assert type(given["script"]) is str
        assert self._done == PARSED
        if given["append"]:  # the text of a script
            assert given["script"].startswith("quantization_param(")
        else:
            assert Path(given["script"]).read_text().startswith("model_optimization_flavor(")

    def get_hn_dict(self) -> dict[str, Any]:
        import onnx

        self._sdk.called("ClientRunner.get_hn_dict")
        graph = onnx.load(self._onnx).graph
        convolutions = [node for node in graph.node if node.op_type == "Conv"]
        layers = {
            f"{self._network}/conv{number}": {"type": "conv", "original_names": [node.name]}
            for number, node in enumerate(convolutions, start=1)
        }
        return {"layers": {f"{self._network}/input_layer1": {"type": "input_layer"}, **layers}}

    def optimize(self, *args: Any, **kwargs: Any) -> None:
        import numpy as np

        given = self._sdk.called("ClientRunner.optimize", *args, **kwargs)
        assert Path(given["work_dir"]).is_dir()
        data = given["calib_data"]
        for array in data.values() if isinstance(data, dict) else [data]:
            assert isinstance(array, np.ndarray)
            assert array.dtype == np.float32
            assert array.ndim == 4, "3-D data breaks the decomposition of layer norms"
            assert array.flags.c_contiguous
        # Past Python's streams, as C++ writes; the lines are those of the notebook that the parser names.
        line = f"[info] \t{self._network}/output_layer1 SNR:\t9.179 dB\n"
        os.write(1, b"[info] Output layers signal-to-noise ratio (SNR)\n" + line.encode())
        self._done = OPTIMIZED

    @contextmanager
    def infer_context(self, *args: Any, **kwargs: Any) -> Iterator[object]:
        given = self._sdk.called("ClientRunner.infer_context", *args, **kwargs)
        assert self._done == OPTIMIZED
        self._context = given["inference_context"]
        yield self
        self._context = ""

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        import numpy as np
        import onnxruntime

        given = self._sdk.called("ClientRunner.infer", *args, **kwargs)
        assert given["context"] is self
        assert self._context == self._sdk.InferenceContext.SDK_QUANTIZED
        data = given["dataset"]
        if isinstance(data, dict):
            assert [name.rpartition("/")[2] for name in data] == [
                f"input_layer{i}" for i in range(1, len(data) + 1)
            ]
        arrays = list(data.values()) if isinstance(data, dict) else [data]
        for array in arrays:
            assert array.dtype == np.float32
            assert array.ndim == 4
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(self._onnx, options)
        samples = []
        for sample in zip(*arrays, strict=True):
            feed = {
                tensor.name: _as_graph(self._rounded(one), tensor.shape)
                for tensor, one in zip(session.get_inputs(), sample, strict=True)
            }
            samples.append([self._rounded(out) for out in session.run(None, feed)])
        # With a height of 1, as the emulator has them.
        outputs = [np.stack(out) for out in zip(*samples, strict=True)]
        return outputs if len(outputs) > 1 else outputs[0]

    def _rounded(self, array: Any) -> Any:
        import numpy as np

        step = np.abs(array).max() / self._sdk.levels
        return (np.round(array / step) * step).astype(np.float32)

    def compile(self, *args: Any, **kwargs: Any) -> bytes:
        self._sdk.called("ClientRunner.compile", *args, **kwargs)
        assert self._done == OPTIMIZED
        self._done = COMPILED
        return self._sdk.hefs[self._network]

    def save_har(self, *args: Any, **kwargs: Any) -> None:
        given = self._sdk.called("ClientRunner.save_har", *args, **kwargs)
        assert type(given["path"]) is str
        assert given["path"].endswith(".har")
        Path(given["path"]).write_text(f"{self._done} {self._network} {self._onnx}")


def _as_graph(sample: Any, shape: list[int]) -> Any:
    """Convert a sample (H, W, C) to the graph's input: channels first if that has four axes."""
    import numpy as np

    moved = sample.transpose(2, 0, 1)[None] if len(shape) == 4 else sample
    assert list(moved.shape) == shape
    return np.ascontiguousarray(moved)


class InstalledSdk:
    """An interpreter that has the fake SDK, and the record of its calls."""

    def __init__(self, folder: Path, hefs: Mapping[str, bytes]) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "hailo_sdk_client.py").write_text(MODULE.format(here=Path(__file__).parent))
        self.interpreter = folder / "python"
        self.interpreter.write_text(
            f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n'
        )
        self.interpreter.chmod(0o755)
        self.configure(hefs=hefs)

    def configure(
        self,
        hefs: Mapping[str, bytes] | None = None,
        version: str = "3.31.0",
        failures: Mapping[str, tuple[str, str]] | None = None,
        levels: int = 127,
    ) -> None:
        """Set what the fake SDK does from now on.

        `failures`: call -> class and message of what it raises; `levels`: of its emulator.
        """
        if hefs is not None:
            self.hefs = dict(hefs)
        encoded = {name: base64.b64encode(hef).decode() for name, hef in self.hefs.items()}
        saved = {"hefs": encoded, "version": version, "levels": levels}
        saved["failures"] = dict(failures or {})
        (self._folder / "sdk.json").write_text(json.dumps(saved))

    def names(self) -> list[str]:
        log = self._folder / "calls.txt"
        return log.read_text().split() if log.exists() else []

    def clear(self) -> None:
        (self._folder / "calls.txt").unlink(missing_ok=True)


class ConfiguredSdk(FakeSdk):
    """The SDK in the other process: it follows `InstalledSdk.configure`, and writes its calls to a file."""

    def __init__(self, folder: Path) -> None:
        saved = json.loads((folder / "sdk.json").read_text())
        hefs = {name: base64.b64decode(text) for name, text in saved["hefs"].items()}
        super().__init__(hefs, saved["version"])
        self._folder, self._failures, self.levels = folder, saved["failures"], saved["levels"]

    def called(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with (self._folder / "calls.txt").open("a") as log:
            log.write(name.removeprefix("ClientRunner.") + "\n")
        if name in self._failures:
            kind, message = self._failures[name]
            if kind == KILL:
                os.kill(os.getpid(), 9)
            raise type(kind, (Exception,), {})(message)
        return super().called(name, *args, **kwargs)


MODULE = """
import sys, types
from pathlib import Path

package = types.ModuleType("fake_hailo")
package.__path__ = ["{here}"]
sys.modules["fake_hailo"] = package
from fake_hailo.fake_sdk import ConfiguredSdk

sys.modules[__name__] = ConfiguredSdk(Path(__file__).parent)
"""
