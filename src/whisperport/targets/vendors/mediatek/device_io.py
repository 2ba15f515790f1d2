"""The inputs and outputs of a compiled program as the device has them: order, shape, dtype, quantization.

They are those of the .tflite that was compiled. A float32 program has float32 inputs and outputs even if
`--relax-fp32` lets it compute in float16. A quantized program has integers, and the caller quantizes and
dequantizes them: real value = scale · (integer − zero point). Data is C-contiguous and little-endian.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.errors import BundleError, NumericalError
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.tflite.lowering import stored

if TYPE_CHECKING:  # boards do not read .tflite files
    from whisperport.model.inspection.graph import Value

QUANTIZED = ("int8", "uint8", "int16")
NARROWER = {  # dtype of a signature -> dtypes that the device may have without a scale
    "float32": ("float32", "float16"),
    "float64": ("float32", "float64"),
    "int64": ("int32", "int64"),  # converters to .tflite replace 64-bit types
}
DTYPES = (*QUANTIZED, "float32", "float16", "float64", "int32", "int64", "bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTensor:
    """One input or output of a compiled program.

    Attributes:
        name: name of the tensor in the program's signature.
        shape: shape on the device; it has as many elements as the signature's shape.
        dtype: numpy's name of the dtype on the device.
        scale: real value of one integer step; 0: not quantized.
        zero_point: integer that stands for the real value 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    scale: float = 0.0
    zero_point: int = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes of the tensor's file or buffer: number of elements times the item size."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def to_device(self, array: Array, program: str) -> Array:
        """Convert an array of the program's signature to the array that the device reads.

        Args:
            array: C-contiguous, of the signature's shape and dtype.
            program: name of the program, for the error.

        Raises:
            NumericalError: a value to quantize is a NaN or an infinity, which no integer stands for.
        """
        if not self.scale:
            return array.astype(_little_endian(self.dtype), copy=False)
        if not np.isfinite(array).all():
            raise NumericalError(
                f"the input `{self.name}` of `{program}` holds a NaN or an infinity",
                program,
                why=f"the compiled program has an {self.dtype} input, which cannot hold such a value",
                hint="check the program that computed this value",
            )
        limits = np.iinfo(self.dtype)
        steps = np.asarray(array, np.float64) / self.scale
        rounded = np.trunc(steps + np.copysign(0.5, steps))  # half away from zero, as TFLite rounds
        integers = np.clip(rounded + self.zero_point, limits.min, limits.max)
        converted: Array = integers.astype(_little_endian(self.dtype))
        return converted

    def from_device(self, array: Array, dtype: str) -> Array:
        """Convert an array that the device wrote to `dtype`, the signature's dtype; the shape is kept."""
        if not self.scale:
            return array.astype(dtype, copy=False)
        integers = array.astype(np.float32) - np.float32(self.zero_point)
        return (integers * np.float32(self.scale)).astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class DeviceIo:
    """The inputs and outputs of one compiled program, in the order of the .tflite that was compiled."""

    inputs: tuple[DeviceTensor, ...]
    outputs: tuple[DeviceTensor, ...]

    @classmethod
    def of_spec(cls, spec: ProgramSpec) -> "DeviceIo":
        """Return the inputs and outputs of a program that is not quantized: those of its signature."""
        return cls(_plain(spec.inputs), _plain(spec.outputs))

    @classmethod
    def of_tflite(cls, path: Path, spec: ProgramSpec) -> "DeviceIo":
        """Return the inputs and outputs of a .tflite with one signature, with their quantization.

        Raises:
            ProgramError: the file is damaged.
            BundleError: it has other inputs or outputs than the program.
        """
        from whisperport.model.inspection.read_tflite import read_tflite
        from whisperport.model.inspection.tflite_signatures import read_signatures

        (graph,), (signature,) = read_tflite(path), read_signatures(path).values()
        pairs = ((signature.inputs, graph.inputs), (signature.outputs, graph.outputs))
        sides = (
            tuple(_of_value(tensor, value) for tensor, value in zip(*pair, strict=True))
            for pair in pairs
        )
        return cls.from_json(cls(*sides).to_json(), spec)

    @classmethod
    def from_json(cls, data: Any, spec: ProgramSpec) -> "DeviceIo":
        """Read what `to_json` returned, and check it against the program's signature.

        Raises:
            BundleError: a field is missing or has an impossible value, a name is not in the signature, or a
                shape has another number of elements.
        """
        try:
            sides = [
                tuple(_read(tensor) for tensor in data[side]) for side in ("inputs", "outputs")
            ]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _damaged(spec.name, f"{type(error).__name__}: {error}"[:200]) from error
        for tensors, expected in zip(sides, (spec.inputs, spec.outputs), strict=True):
            _check(spec.name, tensors, expected)
        return cls(*sides)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for the manifest."""
        return {
            side: [{**asdict(tensor), "shape": list(tensor.shape)} for tensor in tensors]
            for side, tensors in (("inputs", self.inputs), ("outputs", self.outputs))
        }


def _plain(tensors: Sequence[TensorSpec]) -> tuple[DeviceTensor, ...]:
    return tuple(
        DeviceTensor(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype)
        for tensor in map(stored, tensors)
    )


def _of_value(tensor: TensorSpec, value: "Value") -> DeviceTensor:
    stated = value.quantization
    plain = DeviceTensor(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype)
    if stated is None or stated.scales != 1:  # `from_json` rejects integers without one scale
        return plain
    return replace(plain, scale=stated.scale, zero_point=stated.zero_point)


def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _read(data: Any) -> DeviceTensor:
    tensor = DeviceTensor(
        name=str(data["name"]),
        shape=tuple(int(axis) for axis in data["shape"]),
        dtype=str(data["dtype"]),
        scale=float(data["scale"]),
        zero_point=int(data["zero_point"]),
    )
    if tensor.dtype not in DTYPES:
        raise ValueError(f"the dtype of {tensor.name[:80]!r} is {tensor.dtype[:80]!r}")
    if not (math.isfinite(tensor.scale) and tensor.scale >= 0):
        raise ValueError(f"the scale of {tensor.name[:80]!r} is {tensor.scale}")
    if tensor.scale and tensor.dtype not in QUANTIZED:
        raise ValueError(f"{tensor.name[:80]!r} has a scale, but its dtype is {tensor.dtype}")
    if tensor.scale:
        limits = np.iinfo(tensor.dtype)
        if not limits.min <= tensor.zero_point <= limits.max:
            raise ValueError(
                f"the zero point of {tensor.name[:80]!r} is {tensor.zero_point}, out of {tensor.dtype}"
            )
    return tensor


def _check(program: str, tensors: Sequence[DeviceTensor], expected: Sequence[TensorSpec]) -> None:
    by_name = {tensor.name: tensor for tensor in expected}
    if sorted(tensor.name for tensor in tensors) != sorted(by_name):
        raise _damaged(
            program,
            f"it lists {', '.join(t.name[:80] for t in tensors)}; expected {', '.join(by_name)}",
        )
    for tensor in tensors:
        spec = by_name[tensor.name]
        if min(tensor.shape, default=1) < 1 or math.prod(tensor.shape) != math.prod(spec.shape):
            raise _damaged(
                program,
                f"the shape of {tensor.name[:80]!r} is {tensor.shape}, the signature's {spec.shape}",
            )
        plain = tensor.dtype in NARROWER.get(spec.dtype, (spec.dtype,))
        if not plain and not (tensor.scale and spec.dtype == "float32"):
            raise _damaged(
                program,
                f"{tensor.name[:80]!r} is {tensor.dtype} without a scale; the signature has {spec.dtype}",
            )


def _damaged(program: str, why: str) -> BundleError:
    return BundleError(
        f"the manifest describes the device's inputs and outputs of `{program}` wrongly",
        why=why,
        hint="export the bundle again, and compile it again",
    )
