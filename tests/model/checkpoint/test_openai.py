"""`.pt` files that anyone may have written: nothing in them is ever run. And the tokenizers of folders."""

import json
import os
import pickle
import zipfile

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import CheckpointError, TokenizerError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.pickled_file import read_pickled
from whisperport.model.checkpoint.tokenizer_files import read_tokenizer
from whisperport.speech.text.vocabulary import openai_tokenizer


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def rejection(path):
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    return caught.value


def without_dims(model, path, **changes):
    torch.save({"model_state_dict": model.state_dict(), **changes}, path)
    return path


@pytest.mark.parametrize("form", ["zip", "old", "bare pickle"])
def test_code_in_a_pt_file_is_named_and_not_run(form, tmp_path):
    data = {"dims": Trap(tmp_path / "sprung"), "model_state_dict": {}}
    path = tmp_path / "trap.pt"
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(data, protocol=2))
    else:
        torch.save(data, path, _use_new_zipfile_serialization=form == "zip")

    error = rejection(path)

    assert not (tmp_path / "sprung").exists()
    assert "contains code, which was not run" in error.what
    assert "system" in error.why
    assert "safetensors" in error.hint


def test_code_in_pytorch_model_bin_is_not_run_either(altered_folder, tmp_path):
    folder = altered_folder(without=("model.safetensors",))
    torch.save({"x": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")

    error = rejection(folder)

    assert not (tmp_path / "sprung").exists()
    assert "contains code" in error.what


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"hello", b"PK\3\4" + b"\0" * 60, b"\x80\x02."])
def test_bytes_that_are_no_checkpoint_are_rejected_as_damaged(data, tmp_path):
    (tmp_path / "any.pt").write_bytes(data)

    error = rejection(tmp_path / "any.pt")

    assert "damaged" in error.why
    assert "weights_only=False" not in str(error)


SMALL = {"dims": {"n_mels": 80}, "model_state_dict": {"x": torch.arange(40.0)}}
FUZZ = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(at=st.floats(0, 1), bit=st.integers(0, 7), cut=st.booleans(), zipped=st.booleans())
def test_a_damaged_file_is_rejected_or_read_as_plain_data(at, bit, cut, zipped, tmp_path):
    path = tmp_path / "any.pt"
    torch.save(SMALL, path, _use_new_zipfile_serialization=zipped)
    data = bytearray(path.read_bytes())
    at = min(int(at * len(data)), len(data) - 1)
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data[:at]) if cut else bytes(data))

    try:
        data = read_pickled(path)
    except CheckpointError:
        return
    assert not isinstance(data, dict) or all(isinstance(key, str | bytes) for key in data)


def test_a_compressed_archive_is_read_not_mapped(random_openai_whisper, tmp_path):
    model = random_openai_whisper()
    torch.save(
        {"dims": vars(model.dims), "model_state_dict": model.state_dict()}, tmp_path / "a.pt"
    )
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as stored,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))

    weights = load_checkpoint(tmp_path / "b.pt").weights

    assert torch.equal(weights["encoder.conv1.weight"], model.state_dict()["encoder.conv1.weight"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1, 2], "holds a list"),
        ({"model_state_dict": 3}, "is 'int', not a mapping"),
        ({"dims": {}, "model_state_dict": {"x": "text"}}, "`x` is not a plain tensor but str"),
        (
            {"dims": {}, "model_state_dict": {"x": torch.eye(3).to_sparse()}},
            "a tensor of layout torch.sparse_coo",
        ),
        ({"dims": {"n_mels": 80}, "model_state_dict": {}}, "expected the ten sizes"),
        ({"dims": 5, "model_state_dict": {}}, "expected the ten sizes"),
        ({"epoch": 3, "optimizer": {}}, "`epoch` is not a plain tensor but int"),
        ({"x": torch.zeros(2)}, "`encoder.conv1.weight` is missing"),
        ({}, "`encoder.conv1.weight` is missing"),
        ({"model.encoder.layers.0.fc1.bias": torch.zeros(2)}, "model.encoder.layers.0.fc1.weight"),
    ],
)
def test_a_file_of_another_kind_is_rejected_with_what_it_holds(data, message, tmp_path):
    torch.save(data, tmp_path / "any.pt")

    error = rejection(tmp_path / "any.pt")

    assert message in error.why


