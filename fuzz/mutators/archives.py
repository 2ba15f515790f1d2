"""Mutate zip archives: rename, repeat or remove members, point outside, or unpack to gigabytes."""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from random import Random

from fuzz.mutators import raw, text

BOMB_BYTES = 6 << 30
BLOCK = 16 << 20  # bytes of zeros that are compressed once and repeated

Change = Callable[[bytes, Random], bytes]


def members(data: bytes) -> dict[str, bytes]:
    """Return the members: name -> contents."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def mutated(
    data: bytes, random: Random, outside: str, changes: Mapping[str, Change] | None = None
) -> bytes:
    """Return the archive with one or two members changed.

    Args:
        changes: suffix of a member's name -> function that changes its contents; bytes are changed in
            all other members.
    """
    found = list(members(data).items())
    bombed = ""
    for _ in range(random.choice((1, 1, 2))):
        place = random.randrange(len(found))
        name, content = found[place]
        change = random.random()
        if change < 0.65:
            ends = next((end for end in changes or {} if name.endswith(end)), None)
            found[place] = name, (changes or {}).get(ends or "", raw.mutated)(content, random)
        elif change < 0.72:
            found[place] = text(random, outside), content
        elif change < 0.79:
            found.append((name, raw.mutated(content, random)))
        elif change < 0.86 and len(found) > 1:
            del found[place]
        elif change < 0.91:
            bombed = name
        else:
            other = random.randrange(len(found))
            found[place], found[other] = (name, found[other][1]), (found[other][0], content)
    kind = zipfile.ZIP_DEFLATED if random.random() < 0.2 else zipfile.ZIP_STORED
    made = written(found, kind)
    if bombed:
        made = bomb(found, bombed)
    return raw.mutated(made, random) if random.random() < 0.1 else made


def written(found: list[tuple[str, bytes]], kind: int = zipfile.ZIP_STORED) -> bytes:
    """Return the archive; names may be repeated."""
    import warnings

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(file, "w", kind) as archive:
            for name, content in found:
                entry = zipfile.ZipInfo(
                    name.replace("\0", "").encode("utf-8", "replace").decode() or "x"
                )
                entry.compress_type = kind
                archive.writestr(entry, content)
    return file.getvalue()


def bomb(found: list[tuple[str, bytes]], name: str) -> bytes:
    """Return the archive with a member `name` that unpacks to 6 GB of zeros."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(BLOCK)) + packer.flush(zlib.Z_FULL_FLUSH)
    packed = block * (BOMB_BYTES // BLOCK) + packer.flush()
    out, index, count = bytearray(), bytearray(), 0
    for member, content in dict(found).items():
        own = packed if member == name else content
        size, method = (BOMB_BYTES, 8) if member == name else (len(content), 0)
        key = member.replace("\0", "").encode("utf-8", "replace")
        place, shown = len(out), min(size, 0xFFFF_FFFF)
        extra = struct.pack("<HHQ", 1, 8, size) if size > 0xFFFF_FFFE else b""
        form = (20, 0, method, 0, 0, zlib.crc32(content), len(own), shown, len(key))
        out += struct.pack("<IHHHHHIIIHH", 0x04034B50, *form, 0) + key + own
        index += struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 20, *form, len(extra), *(0,) * 4, place
        )
        index += key + extra
        count += 1
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(index), len(out), 0)
    return bytes(out + index + end)
