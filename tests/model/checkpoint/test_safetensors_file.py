"""A safetensors file that anyone may have written."""

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.weight_files import read_safetensors

TENSORS = {"one": torch.arange(6.0).reshape(2, 3), "two": torch.ones(4, dtype=torch.bfloat16)}
GOOD = save(TENSORS, {"format": "pt"})
HEADER_END = 8 + struct.unpack("<Q", GOOD[:8])[0]
FUZZ = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(folder, data):
    path = folder / "any.safetensors"
    path.write_bytes(data)
    return path


def with_header(text, body=b"\0" * 64):
    return struct.pack("<Q", len(text)) + text + body


def rejection(path):
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(path)
    assert caught.value.why
    assert caught.value.hint
    return caught.value


def test_a_whole_file_is_read_as_stored(tmp_path):
    found = read_safetensors(written(tmp_path, GOOD))

    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert found["two"].dtype == torch.bfloat16


def entry(**changes):
    return json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\1\0\0", "has 3 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", f"header length is {2**63} bytes"),
        (struct.pack("<Q", 20 << 20) + bytes(21 << 20), f"header length is {20 << 20} bytes"),
        (GOOD[: HEADER_END - 5], "truncated"),
        (GOOD[:-1], "any.safetensors"),
        (GOOD + b"\0", "any.safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"PK\3\4" + bytes(100), "header"),
        (with_header(b"not json"), "header is damaged"),
        (with_header(b"[1]"), "not a JSON object"),
        (with_header(b"[" * 50_000), "header is damaged"),
        (with_header(b'{"a": 1, "a": 2}'), "`a` occurs twice"),
        (with_header(b'{"x": null}'), "`x` is of dtype None"),
        (with_header(entry(dtype="I8").encode(), bytes(8)), "dtype 'I8'"),
        (with_header(entry(dtype=["F32"]).encode(), bytes(8)), "dtype ['F32']"),
        (with_header(entry(shape=[3]).encode(), bytes(8)), "any.safetensors"),
        (with_header(entry(shape=[-2]).encode(), bytes(8)), "any.safetensors"),
        (with_header(entry(shape=[2**40, 2**40]).encode(), bytes(8)), "any.safetensors"),
        (with_header(entry(data_offsets=[8, 0]).encode(), bytes(8)), "any.safetensors"),
        (with_header(entry(data_offsets=[0, 2**62]).encode(), bytes(8)), "any.safetensors"),
    ],
)
def test_a_bad_file_is_rejected_with_what_is_wrong(data, message, tmp_path):
    error = rejection(written(tmp_path, data))

    assert message in f"{error.what} {error.why}"


def test_a_missing_file_is_rejected(tmp_path):
    error = rejection(tmp_path / "none.safetensors")

    assert "No such file" in error.why


@FUZZ
@given(length=st.integers(0, len(GOOD) - 1))
def test_a_file_cut_anywhere_is_rejected(length, tmp_path):
    rejection(written(tmp_path, GOOD[:length]))


@FUZZ
@given(at=st.integers(0, HEADER_END - 1), bit=st.integers(0, 7))
@example(at=7, bit=7)
def test_a_flipped_bit_in_the_header_is_rejected_or_reads_within_the_file(at, bit, tmp_path):
    data = bytearray(GOOD)
    data[at] ^= 1 << bit

    try:
        found = read_safetensors(written(tmp_path, bytes(data)))
    except CheckpointError:
        return
    # A name changed, or a dtype for one of the same width: still the file's own bytes.
    assert sum(t.numel() * t.element_size() for t in found.values()) == len(GOOD) - HEADER_END


@FUZZ
@given(data=st.binary(max_size=300))
def test_random_bytes_are_rejected_or_hold_nothing(data, tmp_path):
    try:
        found = read_safetensors(written(tmp_path, data))
    except CheckpointError:
        return
    assert found == {}


def test_tensors_of_another_model_are_rejected_as_a_misfit(altered_folder):
    folder = altered_folder(without=("model.safetensors",))
    save_file(TENSORS, folder / "model.safetensors")

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)

    assert "2 unexpected: one, two" in caught.value.why


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no `weight_map`"),
        ({"weight_map": {}}, "no `weight_map`"),
        ({"weight_map": ["a.safetensors"]}, "no `weight_map`"),
        ({"weight_map": {"x": "../../outside.safetensors"}}, "is not the name of"),
        ({"weight_map": {"x": "/etc/passwd"}}, "is not the name of"),
        ({"weight_map": {"x": 3}}, "is not the name of"),
        ({"weight_map": {"x": "gone.safetensors"}}, "1 of its 1 files are missing"),
    ],
)
def test_a_bad_index_of_shards_is_rejected(index, message, altered_folder):
    folder = altered_folder(without=("model.safetensors",))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)

    assert message in caught.value.why


def test_a_tensor_in_two_shards_is_rejected(altered_folder):
    folder = altered_folder(without=("model.safetensors",))
    for name in ("a.safetensors", "b.safetensors"):
        save_file(TENSORS, folder / name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}})
    )

    with pytest.raises(CheckpointError, match="in two of its files"):
        load_checkpoint(folder)


def test_a_folder_without_weights_is_rejected_with_what_was_looked_for(altered_folder):
    folder = altered_folder(without=("model.safetensors",))
    save_file(TENSORS, folder / "weights.safetensors")

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)

    assert "model.safetensors" in caught.value.why
    assert "it has weights.safetensors" in caught.value.why