@pytest.mark.parametrize(
    ("size", "value", "message"),
    [
        ("n_mels", "80", "`n_mels` is '80'; expected a whole number"),
        ("n_audio_layer", -1, "`n_audio_layer` is -1; expected 1 to 512"),
        ("n_text_layer", 10**9, "`n_text_layer` is 1000000000; expected 1 to 512"),
        ("n_vocab", 1 << 2000, "`n_vocab` is a number of 2001 bits"),
        ("n_audio_state", None, "`n_audio_state` is None; expected a whole number"),
        ("n_text_state", 128, "encoder width 64 differs from decoder width 128"),
    ],
)
def test_impossible_sizes_are_rejected(size, value, message, random_openai_whisper, tmp_path):
    model = random_openai_whisper()
    torch.save(
        {"dims": {**vars(model.dims), size: value}, "model_state_dict": {}}, tmp_path / "any.pt"
    )

    error = rejection(tmp_path / "any.pt")

    assert message in error.why


@pytest.mark.parametrize("name", ["alignment_heads", "module.alignment_heads"])
def test_saved_alignment_heads_are_ignored(name, random_openai_whisper, tmp_path):
    # given a state with openai-whisper's buffer of heads, which are those of its base
    model = random_openai_whisper()
    state = {name.replace("alignment_heads", n): tensor for n, tensor in model.state_dict().items()}
    state[name] = model.alignment_heads
    torch.save({"dims": vars(model.dims), "model_state_dict": state}, tmp_path / "heads.pt")
    # then the rest is read
    assert load_checkpoint(tmp_path / "heads.pt").weights.keys() == model.state_dict().keys()


def test_a_saved_causal_mask_is_ignored(random_openai_whisper, tmp_path):
    model = random_openai_whisper()
    state = {**model.state_dict(), "decoder.mask": model.decoder.mask}
    torch.save({"dims": vars(model.dims), "model_state_dict": state}, tmp_path / "any.pt")

    checkpoint = load_checkpoint(tmp_path / "any.pt")

    assert checkpoint.weights.keys() == model.state_dict().keys()


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model."])
@pytest.mark.parametrize("key", ["model_state_dict", "state_dict", "model"])
def test_what_a_training_loop_saves_is_read(wrapper, key, random_openai_whisper, tmp_path):
    model = random_openai_whisper()
    state = {**model.state_dict(), "decoder.mask": model.decoder.mask}
    wrapped = {wrapper + name: tensor for name, tensor in state.items()}
    torch.save({"dims": vars(model.dims), "epoch": 3, key: wrapped}, tmp_path / "last.ckpt")

    checkpoint = load_checkpoint(tmp_path / "last.ckpt")

    assert checkpoint.weights.keys() == model.state_dict().keys()


def test_names_with_and_without_a_wrapper_are_not_mixed_up(random_openai_whisper, tmp_path):
    model = random_openai_whisper()
    state = model.state_dict()
    twice = {**{f"module.{name}": tensor + 1 for name, tensor in state.items()}, **state}
    torch.save({"dims": vars(model.dims), "model_state_dict": twice}, tmp_path / "any.pt")

    assert f"{len(state)} unexpected: module.encoder" in rejection(tmp_path / "any.pt").why


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>Not found", "a web page"),
    ],
)
def test_a_text_downloaded_in_place_of_weights_is_named(data, message, tmp_path):
    (tmp_path / "any.pt").write_bytes(data)

    assert message in rejection(tmp_path / "any.pt").why


@pytest.mark.filterwarnings("ignore")  # torch advises against both
def test_a_torchscript_program_is_named(tmp_path):
    torch.jit.script(torch.nn.ReLU()).save(str(tmp_path / "any.pt"))

    assert "TorchScript" in rejection(tmp_path / "any.pt").what


@pytest.mark.filterwarnings("ignore")  # torch advises against both
def test_a_quantized_tensor_in_a_pt_file_is_named(random_openai_whisper, tmp_path):
    quantized = torch.quantize_per_tensor(torch.zeros(64), 0.1, 0, torch.qint8)
    torch.save(
        {"dims": {}, "model_state_dict": {"decoder.ln.bias": quantized}}, tmp_path / "any.pt"
    )

    assert "a quantized tensor, qint8" in rejection(tmp_path / "any.pt").why


