"""Read what a HEF, Hailo's compiled file, says of itself, and check that it is whole.

    common   magic u32 · version u32 · bytes of the description u32          big-endian, packed
    v0       reserved u32 · md5 [16]                                         of all that follows
    v1       crc32 u32 · bytes of data u64 · reserved u32                    of all that follows
    v2       xxh3 u64 · bytes of data u64 · reserved 2 × u64                 of all that follows
    v3       xxh3 u64 · data with padding u64 · padding u32 · more data u64 · xxh3 of the
             description u64 · reserved u64
    then     the description (protobuf `ProtoHEFHef`), then the data

Source: hailo-ai/hailort, libhailort/src/hef/hef.cpp and hef_internal.hpp (v0 and v1: 4.18; v2 and
v3: 5.x), and libhailort/hef.proto. Checked against those: no HEF of the vendor's was at hand.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from whisperport.errors import BundleError, MissingPackageError
from whisperport.protobuf import Field, message_class
from whisperport.regular_file import other_kind

MAGIC = 0x01484546  # "\x01HEF"
COMMON = struct.Struct(">III")
TAILS = {
    0: struct.Struct(">I16s"),
    1: struct.Struct(">IQI"),
    2: struct.Struct(">QQQQ"),
    3: struct.Struct(">QQIQQQ"),
}
CHUNK = 1 << 20

# libhailort/hef.proto, `ProtoHEFHwArch`, with the names of HailoRT 5 for 4 and 103 to 105.
ARCHITECTURES = {
    0: "Hailo-8 (early)",
    1: "Hailo-8",
    2: "Hailo-8R",
    3: "Hailo-8L",
    4: "Hailo-15M or 10H",
    5: "Hailo-10H (early)",
    103: "Hailo-15H or 10H",
    104: "Hailo-10H (Ginger)",
    105: "Hailo-10H (Lavender)",
}


@dataclass(frozen=True, slots=True)
class Stream:
    """One input or output of a network: its shape as the device has it, without the batch."""

    name: str
    shape: tuple[int, int, int]  # height, width, features


@dataclass(frozen=True, slots=True)
class Network:
    """One network group; streams are empty where the file describes them in the older way."""

    name: str
    inputs: tuple[Stream, ...]
    outputs: tuple[Stream, ...]
    sorted_outputs: tuple[str, ...]  # the order in which the compiler had them


@dataclass(frozen=True, slots=True)
class Hef:
    """What a HEF says of itself."""

    format_version: int
    architecture: int  # see ARCHITECTURES
    compiler_version: str  # "" where the file does not say
    timestamp: int  # as the compiler wrote it
    networks: tuple[Network, ...]

    @property
    def chip(self) -> str:
        return ARCHITECTURES.get(self.architecture, f"architecture {self.architecture}")


@dataclass(frozen=True, slots=True)
class _Header:
    version: int
    size: int  # bytes of the header itself
    description: int  # bytes of the protobuf
    rest: int  # bytes after it
    sums: tuple[tuple[int, bytes], ...]  # bytes after the header, and their checksum


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


def read_hef(path: str | os.PathLike[str]) -> Hef:
    """Read and check a HEF; its data is hashed and not kept.

    Raises:
        BundleError: no HEF, of an unknown version, cut short, or damaged.
        MissingPackageError: `xxhash`, for files of version 2 and later.
    """
    path = Path(path)
    if kind := other_kind(path):
        raise BundleError(f"cannot read {path}", why=f"it is {kind}, not a file")
    try:
        with path.open("rb") as file:
            header = _header(file, path)
            _check_sums(file, header, path)
            file.seek(header.size)
            return _hef(header, file.read(header.description), path)
    except OSError as error:
        raise BundleError(f"cannot read {path}", why=str(error)) from error


def _header(file: BinaryIO, path: Path) -> _Header:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    common = file.read(COMMON.size)
    if len(common) < COMMON.size or COMMON.unpack(common)[0] != MAGIC:
        raise BundleError(
            f"{path.name} is no HEF",
            why=f"expected it to begin with {MAGIC:08x}, got {common[:4].hex() or 'nothing'}",
            hint="give the `.hef` that `hailo compiler` or `whisperport compile` wrote",
        )
    _, version, description = COMMON.unpack(common)
    if version not in TAILS:
        raise BundleError(
            f"{path.name} is a HEF of version {version}",
            why=f"known are versions {min(TAILS)} to {max(TAILS)}",
        )
    tail = file.read(TAILS[version].size)
    if len(tail) < TAILS[version].size:
        raise _damaged(path, f"it ends after {size} bytes, within its header")
    header = _parsed(version, description, TAILS[version].unpack(tail))
    expected = header.size + header.description + header.rest
    if size != expected:
        raise _damaged(path, f"its header says {expected} bytes, and it has {size}")
    return header


def _parsed(version: int, description: int, tail: tuple[Any, ...]) -> _Header:
    size = COMMON.size + TAILS[version].size
    if version == 0:
        return _Header(version, size, description, 0, ((description, tail[1]),))
    if version == 1:
        total = description + tail[1]
        return _Header(version, size, description, tail[1], ((total, _bytes(tail[0], 4)),))
    rest = tail[1] if version == 2 else tail[1] + tail[3]
    sums = [(description + rest, _bytes(tail[0], 8))]
    if version == 3 and tail[4]:  # zero: none was written
        sums.append((description, _bytes(tail[4], 8)))
    return _Header(version, size, description, rest, tuple(sums))


def _bytes(number: int, size: int) -> bytes:
    return number.to_bytes(size, "big")


class _Crc32:
    """zlib's checksum in the form of hashlib's."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return _bytes(self._value, 4)


