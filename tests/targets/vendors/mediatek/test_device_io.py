"""The order, dtypes and quantization of a compiled program's inputs and outputs."""

import json
from pathlib import Path

import numpy as np
import pytest

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.vendors.mediatek.device_io import DeviceIo, DeviceTensor

DATA = Path(__file__).parent / "data"
SPEC = ProgramSpec("step", (TensorSpec("x", (2, 3)),), (TensorSpec("y", (4,)),))


def described(**changes):
    x = {"name": "x", "shape": [1, 6], "dtype": "int8", "scale": 0.5, "zero_point": -3}
    y = {"name": "y", "shape": [4], "dtype": "float32", "scale": 0.0, "zero_point": 0}
    return {"inputs": [x | changes], "outputs": [y]}


def test_what_is_written_is_read_again():
    io = DeviceIo.from_json(described(), SPEC)

    assert DeviceIo.from_json(json.loads(json.dumps(io.to_json())), SPEC) == io
    assert [tensor.nbytes for tensor in (*io.inputs, *io.outputs)] == [6, 16]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "z"},
        {"shape": [5]},
        {"shape": [-2, -3]},
        {"shape": "six"},
        {"dtype": "float64"},
        {"dtype": "object"},
        {"dtype": "int8", "scale": 0},
        {"scale": float("nan")},
        {"scale": float("inf")},
        {"scale": -1},
        {"scale": None},
        {"zero_point": 128},
        {"zero_point": "x"},
        {"dtype": "float32", "scale": 0.5},
    ],
)
def test_a_wrong_description_is_refused(changes):
    with pytest.raises(BundleError, match="of `step` wrongly"):
        DeviceIo.from_json(described(**changes), SPEC)


@pytest.mark.parametrize("data", [None, [], {}, {"inputs": []}, {"inputs": [3], "outputs": []}])
def test_a_description_of_another_form_is_refused(data):
    with pytest.raises(BundleError, match="of `step` wrongly"):
        DeviceIo.from_json(data, SPEC)


@pytest.mark.parametrize(("dtype", "zero_point"), [("int8", -3), ("uint8", 128), ("int16", 0)])
def test_quantization_is_inverted_up_to_half_a_step(dtype, zero_point):
    tensor = DeviceTensor(name="x", shape=(200,), dtype=dtype, scale=0.1, zero_point=zero_point)
    values = np.random.default_rng(0).uniform(-5, 5, 200).astype(np.float32)

    integers = tensor.to_device(values, "step")
    back = tensor.from_device(integers, "float32")

    assert integers.dtype == dtype
    assert back.dtype == np.float32
    assert np.abs(back - values).max() <= 0.05 + 1e-6


def test_values_out_of_the_range_are_clipped_and_halves_are_rounded_away_from_zero():
    tensor = DeviceTensor(name="x", shape=(6,), dtype="int8", scale=1.0, zero_point=10)

    found = tensor.to_device(np.array([-1e30, -0.5, 0, 0.5, 1.4, 1e30], np.float32), "step")

    assert found.tolist() == [-128, 9, 10, 11, 11, 127]


def test_a_float16_input_of_the_device_is_converted():
    tensor = DeviceTensor(name="x", shape=(2,), dtype="float16")

    assert tensor.to_device(np.array([1, 2], np.float32), "step").dtype == np.float16
    assert tensor.from_device(np.array([1, 2], np.float16), "float32").dtype == np.float32


SMALL = ProgramSpec(
    "encoder",
    (TensorSpec("args_0", (3, 8)), TensorSpec("args_1", (3, 6))),
    (TensorSpec("output_0", (3, 4)), TensorSpec("output_1", (3, 4))),
)


def test_quantization_is_read_from_the_tflite():
    plain = DeviceIo.of_tflite(DATA / "small.tflite", SMALL)
    quantized = DeviceIo.of_tflite(DATA / "small_int8.tflite", SMALL)

    # then: a softmax is quantized with the scale 1/256 and the zero point -128, as TFLite defines
    assert plain == DeviceIo.of_spec(SMALL)
    assert {tensor.dtype for tensor in (*quantized.inputs, *quantized.outputs)} == {"int8"}
    assert quantized.outputs[1].scale == 1 / 256
    assert quantized.outputs[1].zero_point == -128
    assert sum(tensor.nbytes for tensor in quantized.inputs) == 24 + 18


def test_a_tflite_of_another_program_is_an_error():
    with pytest.raises(BundleError, match="of `step` wrongly"):
        DeviceIo.of_tflite(DATA / "small.tflite", SPEC)


def test_integers_of_64_bits_are_32_bits_on_the_device():
    spec = ProgramSpec("prefill_4", (TensorSpec("token", (2,), "int64"),), SPEC.outputs)

    (tensor,) = DeviceIo.of_spec(spec).inputs

    assert tensor.nbytes == 8
    assert tensor.to_device(np.array([3, -1]), "prefill_4").dtype == np.int32
    assert tensor.from_device(np.array([3], np.int32), "int64").dtype == np.int64