def test_sizes_are_inferred_at_openais_widths_with_a_warning(random_openai_whisper, tmp_path):
    sizes = {"n_audio_state": 384, "n_audio_head": 6, "n_text_state": 384, "n_text_head": 6}
    model = random_openai_whisper(**sizes, n_text_layer=1, n_audio_layer=1)

    checkpoint = load_checkpoint(without_dims(model, tmp_path / "any.pt"))

    assert {name: getattr(checkpoint.dims, name) for name in vars(model.dims)} == vars(model.dims)
    assert "inferred" in checkpoint.warnings[0]


def test_sizes_are_not_guessed_at_other_widths(random_openai_whisper, tmp_path):
    path = without_dims(random_openai_whisper(), tmp_path / "any.pt")

    error = rejection(path)

    assert "how many attention heads" in error.what
    assert "width 64" in error.why


def test_a_vocabulary_of_another_size_needs_a_tokenizer(random_openai_whisper, tmp_path):
    model = random_openai_whisper(n_vocab=1000)
    path = without_dims(model, tmp_path / "any.pt", dims=vars(model.dims))

    with pytest.raises(TokenizerError, match="no tokenizer in") as caught:
        load_checkpoint(path)

    assert "1000 tokens" in caught.value.why


# The ways a folder may hold its tokenizer

TEXT = " The naïve café, 12 o'clock: 日本語 \U0001f600!"
# Two merges over four bytes; <|endoftext|> is in vocab.json, as in OpenAI's English-only checkpoints.
VOCAB = {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "<|endoftext|>": 5}
MERGES = "#version: 0.2\na b\nĠ ab\n"
ADDED = {"<|startoftranscript|>": 6, "<|notimestamps|>": 7, "<|0.00|>": 8}


def write_parts(folder, *, vocab=VOCAB, merges=MERGES, added=ADDED):
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    if added is not None:
        (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")


def tokenizer_rejection(folder, n_vocab=51865):
    with pytest.raises(TokenizerError) as caught:
        read_tokenizer(folder, n_vocab)
    assert caught.value.why
    return caught.value


def test_tokenizer_json_is_kept_byte_for_byte(tmp_path):
    text = openai_tokenizer(51865).to_str(pretty=True)
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")

    found = read_tokenizer(tmp_path, 51865)

    assert found.json == text.encode()
    assert found.ids["<|notimestamps|>"] == 50363
    assert found.warnings == ()


def test_a_folder_without_tokenizer_files_uses_openais_with_a_warning(tmp_path):
    found = read_tokenizer(tmp_path, 51866)

    assert found.ids["<|notimestamps|>"] == 50364
    assert "assumed" in found.warnings[0]


def test_openais_tokenizer_in_parts_is_put_together_again(tmp_path):
    whole = json.loads(openai_tokenizer(51865).to_str())
    merges = "\n".join(" ".join(pair) for pair in whole["model"]["merges"])
    added = {token["content"]: token["id"] for token in whole["added_tokens"]}
    write_parts(tmp_path, vocab=whole["model"]["vocab"], merges=merges, added=added)

    found = read_tokenizer(tmp_path, 51865)

    built = tokenizers.Tokenizer.from_str(found.json.decode())
    assert built.encode(TEXT).ids == openai_tokenizer(51865).encode(TEXT).ids
    assert built.get_vocab() == openai_tokenizer(51865).get_vocab()


def test_parts_without_special_tokens_get_openais(tmp_path):
    # given OpenAI's vocab.json and merges.txt, without the files that name the special tokens
    whole = json.loads(openai_tokenizer(51865).to_str())["model"]
    merges = "\n".join(" ".join(pair) for pair in whole["merges"])
    vocab = {text: i for text, i in whole["vocab"].items() if not text.startswith("<|")}
    write_parts(tmp_path, vocab=vocab, merges=merges, added=None)
    # when they are read
    tokenizer = read_tokenizer(tmp_path, 51865)
    # then it is OpenAI's tokenizer, with a warning
    assert tokenizer.ids == openai_tokenizer(51865).get_vocab(with_added_tokens=True)
    assert "no special tokens" in tokenizer.warnings[0]


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_special_tokens_are_found_in_either_file(place, tmp_path):
    write_parts(tmp_path, added=ADDED if place == "added_tokens.json" else None)
    if place == "tokenizer_config.json":
        decoder = {str(i): {"content": text, "special": True} for text, i in ADDED.items()}
        (tmp_path / place).write_text(json.dumps({"added_tokens_decoder": decoder}))

    found = read_tokenizer(tmp_path, 9)

    assert found.ids == {**VOCAB, **ADDED}
    built = tokenizers.Tokenizer.from_str(found.json.decode())
    assert built.encode("ab ab<|notimestamps|>").ids == [3, 4, 7]
    # Times are read back as text by those who ask for them, so they are added but not special.
    assert [t.special for t in built.get_added_tokens_decoder().values()] == [True, True, False]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"vocab": {}}, "does not match"),
        ({"vocab": {"a": "0"}}, "vocab.json has the token"),
        ({"vocab": {"a": -1}}, "vocab.json has the token"),
        ({"merges": "a z\n"}, "does not match"),
        ({"merges": "a\n"}, "line 1 is not two texts"),
        ({"merges": "a b c\n"}, "line 1 is not two texts"),
        ({"added": {"<|startoftranscript|>": 7}}, "should have the id 7"),
        ({"added": {"<|endoftext|>": 9}}, "should have the id 9"),
        ({"added": {"<|x|>": None}}, "no text or no id"),
        ({"added": {"<|x|>": "8"}}, "no text or no id"),
        ({"vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4}, "added": {}}, "<|endoftext|>"),
    ],
)
def test_parts_that_do_not_fit_are_rejected(parts, message, tmp_path):
    write_parts(tmp_path, **parts)

    assert message in tokenizer_rejection(tmp_path).why


