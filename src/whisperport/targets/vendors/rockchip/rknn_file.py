"""Read the description inside a compiled file (`.rknn`). The compiled program itself is not read.

    0    "RKNN", 4 zero bytes
    8    version of the format, 64 bits, little-endian
    16   n, the length of the compiled program in bytes, 64 bits
    64   the compiled program, whose bytes 4 to 8 are "RKNN" too
    64+n length of the description in bytes, 64 bits; then the description as JSON, to the end of the file

The layout was read off files that rknn-toolkit2 2.5.0 wrote; the vendor does not document it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiled_file import expect_signature, not_compiled, other_chip, read_bytes

MAGIC, HEADER = b"RKNN", 64
MAX_DESCRIPTION = 2**24  # bytes; that of a decoder step has 7 KB
FLOAT_TYPE = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class RknnFile:
    """The description of a compiled file.

    Attributes:
        chips: names of the chips that it was compiled for, such as "rk3588".
        compiler: version of the compiler.
        inputs: name and shape of each input of the program, in its order.
        outputs: name and shape of each output.
        shapes: name of an input or output -> its shape.
        types: types of the inputs and outputs inside the program: "float16", "int8", "int16", …
        program_bytes: size of the compiled program.
    """

    chips: tuple[str, ...]
    compiler: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    types: frozenset[str]
    program_bytes: int


def read_rknn(path: Path) -> RknnFile:
    """Read the description of a compiled file.

    Raises:
        BundleError: the file is damaged.
    """
    header = read_bytes(path, HEADER + 8)
    if len(header) < HEADER + 8 or header[:8] != MAGIC + bytes(4) or header[-4:] != MAGIC:
        raise not_compiled(path, "it does not begin as a compiled file does")
    length = int.from_bytes(header[16:24], "little")
    try:
        return _described(json.loads(_description(path, HEADER + length)), length)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise not_compiled(path, f"{type(error).__name__}: {error}") from error


def check_rknn(path: Path, chip: str, spec: ProgramSpec) -> RknnFile:
    """Read a compiled file, and compare its chip, inputs and outputs with those of a program.

    Raises:
        BundleError: the file is damaged, is for another chip, or has other inputs or outputs.
    """
    compiled = read_rknn(path)
    if chip not in compiled.chips:
        raise other_chip(
            path, chip, f"it was compiled for {', '.join(compiled.chips)[:80] or 'no chip'}"
        )
    expect_signature(
        path,
        spec,
        compiled.inputs,
        compiled.outputs,
        lambda tensor: _shown(tensor.name, tensor.shape),
    )
    return compiled


def _description(path: Path, place: int) -> bytes:
    """Return the JSON whose length is at a place of the file, and which ends with the file.

    Raises:
        ValueError: it has another length.
    """
    left = path.stat().st_size - place - 8
    if not 0 <= left <= MAX_DESCRIPTION:
        raise ValueError("the file is cut off, or its description is too long")
    with path.open("rb") as file:
        file.seek(place)
        if int.from_bytes(file.read(8), "little") != left:
            raise ValueError("the length of its description is not that of the rest of the file")
        return file.read(left)


def _described(top: Any, length: int) -> RknnFile:
    tensors = top["norm_tensor"]
    inputs, outputs = (
        [_tensor(tensors[index]) for index in _places(top, end)] for end in ("input", "output")
    )
    types = [kind for _, _, kind in (*inputs, *outputs)]
    return RknnFile(
        chips=tuple(map(str, top["target_platform"])),
        compiler=str(top["version"])[:40],
        inputs=tuple(_shown(name, shape) for name, shape, _ in inputs),
        outputs=tuple(_shown(name, shape) for name, shape, _ in outputs),
        shapes={name: shape for name, shape, _ in (*inputs, *outputs)},
        types=frozenset(str(kind)[:20] or FLOAT_TYPE for kind in types),
        program_bytes=length,
    )


def _tensor(described: Any) -> tuple[str, tuple[int, ...], Any]:
    """Return name, shape and type of an input or output."""
    name, shape = described["url"], described["size"]
    if not isinstance(name, str) or not all(type(size) is int for size in shape):
        raise ValueError("a name is no text, or a shape no list of whole numbers")
    return name, tuple(shape), described["dtype"]["qnt_type"]


def _places(top: Mapping[str, Any], end: str) -> list[int]:
    """Return the number of the tensor of each input or output, in the order of the program."""
    edges = [edge for edge in top["graph"] if edge["left"] == end]
    edges.sort(key=lambda edge: int(edge["left_tensor_id"]))
    return [edge["right_tensor_id"] for edge in edges]


def _shown(name: str, shape: Sequence[int]) -> str:
    return f"{name!r} {list(shape)}"
