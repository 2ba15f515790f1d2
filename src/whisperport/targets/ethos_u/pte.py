"""Read the description inside a compiled file: a .pte with one method and one call of the NPU's delegate.

A .pte is a flatbuffer. Every offset in it is checked against the size of the file before it is followed,
and no weight is read. The numbers of the fields are their places in executorch/schema/program.fbs of
executorch 1.5.1; the header is executorch/schema/extended_header.h.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec
from whisperport.system.regular_file import other_kind

BACKEND = "EthosUBackend"
RECOMPILE = "compile the bundle again with `whisperport compile`"
DTYPES = {6: "float32", 3: "int32", 5: "float16"}  # executorch/schema/scalar_type.fbs
LARGEST = 2**31 - 1  # bytes of a flatbuffer
MOST = 65_536  # entries of a list that are read
KERNEL_CALL, DELEGATE_CALL = 1, 2  # InstructionArguments; 0 is none
TENSOR = 5  # KernelTypes; 0 is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Pte:
    """The description of a compiled file.

    Attributes:
        method: name of its method.
        inputs: shape and dtype of each input.
        outputs: shape and dtype of each output.
        accelerator: the NPU that it was compiled for, such as "ethos-u85-256".
        subgraphs: number of calls of the NPU's delegate.
        undelegated: operators that run on the CPU, one entry per call.
    """

    method: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    accelerator: str
    subgraphs: int
    undelegated: tuple[str, ...]


def read_pte(path: Path) -> Pte:
    """Read a compiled file.

    Raises:
        BundleError: it is damaged, has several methods, or has no part for the NPU.
    """
    kind = other_kind(path)
    if kind:
        _fail(path, f"the path is {kind}")
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"the file has more than {LARGEST} bytes")
        return _described(path.read_bytes())
    except (OSError, ValueError, struct.error, RecursionError) as error:
        _fail(path, str(error))


def check_pte(path: Path, spec: ProgramSpec, npu: str) -> Pte:
    """Read a compiled file, and compare it with a program and an NPU.

    Args:
        path: of the file.
        spec: signature of the program.
        npu: name of the NPU without its number of MAC units, such as "ethos-u85".

    Raises:
        BundleError: see `read_pte`; or it is for another NPU, or has another signature.
    """
    found = read_pte(path)
    if found.accelerator.rpartition("-")[0] != npu:
        raise BundleError(
            f"{path.name} is for another NPU than `{npu}`",
            why=f"it was compiled for {found.accelerator or 'an NPU that it does not name'}",
            hint=RECOMPILE,
        )
    for side, stated, expected in (
        ("inputs", found.inputs, spec.inputs),
        ("outputs", found.outputs, spec.outputs),
    ):
        wanted = tuple((tensor.shape, tensor.dtype) for tensor in expected)
        if stated != wanted:
            raise BundleError(
                f"{path.name} does not compute `{spec.name}`",
                why=f"its {side} are {_shown(stated)}; expected {_shown(wanted)}",
                hint=RECOMPILE,
            )
    return found


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of a flatbuffer: a place in its bytes."""

    data: bytes
    at: int

    def number(self, field: int, form: str, default: int = 0) -> int:
        place = self._place(field)
        return int(struct.unpack_from(form, self.data, place)[0]) if place else default

    def table(self, field: int) -> "_Table":
        place = self._place(field)
        if not place:
            raise ValueError(f"field {field} of a table is missing")
        return _Table(self.data, place + _u32(self.data, place))

    def vector(self, field: int, size: int) -> tuple[int, int]:
        """Return place and length of a list whose entries have `size` bytes."""
        place = self._place(field)
        if not place:
            return 0, 0
        start = place + _u32(self.data, place)
        count = _u32(self.data, start)
        if count > MOST or start + 4 + count * size > len(self.data):
            raise ValueError(f"a list of {count} entries ends after the end of the file")
        return start + 4, count

    def tables(self, field: int) -> "Iterator[_Table]":
        start, count = self.vector(field, 4)
        for place in range(start, start + 4 * count, 4):
            yield _Table(self.data, place + _u32(self.data, place))

    def numbers(self, field: int) -> tuple[int, ...]:
        start, count = self.vector(field, 4)
        return struct.unpack_from(f"<{count}i", self.data, start) if count else ()

    def content(self, field: int) -> bytes:
        start, count = self.vector(field, 1)
        return self.data[start : start + count]

    def text(self, field: int) -> str:
        return self.content(field).decode("utf-8", "replace")

    def _place(self, field: int) -> int:
        """Return where the value of a field is; 0: the table does not have the field."""
        layout = self.at - int(struct.unpack_from("<i", self.data, _inside(self.data, self.at))[0])
        size = int(struct.unpack_from("<H", self.data, _inside(self.data, layout))[0])
        entry = 4 + 2 * field
        if entry + 2 > size:
            return 0
        offset = int(struct.unpack_from("<H", self.data, _inside(self.data, layout + entry))[0])
        return _inside(self.data, self.at + offset) if offset else 0


