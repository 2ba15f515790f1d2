"""The ways a folder may hold its tokenizer."""

import json

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import TokenizerError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.tokenizer_files import read_tokenizer
from whisperport.speech.text.vocabulary import openai_tokenizer

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


def rejection(folder, n_vocab=51865):
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

    assert message in rejection(tmp_path).why


@pytest.mark.parametrize("decoder", [{"x": {}}, {"6": "text"}, [1]])
def test_a_damaged_list_of_special_tokens_is_rejected(decoder, tmp_path):
    write_parts(tmp_path, added=None)
    settings_text = json.dumps({"added_tokens_decoder": decoder})
    (tmp_path / "tokenizer_config.json").write_text(settings_text)

    assert "does not map ids" in rejection(tmp_path).why


def test_an_unknown_size_without_a_tokenizer_is_rejected(tmp_path):
    error = rejection(tmp_path, n_vocab=50_000)

    assert "50000 tokens" in error.why
    assert error.hint


def test_a_tokenizer_of_another_model_is_rejected(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
        str(tmp_path / "tokenizer.json")
    )

    assert "none of its 1 tokens is <|endoftext|>" in rejection(tmp_path).why


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

    assert "tokenizer.json" in rejection(tmp_path).what


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

    assert "is not a tokenizer" in rejection(tmp_path).what


def test_a_file_that_makes_the_tokenizers_library_panic_is_rejected(altered_folder, small_json):
    data = json.loads(small_json)
    data["model"]["continuing_subword_prefix"] = "x" * 1000
    folder = altered_folder(without=("tokenizer.json",))
    (folder / "tokenizer.json").write_text(json.dumps(data))

    with pytest.raises(TokenizerError):
        load_checkpoint(folder)
