"""The dummy vendor's SDK. It is installed in a Python interpreter without whisperport."""

import json
import sys

import numpy as np

__version__ = "2.1"


class RangeError(Exception):
    """Raised if a range is not finite."""


def measure(arrays, recipe, ranges):
    """Measure the range of every calibration array, and write the ranges to a file."""
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
    """Compile an ONNX file, and write the compiled file."""
    with open(ranges) as file:
        assert json.load(file)
    header = {"chip": chip, "compiler": __version__, "inputs": inputs, "outputs": outputs}
    with open(onnx, "rb") as program, open(out, "wb") as file:
        file.write(json.dumps(header).encode() + b"\n" + program.read())


def simulate(artifact, inputs, outputs):
    """Run a compiled file on the CPU as the device would, with inputs and outputs in 8 bits."""
    import onnxruntime

    with open(artifact, "rb") as file:
        header, _, program = file.read().partition(b"\n")
    shapes = json.loads(header)["inputs"]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program, options)
    names = [tensor.name for tensor in session.get_inputs()]
    samples = []
    for sample in zip(*[np.load(path) for path in inputs], strict=True):
        given = [_in_8_bits(one.reshape(shape)) for one, shape in zip(sample, shapes, strict=True)]
        samples.append(session.run(None, dict(zip(names, given, strict=True))))
    for path, made in zip(outputs, zip(*samples, strict=True), strict=True):
        np.save(path, np.stack([_in_8_bits(one) for one in made]))


def _in_8_bits(array):
    """Round to 127 levels on each side of zero. The infinities of a mask do not change."""
    finite = np.isfinite(array)
    step = np.abs(array[finite]).max(initial=1e-9) / 127
    return np.where(finite, np.round(array / step) * step, array).astype(np.float32)
