"""Write .pte files as ExecuTorch does: the parts that describe a program, with the flatbuffers library."""

import struct
from collections.abc import Callable, Sequence

import flatbuffers

Shapes = Sequence[tuple[int, ...]]
CONVERSIONS = (
    ("quantized_decomposed::quantize_per_tensor", "out"),
    ("quantized_decomposed::dequantize_per_tensor", "out"),
)


def pte_bytes(
    inputs: Shapes,
    outputs: Shapes,
    *,
    accelerator: str = "ethos-u85-256",
    backends: Sequence[str] = ("EthosUBackend",),
    subgraphs: int = 1,
    operators: Sequence[tuple[str, str]] = CONVERSIONS,
    methods: int = 1,
    scalar_type: int = 6,
) -> bytes:
    """Return a .pte whose methods call each operator once, and then the delegate `subgraphs` times."""
    b = flatbuffers.Builder(1024)
    plans = []
    for _ in range(methods):
        values = [_tensor(b, shape, scalar_type) for shape in (*inputs, *outputs)]
        calls = [_call(b, 1, index) for index in range(len(operators))]
        calls += [_call(b, 2, 0) for _ in range(subgraphs)]
        chain = _table(b, 4, {2: _offsets(b, calls)})
        fields = {
            0: b.CreateString("encoder"),
            2: _offsets(b, values),
            3: _integers(b, range(len(inputs))),
            4: _integers(b, range(len(inputs), len(values))),
            5: _offsets(b, [chain]),
            6: _offsets(b, [_strings(b, names) for names in operators]),
            7: _offsets(b, [_delegate(b, name, accelerator) for name in backends]),
        }
        plans.append(_table(b, 9, fields))
    root = _table(b, 8, {1: _offsets(b, plans)})
    b.Finish(root, file_identifier=b"ET12")
    return _with_header(bytes(b.Output()))


def _with_header(flat: bytes) -> bytes:
    """Insert the extended header behind the identifier, and move the root by its size."""
    header = struct.pack("<4sIQQQ", b"eh00", 32, len(flat) + 32, 0, 0)
    (root,) = struct.unpack_from("<I", flat)
    return struct.pack("<I", root + 32) + flat[4:8] + header + flat[8:]


def _table(b: flatbuffers.Builder, size: int, offsets: dict[int, int]) -> int:
    return _filled(
        b,
        size,
        lambda: [b.PrependUOffsetTRelativeSlot(k, at, 0) for k, at in offsets.items()],
    )


def _filled(b: flatbuffers.Builder, size: int, fill: Callable[[], object]) -> int:
    b.StartObject(size)
    fill()
    return int(b.EndObject())


def _offsets(b: flatbuffers.Builder, items: Sequence[int]) -> int:
    b.StartVector(4, len(items), 4)
    for item in reversed(items):
        b.PrependUOffsetTRelative(item)
    return int(b.EndVector())


def _integers(b: flatbuffers.Builder, items: Sequence[int]) -> int:
    b.StartVector(4, len(items), 4)
    for item in reversed(items):
        b.PrependInt32(item)
    return int(b.EndVector())


def _strings(b: flatbuffers.Builder, names: Sequence[str]) -> int:
    made = [b.CreateString(name) for name in names]
    return _table(b, len(made), dict(enumerate(made)))


def _tensor(b: flatbuffers.Builder, shape: tuple[int, ...], scalar_type: int) -> int:
    sizes = _integers(b, shape)
    order = b.CreateByteVector(bytes(range(len(shape))))

    def fill() -> None:
        b.PrependInt8Slot(0, scalar_type, 0)
        b.PrependUOffsetTRelativeSlot(2, sizes, 0)
        b.PrependUOffsetTRelativeSlot(3, order, 0)

    return _union(b, 5, _filled(b, 10, fill))


def _call(b: flatbuffers.Builder, kind: int, index: int) -> int:
    args = _integers(b, [0])

    def fill() -> None:
        b.PrependInt32Slot(0, index, 0)
        b.PrependUOffsetTRelativeSlot(1, args, 0)

    return _union(b, kind, _filled(b, 2, fill))


def _union(b: flatbuffers.Builder, kind: int, value: int) -> int:
    def fill() -> None:
        b.PrependUint8Slot(0, kind, 0)
        b.PrependUOffsetTRelativeSlot(1, value, 0)

    return _filled(b, 2, fill)


def _delegate(b: flatbuffers.Builder, name: str, accelerator: str) -> int:
    target = _table(
        b, 2, {0: b.CreateString("target"), 1: b.CreateByteVector(accelerator.encode())}
    )
    reference = _filled(b, 2, lambda: b.PrependInt8Slot(0, 1, 0))
    fields = {0: b.CreateString(name), 1: reference, 2: _offsets(b, [target])}
    return _table(b, 3, fields)
