"""Read HEFs that the tests write by the public description; no file of the vendor is available."""

import hashlib
import random
import struct
import zlib
from pathlib import Path

import pytest
import xxhash

from whisperport.errors import BundleError
from whisperport.targets.hailo.hef import COMMON, MAGIC, TAILS, _message_class, read_hef

from ...extent import core_or_all

VERSIONS = (0, 1, 2, 3)
DATA = bytes(range(256)) * 3
CASES = core_or_all(2_000, 10_000)


def _description(arch: int = 3) -> bytes:
    hef = _message_class()()
    hef.header.hw_arch, hef.header.timestamp, hef.header.sdk_version = arch, 1700000000, "3.31.0"
    group = hef.network_groups.add(network_group_name="encoder")
    group.sorted_outputs_order.append("encoder/ew_add9")
    op = group.ops.add()
    into = op.input_pads.add(index=0, name="encoder/input_layer1")
    into.tensor_shape.height, into.tensor_shape.width, into.tensor_shape.features = 1, 1000, 80
    out = op.output_pads.add(index=1, name="encoder/ew_add9")
    out.tensor_shape.height, out.tensor_shape.width, out.tensor_shape.features = 1, 500, 384
    return bytes(hef.SerializeToString())


def _hef(version: int, description: bytes | None = None, data: bytes = DATA) -> bytes:
    described = _description() if description is None else description
    data = b"" if version == 0 else data
    body = described + data
    whole, part = xxhash.xxh3_64_intdigest(body), xxhash.xxh3_64_intdigest(described)
    tail = {
        0: (0, hashlib.md5(body).digest()),
        1: (zlib.crc32(body), len(data), 0),
        2: (whole, len(data), 0, 0),
        3: (whole, len(data) - 16, 8, 16, part, 0),
    }[version]
    return COMMON.pack(MAGIC, version, len(described)) + TAILS[version].pack(*tail) + body


def _read(tmp_path: Path, content: bytes):
    path = tmp_path / "encoder.hef"
    path.write_bytes(content)
    return read_hef(path)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_hef_says_its_chip_its_compiler_and_its_streams(tmp_path, version):
    hef = _read(tmp_path, _hef(version))
    assert (hef.format_version, hef.architecture, hef.chip) == (version, 3, "Hailo-8L")
    assert (hef.compiler_version, hef.timestamp) == ("3.31.0", 1700000000)
    (network,) = hef.networks
    assert network.name == "encoder"
    assert [(s.name, s.shape) for s in network.inputs] == [("encoder/input_layer1", (1, 1000, 80))]
    assert [(s.name, s.shape) for s in network.outputs] == [("encoder/ew_add9", (1, 500, 384))]
    assert network.sorted_outputs == ("encoder/ew_add9",)


@pytest.mark.parametrize(("version", "size"), [(0, 32), (1, 28), (2, 44), (3, 56)])
def test_headers_have_the_sizes_of_the_vendors_structs(version, size):
    assert COMMON.size + TAILS[version].size == size


def test_an_architecture_left_out_is_zero_as_protobuf_has_it(tmp_path):
    assert _read(tmp_path, _hef(1, _description(arch=0))).architecture == 0


def test_a_pad_that_feeds_another_operator_is_no_output(tmp_path):
    hef = _message_class()()
    group = hef.network_groups.add()
    group.ops.add().output_pads.add(index=1, name="inner")
    group.ops.add().input_pads.add(index=2, name="also inner")
    group.pad_edges.add(src=1, dst=2)
    (network,) = _read(tmp_path, _hef(1, hef.SerializeToString())).networks
    assert (network.inputs, network.outputs) == ((), ())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a HEF"),
        (b"\x7fELF" + bytes(60), "not a HEF"),
        (struct.pack(">III", MAGIC, 4, 0) + bytes(64), "version 4"),
        (_hef(3)[:20], "damaged"),
        (_hef(1, b"\xff" * 40), "damaged"),  # the checksum is right, and it is no protobuf
        (_hef(2) + b"\0", "damaged"),
    ],
    ids=["empty", "another format", "newer", "cut header", "no protobuf", "longer"],
)
def test_a_file_that_is_no_whole_hef_is_refused(tmp_path, content, says):
    with pytest.raises(BundleError, match=says):
        _read(tmp_path, content)


def test_a_missing_file_is_an_error_of_ours(tmp_path):
    with pytest.raises(BundleError, match="cannot read"):
        read_hef(tmp_path / "none.hef")


def test_sizes_beyond_the_file_cost_no_memory(tmp_path):
    header = COMMON.pack(MAGIC, 2, 2**32 - 1) + TAILS[2].pack(0, 2**63, 0, 0)
    with pytest.raises(BundleError, match="according to its header"):
        _read(tmp_path, header)


# Bits that nothing covers and that carry nothing: each version's reserved words, v3's padding.
UNCHECKED = {0: {(12, 16)}, 1: {(24, 28)}, 2: {(28, 44)}, 3: {(28, 32), (48, 56)}}


def _is_checked(version: int, byte: int) -> bool:
    return not any(start <= byte < end for start, end in UNCHECKED[version])


def test_every_cut_and_every_flipped_bit_of_thousands_is_an_error(tmp_path):
    random_ = random.Random(0)
    whole = {version: _hef(version) for version in VERSIONS}
    for case in range(CASES):
        version = case % len(VERSIONS)
        content = bytearray(whole[version])
        if case % 3 == 0:
            del content[random_.randrange(len(content)) :]
        else:
            places = [byte for byte in range(len(content)) if _is_checked(version, byte)]
            content[random_.choice(places)] ^= 1 << random_.randrange(8)
        with pytest.raises(BundleError):
            _read(tmp_path, bytes(content))


def test_a_flipped_reserved_bit_changes_nothing_that_is_read(tmp_path):
    for version in VERSIONS:
        for start, end in UNCHECKED[version] - {(28, 32)}:
            content = bytearray(_hef(version))
            content[(start + end) // 2] ^= 1
            assert _read(tmp_path, bytes(content)) == _read(tmp_path, _hef(version))


def test_damage_with_a_right_checksum_is_read_or_refused_and_never_crashes(tmp_path):
    random_ = random.Random(1)
    for _ in range(2000):
        description = bytearray(_description())
        for _ in range(random_.randrange(1, 4)):
            description[random_.randrange(len(description))] = random_.randrange(256)
        try:
            _read(tmp_path, _hef(1, bytes(description)))
        except BundleError:
            continue
