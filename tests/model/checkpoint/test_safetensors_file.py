"""Tensors of files of unknown origin."""

import json
import math
import struct

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.weight_files import read_safetensors

# A safetensors file that anyone may have written.

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


def test_shards_without_their_index_are_rejected_with_the_file_to_copy(altered_folder):
    folder = altered_folder(without=("model.safetensors",))
    (folder / "model-00001-of-00002.safetensors").touch()

    assert "model.safetensors.index.json" in rejected(folder).hint


def test_a_folder_without_weights_is_rejected_with_what_was_looked_for(altered_folder):
    folder = altered_folder(without=("model.safetensors",))
    save_file(TENSORS, folder / "weights.safetensors")

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)

    assert "model.safetensors" in caught.value.why
    assert "it has weights.safetensors" in caught.value.why


# Tensors that do not fit: all of them are named, in one message.

Q_PROJ = "model.decoder.layers.1.self_attn.q_proj.weight"


def rejected(folder):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    return caught.value


def test_missing_unexpected_and_misshaped_tensors_are_listed_together(altered_folder):
    def spoil(tensors):
        del tensors["model.encoder.conv2.bias"]
        tensors["model.encoder.adapter.weight"] = torch.zeros(3)
        tensors[Q_PROJ] = torch.zeros(64, 32)

    error = rejected(altered_folder(weights=spoil))

    assert "1 missing: model.encoder.conv2.bias" in error.why
    assert "1 unexpected: model.encoder.adapter.weight" in error.why
    assert f"{Q_PROJ} (expected (64, 64), found (64, 32))" in error.why
    assert error.hint


def test_after_a_dozen_the_rest_are_counted(altered_folder):
    error = rejected(altered_folder({"config.json": {"decoder_layers": 3}}))

    # A decoder layer has 2 attentions of 4 matrices and 3 biases, 2 linears and 3 norms with biases.
    assert "24 missing" in error.why
    assert "and 12 more" in error.why
    assert error.why.count("model.decoder.layers.2.") == 12


def test_a_bias_on_the_keys_is_unexpected(altered_folder):
    def add(tensors):
        tensors["model.encoder.layers.0.self_attn.k_proj.bias"] = torch.zeros(64)

    error = rejected(altered_folder(weights=add))

    assert "1 unexpected: model.encoder.layers.0.self_attn.k_proj.bias" in error.why


def test_a_tensor_under_two_spellings_of_one_name_is_unexpected(altered_folder):
    def add(tensors):
        tensors["encoder.conv1.bias"] = tensors["model.encoder.conv1.bias"].clone()

    error = rejected(altered_folder(weights=add))

    assert "1 unexpected" in error.why


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_rejected_by_name(value, altered_folder):
    def spoil(tensors):
        tensors[Q_PROJ][3, 5] = value

    error = rejected(altered_folder(weights=spoil))

    assert error.why == f"1 with NaN or infinity: {Q_PROJ}"


def test_a_quantized_tensor_is_rejected_by_its_dtype(altered_folder):
    def quantize(tensors):
        tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int8)

    error = rejected(altered_folder(weights=quantize))

    assert f"`{Q_PROJ}` is of dtype 'I8'" in error.why


def test_double_precision_in_a_pt_file_is_rejected_by_its_dtype(random_openai_whisper, tmp_path):
    model = random_openai_whisper().double()
    torch.save(
        {"dims": vars(model.dims), "model_state_dict": model.state_dict()}, tmp_path / "double.pt"
    )

    error = rejected(tmp_path / "double.pt")

    assert "not float32, float16 or bfloat16" in error.why
    assert "encoder.conv1.weight (float64)" in error.why
    assert "model.float()" in error.hint


@pytest.mark.parametrize(("kept", "absent"), [("encoder", "decoder"), ("decoder", "encoder")])
def test_an_encoder_or_decoder_alone_is_rejected(kept, absent, altered_folder):
    def halve(tensors):
        for name in [name for name in tensors if not name.startswith(f"model.{kept}.")]:
            del tensors[name]
        tensors["classifier.weight"] = torch.zeros(4, 64)

    error = rejected(altered_folder(weights=halve))

    assert f"holds no {absent}" in error.what
    assert error.hint


def test_the_embedding_under_the_name_of_the_projection_tied_to_it_is_used(
    altered_folder, tiny_checkpoint
):
    def rename(tensors):
        tensors["proj_out.weight"] = tensors.pop("model.decoder.embed_tokens.weight")

    weights = load_checkpoint(altered_folder(weights=rename)).weights

    name = "decoder.token_embedding.weight"
    assert torch.equal(weights[name], tiny_checkpoint.weights[name])


def test_an_output_projection_equal_to_the_embedding_is_accepted(altered_folder):
    def untie(tensors):
        tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()

    folder = altered_folder({"config.json": {"tie_word_embeddings": False}}, weights=untie)

    assert "proj_out.weight" not in load_checkpoint(folder).weights


def test_a_separate_output_projection_is_rejected(altered_folder):
    def untie(tensors):
        tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"] + 1

    error = rejected(altered_folder(weights=untie))

    assert "separate output projection" in error.what
    assert "its values differ" in error.why


def test_an_untied_projection_that_is_not_stored_is_rejected(altered_folder):
    error = rejected(altered_folder({"config.json": {"tie_word_embeddings": False}}))

    assert "it is missing" in error.why
    assert "tie_word_embeddings" in error.why


def test_weights_of_a_lora_are_rejected_with_the_way_to_merge(altered_folder):
    def add(tensors):
        tensors["base_model.model.model.encoder.layers.0.fc1.lora_A.weight"] = torch.zeros(4, 64)

    error = rejected(altered_folder(weights=add))

    assert "LoRA" in error.what
    assert "merge_and_unload" in error.hint