def _xxh3() -> _Hash:
    try:
        import xxhash
    except ImportError as error:
        raise MissingPackageError(
            "cannot check this HEF: `xxhash` is not installed",
            why=str(error),
            hint='pip install "whisperport[hailo]"',
        ) from error
    return xxhash.xxh3_64()


def _md5() -> _Hash:
    return hashlib.md5(usedforsecurity=False)


HASHES: dict[int, Callable[[], _Hash]] = {0: _md5, 1: _Crc32, 2: _xxh3, 3: _xxh3}


def _check_sums(file: BinaryIO, header: _Header, path: Path) -> None:
    for covered, expected in header.sums:
        found = HASHES[header.version]()
        file.seek(header.size)
        for chunk in _chunks(file, covered):
            found.update(chunk)
        if found.digest() != expected:
            what = "description's checksum" if covered == header.description else "checksum"
            raise _damaged(path, f"its {what} is {found.digest().hex()}, not {expected.hex()}")


def _chunks(file: BinaryIO, left: int) -> Iterator[bytes]:
    while left and (chunk := file.read(min(CHUNK, left))):
        left -= len(chunk)
        yield chunk


def _hef(header: _Header, description: bytes, path: Path) -> Hef:
    from google.protobuf.message import DecodeError

    message = _message_class()()
    try:
        message.ParseFromString(description)
    except DecodeError as error:
        raise _damaged(path, f"its description cannot be read: {error}") from error
    return Hef(
        format_version=header.version,
        architecture=message.header.hw_arch,
        compiler_version=message.header.sdk_version,
        timestamp=message.header.timestamp,
        networks=tuple(_network(group) for group in message.network_groups),
    )


def _network(group: Any) -> Network:
    produced = {edge.src for edge in group.pad_edges}
    consumed = {edge.dst for edge in group.pad_edges}
    return Network(
        name=group.network_group_name or group.network_group_metadata.network_group_name,
        inputs=_streams(
            pad for op in group.ops for pad in op.input_pads if pad.index not in consumed
        ),
        outputs=_streams(
            pad for op in group.ops for pad in op.output_pads if pad.index not in produced
        ),
        sorted_outputs=tuple(group.sorted_outputs_order),
    )


def _streams(pads: Iterator[Any]) -> tuple[Stream, ...]:
    return tuple(
        Stream(
            pad.name, (pad.tensor_shape.height, pad.tensor_shape.width, pad.tensor_shape.features)
        )
        for pad in pads
    )


def _damaged(path: Path, why: str) -> BundleError:
    return BundleError(
        f"{path.name} is damaged",
        why=why,
        hint="copy it again and compare its size; or compile it again: whisperport compile BUNDLE",
    )


# Only what is read here: protobuf passes over the rest.
SCHEMA: dict[str, tuple[Field, ...]] = {
    "Hef": (("header", 1, "Header"), ("network_groups", 2, "[Group]")),
    "Header": (
        ("hw_arch", 1, "uint64"),
        ("timestamp", 2, "uint64"),
        ("sdk_version", 3, "string"),
    ),
    "Group": (
        ("network_group_metadata", 1, "Metadata"),
        ("sorted_outputs_order", 4, "[string]"),
        ("ops", 8, "[Op]"),
        ("pad_edges", 9, "[Edge]"),
        ("network_group_name", 10, "string"),
    ),
    "Metadata": (("network_group_name", 1, "string"),),
    "Op": (("input_pads", 2, "[Pad]"), ("output_pads", 3, "[Pad]")),
    "Edge": (("src", 1, "uint32"), ("dst", 2, "uint32")),
    "Pad": (("index", 1, "uint32"), ("name", 2, "string"), ("tensor_shape", 6, "Shape")),
    "Shape": (("height", 1, "uint32"), ("width", 3, "uint32"), ("features", 5, "uint32")),
}


@cache
def _message_class() -> Any:
    """The class of `ProtoHEFHef`."""
    return message_class(SCHEMA, "Hef")
