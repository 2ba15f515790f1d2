"""Read the description in a HEF, Hailo's compiled file, and check that the file is complete.

    common   magic u32 · version u32 · bytes of the description u32          big-endian, packed
    v0       reserved u32 · md5 [16]
    v1       crc32 u32 · bytes of data u64 · reserved u32
    v2       xxh3 u64 · bytes of data u64 · reserved 2 × u64
    v3       xxh3 u64 · data with padding u64 · padding u32 · more data u64 · xxh3 of the
             description u64 · reserved u64
    then     the description (protobuf `ProtoHEFHef`), then the data

HailoRT compares the checksums when it loads a file; this reader does not.

Source: hailo-ai/hailort, libhailort/src/hef/hef.cpp and hef_internal.hpp (v0 and v1: 4.18; v2 and
v3: 5.x), and libhailort/hef.proto. This reader was checked against those files only: this project had no
HEF of the vendor.
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from whisperport.errors import BundleError
from whisperport.system.protobuf import Field, message_class
from whisperport.system.regular_file import other_kind

MAGIC = 0x01484546  # "\x01HEF"
COMMON = struct.Struct(">III")
# Version -> the rest of its header, and the places of the numbers in it that count bytes of data.
TAILS = {
    0: (struct.Struct(">I16s"), ()),
    1: (struct.Struct(">IQI"), (1,)),
    2: (struct.Struct(">QQQQ"), (1,)),
    3: (struct.Struct(">QQIQQQ"), (1, 3)),
}

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

    inputs: tuple[Stream, ...]
    outputs: tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class Hef:
    """The description in a HEF."""

    architecture: int  # see ARCHITECTURES
    compiler_version: str  # "" if the file does not contain it
    networks: tuple[Network, ...]

    @property
    def chip(self) -> str:
        """Name of the chip that the file was compiled for."""
        return ARCHITECTURES.get(self.architecture, f"architecture {self.architecture}")


def read_hef(path: str | os.PathLike[str]) -> Hef:
    """Read the description in a HEF.

    Raises:
        BundleError: the file is not a HEF, has an unknown version, or is truncated or damaged.
    """
    path = Path(path)
    if kind := other_kind(path):
        raise BundleError(f"cannot read {path}", why=f"it is {kind}, not a file")
    try:
        return _hef(_description(path), path)
    except OSError as error:
        raise BundleError(f"cannot read {path}", why=str(error)) from error


def _description(path: Path) -> bytes:
    """Return the protobuf message, after a check of the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
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
        form, places = TAILS[version]
        tail = file.read(form.size)
        if len(tail) < form.size:
            raise _damaged(path, f"it ends after {size} bytes, inside its header")
        data = sum(form.unpack(tail)[place] for place in places)
        expected = COMMON.size + form.size + description + data
        if size != expected:
            raise _damaged(
                path, f"it has {size} bytes; expected {expected} according to its header"
            )
        return file.read(description)


def _hef(description: bytes, path: Path) -> Hef:
    from google.protobuf.message import DecodeError

    try:
        message = _message_class().FromString(description)
    except DecodeError as error:
        raise _damaged(path, f"its description cannot be read: {error}") from error
    return Hef(
        architecture=message.header.hw_arch,
        compiler_version=message.header.sdk_version,
        networks=tuple(_network(group) for group in message.network_groups),
    )


def _network(group: Any) -> Network:
    """Return a network's inputs and outputs: the pads that no other operator produces or consumes."""
    produced = {edge.src for edge in group.pad_edges}
    consumed = {edge.dst for edge in group.pad_edges}
    return Network(
        _streams(pad for op in group.ops for pad in op.input_pads if pad.index not in consumed),
        _streams(pad for op in group.ops for pad in op.output_pads if pad.index not in produced),
    )


def _streams(pads: Iterable[Any]) -> tuple[Stream, ...]:
    shapes = ((pad.name, pad.tensor_shape) for pad in pads)
    return tuple(Stream(name, (s.height, s.width, s.features)) for name, s in shapes)


def _damaged(path: Path, why: str) -> BundleError:
    return BundleError(
        f"{path.name} is damaged",
        why=why,
        hint="copy it again, or compile it again with `whisperport compile BUNDLE`",
    )


# The fields that are read here; protobuf ignores all others.
SCHEMA: dict[str, tuple[Field, ...]] = {
    "Hef": (("header", 1, "Header"), ("network_groups", 2, "[Group]")),
    "Header": (("hw_arch", 1, "uint64"), ("sdk_version", 3, "string")),
    "Group": (("ops", 8, "[Op]"), ("pad_edges", 9, "[Edge]")),
    "Op": (("input_pads", 2, "[Pad]"), ("output_pads", 3, "[Pad]")),
    "Edge": (("src", 1, "uint32"), ("dst", 2, "uint32")),
    "Pad": (("index", 1, "uint32"), ("name", 2, "string"), ("tensor_shape", 6, "Shape")),
    "Shape": (("height", 1, "uint32"), ("width", 3, "uint32"), ("features", 5, "uint32")),
}


@cache
def _message_class() -> Any:
    """Return the protobuf class of `ProtoHEFHef`."""
    return message_class(SCHEMA, "Hef")
