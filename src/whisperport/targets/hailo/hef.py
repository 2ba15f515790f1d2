"""Read the description in a HEF, Hailo's compiled file, and check that the file is complete.

    common   magic u32 · version u32 · bytes of the description u32          big-endian, packed
    v0       reserved u32 · md5 [16]                                         of all that follows
    v1       crc32 u32 · bytes of data u64 · reserved u32                    of all that follows
    v2       xxh3 u64 · bytes of data u64 · reserved 2 × u64                 of all that follows
    v3       xxh3 u64 · data with padding u64 · padding u32 · more data u64 · xxh3 of the
             description u64 · reserved u64
    then     the description (protobuf `ProtoHEFHef`), then the data

Source: hailo-ai/hailort, libhailort/src/hef/hef.cpp and hef_internal.hpp (v0 and v1: 4.18; v2 and
v3: 5.x), and libhailort/hef.proto. This reader was checked against those files only: this project had no
HEF of the vendor.
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
from whisperport.system.protobuf import Field, message_class
from whisperport.system.regular_file import other_kind

MAGIC = 0x01484546  # "\x01HEF"
COMMON = struct.Struct(">III")
TAILS = {
    0: struct.Struct(">I16s"),
    1: struct.Struct(">IQI"),
    2: struct.Struct(">QQQQ"),
    3: struct.Struct(">QQIQQQ"),
}
CHUNK = 1 << 20

# Source: libhailort/hef.proto, `ProtoHEFHwArch`; the names of 4 and 103 to 105 are those of HailoRT 5.
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
    """One input or output of a network, with its shape on the device, without the batch."""

    name: str
    shape: tuple[int, int, int]  # height, width, features


@dataclass(frozen=True, slots=True)
class Network:
    """One network group. It has no streams if an older compiler wrote the file."""

    name: str
    inputs: tuple[Stream, ...]
    outputs: tuple[Stream, ...]
    sorted_outputs: tuple[str, ...]  # names of the outputs in the compiler's order


@dataclass(frozen=True, slots=True)
class Hef:
    """The description in a HEF."""

    format_version: int
    architecture: int  # see ARCHITECTURES
    compiler_version: str  # "" if the file does not contain it
    timestamp: int  # as the compiler wrote it
    networks: tuple[Network, ...]

    @property
    def chip(self) -> str:
        """Name of the chip that the file was compiled for."""
        return ARCHITECTURES.get(self.architecture, f"architecture {self.architecture}")


@dataclass(frozen=True, slots=True)
class _Header:
    version: int
    size: int  # bytes of the header itself
    description: int  # bytes of the protobuf message
    rest: int  # bytes after the message
    sums: tuple[tuple[int, bytes], ...]  # number of bytes after the header, and their checksum


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


def read_hef(path: str | os.PathLike[str]) -> Hef:
    """Read the description in a HEF and check the checksums of the file.

    Raises:
        BundleError: the file is not a HEF, has an unknown version, or is truncated or damaged.
        MissingPackageError: `xxhash` is not installed, and the file has version 2 or later.
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
            f"{path.name} is not a HEF",
            why=f"expected it to begin with {MAGIC:08x}, got {common[:4].hex() or 'nothing'}",
            hint="give the `.hef` file that `hailo compiler` or `whisperport compile` wrote",
        )
    _, version, description = COMMON.unpack(common)
    if version not in TAILS:
        raise BundleError(
            f"{path.name} is a HEF of version {version}, which is not supported",
            why=f"this whisperport reads versions {min(TAILS)} to {max(TAILS)}",
            hint="pip install --upgrade whisperport",
        )
    tail = file.read(TAILS[version].size)
    if len(tail) < TAILS[version].size:
        raise _damaged(path, f"it ends after {size} bytes, inside its header")
    header = _parsed(version, description, TAILS[version].unpack(tail))
    expected = header.size + header.description + header.rest
    if size != expected:
        raise _damaged(path, f"it has {size} bytes; expected {expected} according to its header")
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
    if version == 3 and tail[4]:  # zero: the file has no such checksum
        sums.append((description, _bytes(tail[4], 8)))
    return _Header(version, size, description, rest, tuple(sums))


def _bytes(number: int, size: int) -> bytes:
    return number.to_bytes(size, "big")


class _Crc32:
    """zlib's CRC-32 with the interface of hashlib."""

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
            raise _damaged(path, f"its {what} is {found.digest().hex()}; expected {expected.hex()}")


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
        hint="copy it again, or compile it again with `whisperport compile BUNDLE`",
    )


# The fields that are read here; protobuf ignores all others.
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
    """Return the protobuf class of `ProtoHEFHef`."""
    return message_class(SCHEMA, "Hef")
