"""Read the description inside a compiled file (`.rknn`). The compiled program itself is not read.

    0    "RKNN", 4 zero bytes
    8    version of the format, 64 bits, little-endian
    16   n, the length of the compiled program in bytes, 64 bits
    64   the compiled program, whose bytes 4 to 8 are "RKNN" too
    64+n length of the description in bytes, 64 bits; then the description as JSON, to the end of the file

The layout was read off files that rknn-toolkit2 2.5.0 wrote; the vendor does not document it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from whisperport.bundle.strict_json import Field, parse
from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.regular_file import other_kind

MAGIC, HEADER = b"RKNN", 64
MAX_DESCRIPTION = 2**24  # bytes; that of a decoder step has 7 KB
MAX_RANK, MAX_SIZE = 16, 2**31
RECOMPILE = "compile the bundle again with `whisperport compile`"
FLOAT_TYPE = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledTensor:
    """An input or output of a compiled program.

    Attributes:
        name: its name in the program.
        shape: its shape.
        type: type inside the program: "float16", "int8", "int16", …
    """

    name: str
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RknnFile:
    """The description of a compiled file.

    Attributes:
        chips: names of the chips that it was compiled for, such as "rk3588".
        compiler: version of the compiler.
        inputs: inputs of the program, in its order.
        outputs: outputs of the program, in its order.
        program_bytes: size of the compiled program.
    """

    chips: tuple[str, ...]
    compiler: str
    inputs: tuple[CompiledTensor, ...]
    outputs: tuple[CompiledTensor, ...]
    program_bytes: int


def read_rknn(path: Path) -> RknnFile:
    """Read and check the description of a compiled file.

    Raises:
        BundleError: the file is damaged, or is no compiled file.
    """
    kind = other_kind(path)
    if kind:
        raise _error(path, f"the path is {kind}")
    try:
        with path.open("rb") as file:
            length, text = _description(path, file, path.stat().st_size)
    except OSError as error:
        raise _error(path, str(error)) from error
    try:
        top = parse(text, path.name).mapping()
        tensors = [_tensor(field) for field in _member(top, "norm_tensor").elements()]
        return RknnFile(
            chips=tuple(chip.text() for chip in _member(top, "target_platform").elements()),
            compiler=_member(top, "version").text()[:40],
            inputs=_connected(top, "input", tensors),
            outputs=_connected(top, "output", tensors),
            program_bytes=length,
        )
    except BundleError as error:
        raise _error(path, error.why or error.what) from error


def check_rknn(path: Path, chip: str, spec: ProgramSpec) -> RknnFile:
    """Read a compiled file, and compare its chip, inputs and outputs with those of a program.

    Raises:
        BundleError: see `read_rknn`; or it is for another chip, or has other inputs or outputs.
    """
    found = read_rknn(path)
    if chip not in found.chips:
        raise BundleError(
            f"{path.name} is for another chip than `{chip}`",
            why=f"it was compiled for {', '.join(found.chips)[:80] or 'no chip'}",
            hint=RECOMPILE,
        )
    for kind, stated, expected in (
        ("inputs", found.inputs, spec.inputs),
        ("outputs", found.outputs, spec.outputs),
    ):
        different = _difference(stated, expected)
        if different:
            raise BundleError(
                f"{path.name} does not compute `{spec.name}`",
                why=f"it has {len(stated)} {kind}; expected {len(expected)}; {different}",
                hint=RECOMPILE,
            )
    return found


def _description(path: Path, file: BinaryIO, size: int) -> tuple[int, bytes]:
    """Return the length of the compiled program, and the bytes of the description."""
    header = file.read(HEADER + 8)
    if len(header) < HEADER + 8 or header[:8] != MAGIC + bytes(4) or header[-4:] != MAGIC:
        raise _error(path, "it does not begin as a compiled file does")
    length = int.from_bytes(header[16:24], "little")
    if HEADER + length + 8 > size:
        raise _error(path, "it is cut off")
    file.seek(HEADER + length)
    described = int.from_bytes(file.read(8), "little")
    if described > MAX_DESCRIPTION or HEADER + length + 8 + described != size:
        raise _error(path, "the length of its description is not that of the rest of the file")
    return length, file.read(described)


def _member(fields: dict[str, Field], name: str) -> Field:
    if name not in fields:
        raise BundleError(f"its description has no `{name}`")
    return fields[name]


def _tensor(field: Field) -> CompiledTensor:
    members = field.mapping()
    sizes = _member(members, "size").elements()
    if len(sizes) > MAX_RANK:
        field.reject(f"has {len(sizes)} axes; expected at most {MAX_RANK}")
    quantized = _member(_member(members, "dtype").mapping(), "qnt_type").text()
    return CompiledTensor(
        name=_member(members, "url").text(),
        shape=tuple(size.integer(1, MAX_SIZE) for size in sizes),
        type=quantized[:20] or FLOAT_TYPE,
    )


def _connected(
    top: dict[str, Field], end: str, tensors: list[CompiledTensor]
) -> tuple[CompiledTensor, ...]:
    """Return the tensors of all inputs or outputs, in the order of the program."""
    found: dict[int, CompiledTensor] = {}
    for one in _member(top, "graph").elements():
        members = one.mapping()
        if _member(members, "left").text() != end:
            continue
        position = _member(members, "left_tensor_id").integer()
        tensor = _member(members, "right_tensor_id").integer(0, len(tensors) - 1)
        if position in found:
            one.reject(f"repeats {end} {position}")
        found[position] = tensors[tensor]
    if sorted(found) != list(range(len(found))):
        raise BundleError(f"its description does not number its {end}s without gaps")
    return tuple(found[position] for position in sorted(found))


def _difference(stated: Sequence[CompiledTensor], expected: Sequence[TensorSpec]) -> str:
    """Return the first difference in names and shapes; "" if there is none."""
    for position in range(max(len(stated), len(expected))):
        found, wanted = _shown(stated, position), _shown(expected, position)
        if found != wanted:
            return f"number {position + 1} is {found}, and not {wanted}"
    return ""


def _shown(tensors: Sequence[CompiledTensor] | Sequence[TensorSpec], position: int) -> str:
    if position >= len(tensors):
        return "missing"
    return f"{tensors[position].name[:40]!r} {list(tensors[position].shape)}"


def _error(path: Path, why: str) -> BundleError:
    return BundleError(
        f"{path.name} is not a compiled file of this target", why=why[:300], hint=RECOMPILE
    )
