"""The dummy vendor's SDK. It lives in an interpreter that has nothing of whisperport."""

import json
import sys

import numpy as np

__version__ = "2.1"


class RangeError(Exception):
    """A range is not finite."""


def measure(arrays, recipe, ranges):
    """Write the range of every calibration array."""
    assert "whisperport" not in sys.modules
    with open(recipe) as file:
        percentile = json.load(file)["percentile"]
    found = {}
    for path in arrays:
        array = np.load(path, mmap_mode="r")
        largest = float(np.percentile(np.abs(array.astype(np.float32)), percentile))
        if not np.isfinite(largest):
            raise RangeError(path)
        name = path.rpartition("/")[2]
        found[name] = {"largest": largest, "samples": len(array), "dtype": str(array.dtype)}
        print(f"{name}: 20.5 dB")
    with open(ranges, "w") as file:
        json.dump(found, file)


def assemble(onnx, ranges, out, chip, inputs, outputs):
    """Write the compiled file."""
    with open(ranges) as file:
        assert json.load(file)
    header = {"chip": chip, "compiler": __version__, "inputs": inputs, "outputs": outputs}
    with open(onnx, "rb") as program, open(out, "wb") as file:
        file.write(json.dumps(header).encode() + b"\n" + program.read())