def _inside(data: bytes, place: int) -> int:
    if not 0 <= place < len(data):
        raise ValueError(f"an offset points to byte {place} of {len(data)}")
    return place


def _u32(data: bytes, place: int) -> int:
    return int(struct.unpack_from("<I", data, _inside(data, place))[0])


def _described(data: bytes) -> Pte:
    if data[4:6] != b"ET" or data[8:12] != b"eh00":
        raise ValueError("it is not an ExecuTorch program")
    length = int(struct.unpack_from("<Q", data, 16)[0])  # of the flatbuffer; segments follow
    data = data[:length]
    plans = list(_Table(data, _u32(data, 0)).tables(1))
    if len(plans) != 1:
        raise ValueError(f"it has {len(plans)} methods; expected 1")
    (plan,) = plans
    delegates = list(plan.tables(7))
    others = [one.text(0)[:60] for one in delegates if one.text(0) != BACKEND]
    if others or not delegates:
        raise ValueError(f"its delegates are {others}; expected `{BACKEND}`")
    subgraphs, undelegated = _calls(plan)
    return Pte(
        method=plan.text(0)[:80],
        inputs=_tensors(plan, 3),
        outputs=_tensors(plan, 4),
        accelerator=_accelerator(delegates[0]),
        subgraphs=subgraphs,
        undelegated=undelegated,
    )


def _calls(plan: _Table) -> tuple[int, tuple[str, ...]]:
    """Return the number of delegate calls, and the name of the operator of every other call."""
    operators = [f"{one.text(0)}.{one.text(1)}".rstrip(".")[:80] for one in plan.tables(6)]
    subgraphs, undelegated = 0, []
    for chain in plan.tables(5):
        for instruction in chain.tables(2):
            kind = instruction.number(0, "<B")
            if kind == DELEGATE_CALL:
                subgraphs += 1
            elif kind == KERNEL_CALL:
                index = instruction.table(1).number(0, "<i")
                if not 0 <= index < len(operators):
                    raise ValueError(f"a call has operator {index} of {len(operators)}")
                undelegated.append(operators[index])
    return subgraphs, tuple(undelegated)


def _tensors(plan: _Table, field: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    values = list(plan.tables(2))
    found = []
    for index in plan.numbers(field):
        if not 0 <= index < len(values):
            raise ValueError(f"an input or output is value {index} of {len(values)}")
        if values[index].number(0, "<B") != TENSOR:
            raise ValueError("an input or output is not a tensor")
        tensor = values[index].table(1)
        dtype = tensor.number(0, "<b")
        found.append((tensor.numbers(2), DTYPES.get(dtype, f"type {dtype}")))
    return tuple(found)


def _accelerator(delegate: _Table) -> str:
    """Return the NPU among the compile specs of a delegate; "" if it is not there."""
    stated = {one.text(0): one.content(1) for one in delegate.tables(2)}
    return stated.get("target", b"").decode("ascii", "replace")[:40]


def _shown(tensors: tuple[tuple[tuple[int, ...], str], ...]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in tensors[:16])


def _fail(path: Path, why: str) -> NoReturn:
    raise BundleError(
        f"{path.name} is not a compiled file of this target", why=why[:300], hint=RECOMPILE
    )
