"""Read how a device stores tensors, from a JSON file: dtype, scale and zero point by the tensor's name."""

from collections.abc import Iterator
from pathlib import Path

from whisperport.bundle.strict_json import parse
from whisperport.diagnosis.expected import INTEGERS, Quantization
from whisperport.errors import BundleError, UsageError
from whisperport.system.regular_file import other_kind

LARGEST = 2**20  # bytes


def read_quantization(path: Path) -> dict[str, Quantization]:
    """Return the quantization of each tensor.

    Args:
        path: a JSON file, {"NAME": {"dtype": "int8", "scale": 0.05, "zero_point": 3}}.

    Raises:
        UsageError: the file is missing, is no such JSON, or a value is out of range.
    """
    try:
        if kind := other_kind(path):
            raise ValueError(f"it is {kind}")
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        return dict(_entries(data))
    except (OSError, ValueError, BundleError) as error:
        raise UsageError(
            f"cannot read the quantization {path}",
            why=getattr(error, "strerror", None) or str(error),
            hint='write {"NAME": {"dtype": "int8", "scale": 0.05, "zero_point": 3}}',
        ) from error


def _entries(data: bytes) -> Iterator[tuple[str, Quantization]]:
    for name, field in parse(data, "the quantization").mapping().items():
        members = field.members(("dtype", "scale", "zero_point"))
        zero_point = members["zero_point"]
        if isinstance(zero_point.value, bool) or not isinstance(zero_point.value, int):
            zero_point.reject("is not an integer")
        yield (
            name,
            Quantization(
                members["dtype"].one_of(INTEGERS), members["scale"].number(), zero_point.value
            ),
        )