@pytest.mark.parametrize("decoder", [{"x": {}}, {"6": "text"}, [1]])
def test_a_damaged_list_of_special_tokens_is_rejected(decoder, tmp_path):
    write_parts(tmp_path, added=None)
    settings_text = json.dumps({"added_tokens_decoder": decoder})
    (tmp_path / "tokenizer_config.json").write_text(settings_text)

    assert "does not map ids" in tokenizer_rejection(tmp_path).why


def test_an_unknown_size_without_a_tokenizer_is_rejected(tmp_path):
    error = tokenizer_rejection(tmp_path, n_vocab=50_000)

    assert "50000 tokens" in error.why
    assert error.hint


def test_a_tokenizer_of_another_model_is_rejected(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
        str(tmp_path / "tokenizer.json")
    )

    assert "none of its 1 tokens is <|endoftext|>" in tokenizer_rejection(tmp_path).why


def test_another_checkpoints_tokenizer_beside_a_checkpoint_is_rejected(altered_folder):
    folder = altered_folder(without=("tokenizer.json",))
    (folder / "tokenizer.json").write_text(openai_tokenizer(51866).to_str(), encoding="utf-8")

    with pytest.raises(TokenizerError, match="belongs to another checkpoint"):
        load_checkpoint(folder)


@pytest.fixture(scope="module")
def small_json(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    write_parts(folder)
    return read_tokenizer(folder, 9).json


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_tokenizer_json_is_rejected_or_still_a_tokenizer(
    at, byte, cut, small_json, tmp_path
):
    data = bytearray(small_json)
    at = min(int(at * len(data)), len(data) - 1)
    data[at] = byte
    (tmp_path / "tokenizer.json").write_bytes(bytes(data[:at]) if cut else bytes(data))

    try:
        found = read_tokenizer(tmp_path, 9)
    except TokenizerError:
        return

    assert "<|endoftext|>" in found.ids


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 50_000, b"{}", b"null"])
def test_a_tokenizer_json_that_is_not_json_is_rejected(data, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(data)

    assert "tokenizer.json" in tokenizer_rejection(tmp_path).what


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": {"vocab": ["a"]}},
        {"model": {"vocab": {"a": "0"}}},
        {"model": {"vocab": {"a": -1}}},
        {"added_tokens": {"a": 1}},
        {"added_tokens": [["a", 1]]},
        {"added_tokens": [{"content": "a"}]},
        {"added_tokens": [{"id": 3}]},
        {"added_tokens": [{"content": "a", "id": True}]},
    ],
)
def test_a_tokenizer_json_of_another_structure_is_rejected(change, small_json, tmp_path):
    data = {**json.loads(small_json), **change}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))

    assert "is not a tokenizer" in tokenizer_rejection(tmp_path).what


def test_a_file_that_makes_the_tokenizers_library_panic_is_rejected(altered_folder, small_json):
    data = json.loads(small_json)
    data["model"]["continuing_subword_prefix"] = "x" * 1000
    folder = altered_folder(without=("tokenizer.json",))
    (folder / "tokenizer.json").write_text(json.dumps(data))

    with pytest.raises(TokenizerError):
        load_checkpoint(folder)
