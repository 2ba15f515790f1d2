"""Read an HLO module, the format that XLA-based compilers read, without its large constants.

The file contains an `HloModuleProto`, or an `HloProto` as XLA's option `--xla_dump_hlo_as_proto` writes it.

Source: field numbers and numbers of dtypes from xla/service/hlo.proto and xla/xla_data.proto of
https://github.com/openxla/xla, commits 0b8fa9f and 011b758 (2025).
"""

from pathlib import Path
from typing import Any, BinaryIO

from whisperport.errors import ProgramError
from whisperport.inspection.protobuf_skeleton import BYTES, Walk, skeleton, varint
from whisperport.system.protobuf import Field, message_class

TEXT, MLIR_BYTECODE = b"HloModule", b"ML\xefR"
HEAD_BYTES = 512  # of a file, enough for the two names at its beginning
PROTO_HINT = (
    "write the module as a protocol buffer: in jax, "
    "`jax.jit(f).lower(*args).compiler_ir('hlo').as_serialized_hlo_module_proto()`; in PyTorch/XLA, "
    "`torch_xla._XLAC._get_xla_tensors_hlo_proto`; in XLA, the option `--xla_dump_hlo_as_proto`"
)

SCHEMA: dict[str, tuple[Field, ...]] = {
    "Module": (
        ("name", 1, "string"),
        ("computations", 3, "[Computation]"),
        ("entry_computation_id", 6, "int64"),
        ("input_output_alias", 8, "Aliases"),
    ),
    "Aliases": (("entries", 1, "[Alias]"),),
    "Alias": (
        ("output_shape_index", 1, "[int64]"),
        ("parameter_number", 2, "int64"),
        ("parameter_shape_index", 3, "[int64]"),
    ),
    "Computation": (
        ("name", 1, "string"),
        ("instructions", 2, "[Instruction]"),
        ("id", 5, "int64"),
        ("root_id", 6, "int64"),
    ),
    "Instruction": (
        ("name", 1, "string"),
        ("opcode", 2, "string"),
        ("shape", 3, "Shape"),
        ("parameter_number", 9, "int64"),
        ("tuple_index", 13, "int64"),
        ("dimensions", 14, "[int64]"),
        ("convolution", 16, "Convolution"),
        ("slices", 17, "[Slice]"),
        ("custom_call_target", 28, "string"),
        ("dot", 30, "Dot"),
        ("id", 35, "int64"),
        ("operand_ids", 36, "[int64]"),
        ("called_computation_ids", 38, "[int64]"),
        ("groups", 50, "int64"),
        ("comparison_direction", 63, "string"),
    ),
    "Shape": (
        ("element_type", 2, "int32"),
        ("dimensions", 3, "[int64]"),
        ("tuple_shapes", 4, "[Shape]"),
        ("is_dynamic", 6, "[int32]"),
    ),
    "Dot": (
        ("lhs_contracting", 1, "[int64]"),
        ("rhs_contracting", 2, "[int64]"),
        ("lhs_batch", 3, "[int64]"),
        ("rhs_batch", 4, "[int64]"),
    ),
    "Convolution": (("kernel_output_feature", 4, "int64"),),
    "Slice": (("stride", 3, "int64"),),
}
ARRAYS = frozenset({*range(2, 10), *range(11, 34)})  # of a LiteralProto
TUPLE_LITERALS, LITERAL, BACKEND_CONFIG, SHARDING = 10, 8, 43, 40
_inside: dict[int, Walk] = {}
_LITERAL = Walk(inner=_inside, arrays=ARRAYS)
_inside[TUPLE_LITERALS] = _LITERAL
_INSTRUCTION = Walk(inner={LITERAL: _LITERAL}, arrays=frozenset({BACKEND_CONFIG, SHARDING}))
_MODULE = Walk(inner={3: Walk(inner={2: _INSTRUCTION})})


def is_hlo(head: bytes) -> bool:
    """Tell whether a file's first `HEAD_BYTES` are those of an HLO module or of an `HloProto`."""
    module = _inner(head)
    return _begins_with_names(head) or _begins_with_names(module)


def read_module(path: Path) -> Any:
    """Return the module as a message with the fields of `SCHEMA`.

    Raises:
        ProgramError: the file is not an HLO module.
    """
    from google.protobuf.message import DecodeError

    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            check_not_text(path, head)
            file.seek(0)
            data = skeleton(file, _end_of_module(file, path.stat().st_size), _MODULE)
        module = message_class(SCHEMA, "Module")()
        module.ParseFromString(data)
    except (ValueError, DecodeError) as error:
        raise damaged(path, error) from error
    return module


def damaged(path: Path, error: Exception) -> ProgramError:
    """Return the error of a file that is not a valid HLO module."""
    return ProgramError(
        f"{path.name} is damaged, or is not an HLO module",
        why=str(error).strip().split("\n")[0][:200] or type(error).__name__,
        hint=PROTO_HINT,
    )


def check_not_text(path: Path, head: bytes) -> None:
    """Raise an error that names the format if the file is HLO text or StableHLO."""
    begins = head.lstrip()
    if begins.startswith(TEXT):
        raise ProgramError(
            f"{path.name} is HLO text, which whisperport does not read",
            why="XLA has no stable text format; the module as a protocol buffer states the same",
            hint=PROTO_HINT,
        )
    if begins.startswith((b"module @", b"module {", MLIR_BYTECODE)):
        raise ProgramError(
            f"{path.name} is an MLIR module, such as StableHLO, which whisperport does not read",
            why="the file begins as MLIR does",
            hint=PROTO_HINT,
        )


def _end_of_module(file: BinaryIO, size: int) -> int:
    """Go to the beginning of the module; return its end. In an `HloProto` the module is the first field."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    if not _inner(head).startswith(b"\x0a"):  # no name begins with a line break
        return size
    varint(file, size)
    length = varint(file, size)[1]
    if file.tell() + length > size:
        raise ValueError("the file ends inside the module")
    return file.tell() + length


def _begins_with_names(data: bytes) -> bool:
    """Tell whether the data begins with two fields of printable text, 1 and 2."""
    name = _inner(data)
    rest = data[2 + len(name) :] if len(name) < 128 else data[3 + len(name) :]
    entry = _inner(rest, number=2)
    return name.isascii() and entry.isascii() and _is_text(name) and _is_text(entry)


def _is_text(data: bytes) -> bool:
    return bool(data) and data.decode("ascii", "replace").isprintable()


def _inner(data: bytes, number: int = 1) -> bytes:
    """Return what the head of a file contains of its first field if this is bytes field `number`."""
    if len(data) < 3 or data[0] != number << 3 | BYTES:
        return b""
    length, start = 0, 1
    for start in range(1, min(6, len(data))):
        length |= (data[start] & 127) << 7 * (start - 1)
        if data[start] < 128:
            break
    return data[start + 1 : start + 1 + length]
