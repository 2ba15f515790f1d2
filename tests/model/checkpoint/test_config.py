"""What a checkpoint's config.json and generation_config.json say, and what is rejected."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.checkpoint.generation_settings import read_generation
from whisperport.model.checkpoint.huggingface import read_config
from whisperport.program.dims import Dims
from whisperport.speech.text.vocabulary import openai_generation, openai_tokenizer

from ...micro import whisper_dims

# config.json: the values that are read and those that are rejected.

GOOD = {
    "model_type": "whisper",
    "activation_function": "gelu",
    "scale_embedding": False,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "num_mel_bins": 80,
    "max_source_positions": 100,
    "max_target_positions": 448,
    "vocab_size": 51865,
}


def rejection(folder, config):
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        read_config(folder)
    assert caught.value.why
    return caught.value


@pytest.mark.parametrize("model_type", ["wav2vec2", "llama", None, 7])
def test_another_architecture_is_rejected_by_its_model_type(model_type, tmp_path):
    error = rejection(tmp_path, {**GOOD, "model_type": model_type})

    assert f"`model_type` is {model_type!r}" in error.why
    assert "expected 'whisper'" in rejection(tmp_path, {"d_model": 64}).why


@pytest.mark.parametrize("activation", ["relu", "gelu_new", None])
def test_another_activation_is_rejected_by_name(activation, tmp_path):
    error = rejection(tmp_path, {**GOOD, "activation_function": activation})

    assert repr(activation) in error.why


def test_a_quantized_checkpoint_is_rejected(tmp_path):
    error = rejection(tmp_path, {**GOOD, "quantization_config": {"quant_method": "gptq"}})

    assert "quantized" in error.what


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", "51865", "`vocab_size` is '51865'; expected a whole number"),
        ("d_model", 64.0, "`d_model` is 64.0; expected a whole number"),
        ("encoder_layers", True, "`encoder_layers` is True; expected a whole number"),
        ("encoder_layers", None, "`encoder_layers` is None; expected a whole number"),
        ("decoder_layers", 0, "`decoder_layers` is 0; expected 1 to 512"),
        ("decoder_layers", -4, "`decoder_layers` is -4; expected 1 to 512"),
        ("encoder_layers", 10**30, f"`encoder_layers` is {10**30}; expected 1 to 512"),
        ("vocab_size", 10**4000, "`vocab_size` is a number of 13288 bits"),
        ("d_model", 65, "encoder width 65 is not a multiple of its 2 heads"),
        ("scale_embedding", True, "scale_embedding"),
    ],
)
def test_an_impossible_value_is_rejected_by_name(key, value, message, tmp_path):
    error = rejection(tmp_path, {**GOOD, key: value})

    assert message in error.why


def test_sizes_that_an_old_config_leaves_out_are_those_of_transformers(tmp_path):
    unstated = ("num_mel_bins", "max_source_positions", "max_target_positions")
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in GOOD.items() if k not in unstated})
    )

    _, dims = read_config(tmp_path)

    assert (dims.n_mels, dims.n_audio_ctx, dims.n_text_ctx) == (80, 1500, 448)


def test_a_config_in_openais_words_is_known_as_a_conversion_for_mlx(tmp_path):
    error = rejection(tmp_path, {"model_type": "whisper", "n_audio_state": 384})

    assert "MLX" in error.hint


@pytest.mark.parametrize("inner", ["checkpoint-500", "snapshots/0123abc"])
def test_a_folder_around_the_checkpoint_is_rejected_with_the_one_inside(inner, tmp_path):
    (tmp_path / inner).mkdir(parents=True)
    (tmp_path / inner / "config.json").write_text("{}")

    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)

    assert f"`{tmp_path / inner}`" in caught.value.hint


def test_every_missing_size_is_listed(tmp_path):
    config = {k: v for k, v in GOOD.items() if k not in ("d_model", "vocab_size")}

    error = rejection(tmp_path, config)

    assert error.why == "missing: d_model, vocab_size"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "found list"),
        (b"null", "found NoneType"),
        (b"[" * 100_000, "not JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b" " * (9 << 20), "the maximum is"),
    ],
    ids=["empty", "cut", "binary", "list", "null", "deep", "endless number", "huge"],
)
def test_a_config_that_is_not_json_is_rejected(text, message, tmp_path):
    error = rejection(tmp_path, text)

    assert message in error.why


def test_a_folder_without_a_config_is_rejected_with_a_pointer_to_its_pt_file(tmp_path):
    (tmp_path / "small.pt").write_bytes(b"")

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)

    assert "no config.json" in caught.value.why
    assert "small.pt" in caught.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(GOOD)), JSON, max_size=4))
def test_any_config_is_either_rejected_or_read_as_it_stands(changes, tmp_path):
    config = {**GOOD, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))

    try:
        _, dims = read_config(tmp_path)
    except CheckpointError:
        return
    assert isinstance(dims, Dims)
    assert (dims.n_vocab, dims.n_audio_state) == (config["vocab_size"], config["d_model"])
    assert dims.n_text_layer == config["decoder_layers"]
    assert config["model_type"] == "whisper"


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_config_is_rejected_or_still_possible(at, byte, cut, tmp_path):
    text = bytearray(json.dumps(GOOD).encode())
    at = min(at, len(text) - 1)
    text[at] = byte
    (tmp_path / "config.json").write_bytes(bytes(text[:at]) if cut else bytes(text))

    try:
        _, dims = read_config(tmp_path)
    except CheckpointError:
        return
    assert isinstance(dims, Dims)


# The sources of decoding settings, and settings that are rejected.

DIMS = replace(whisper_dims(64, 2, heads=2), n_audio_ctx=100)
# As in openai/whisper-tiny's generation_config.json, with two of its languages.
STATED = {
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
    "prev_sot_token_id": 50361,
    "no_timestamps_token_id": 50363,
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"transcribe": 50359, "translate": 50358},
    "suppress_tokens": [1, 2, 7],
    "begin_suppress_tokens": [220, 50257],
    "alignment_heads": [[0, 1], [1, 0]],
}
# A fine-tune's own vocabulary: no size or id of OpenAI's.
OWN_IDS = {
    "a": 0,
    "<|endoftext|>": 1,
    "<|startoftranscript|>": 2,
    "<|en|>": 3,
    "<|haw|>": 4,
    "<|transcribe|>": 5,
    "<|startofprev|>": 6,
    "<|nospeech|>": 7,
    "<|notimestamps|>": 8,
    "<|0.00|>": 9,
}


@pytest.fixture(scope="module")
def openai_ids():
    return openai_tokenizer(51865).get_vocab(with_added_tokens=True)


def read(folder, ids, stated=None, config=None, dims=DIMS):
    if stated is not None:
        (folder / "generation_config.json").write_text(json.dumps(stated))
    return read_generation(folder, config or {}, ids, dims)


def test_settings_of_generation_config_are_used(openai_ids, tmp_path):
    generation, warnings = read(tmp_path, openai_ids, STATED)

    assert generation.start_of_transcript == 50258
    assert generation.end_of_text == 50257
    assert generation.start_of_previous == 50361
    assert generation.no_speech == 50362
    assert generation.no_timestamps == 50363
    assert generation.languages == {"en": 50259, "de": 50261}
    assert generation.tasks == {"transcribe": 50359, "translate": 50358}
    assert generation.suppressed == (1, 2, 7)
    assert generation.suppressed_at_start == (220, 50257)
    assert generation.alignment_heads == ((0, 1), (1, 0))
    assert warnings == ()


def test_without_any_file_the_settings_are_openais(openai_ids, tmp_path):
    generation, _ = read(tmp_path, openai_ids)

    assert generation == openai_generation(51865)


def test_a_generation_config_without_lists_suppresses_nothing(openai_ids, tmp_path):
    stated = {k: v for k, v in STATED.items() if not k.endswith("suppress_tokens")}

    generation, _ = read(tmp_path, openai_ids, stated)

    assert (generation.suppressed, generation.suppressed_at_start) == ((), ())


def test_the_lists_of_an_older_config_are_used_if_there_are_no_others(openai_ids, tmp_path):
    config = {"suppress_tokens": [5, 6], "begin_suppress_tokens": []}

    generation, _ = read(tmp_path, openai_ids, config=config)

    assert (generation.suppressed, generation.suppressed_at_start) == ((5, 6), ())


def test_a_vocabulary_of_its_own_is_read_from_the_tokenizer(tmp_path):
    generation, _ = read(tmp_path, OWN_IDS, dims=replace(DIMS, n_vocab=1510))

    assert generation.start_of_transcript == 2
    assert (generation.no_speech, generation.timestamp_begin) == (7, 9)
    assert generation.languages == {"en": 3, "haw": 4}
    assert generation.tasks == {"transcribe": 5}
    assert generation.suppressed == ()


@pytest.mark.parametrize("stated", ["<|de|>", "de", "german", "German"])
def test_the_language_of_a_fine_tuned_checkpoint_is_used(stated, openai_ids, tmp_path):
    generation, warnings = read(tmp_path, openai_ids, {**STATED, "language": stated})

    assert generation.language == "de"
    assert warnings == ()


@pytest.mark.parametrize(("stated", "warned"), [("fr", 1), ("klingon", 1), (None, 0), (7, 0)])
def test_a_language_that_the_checkpoint_has_not_is_left_to_be_detected(
    stated, warned, openai_ids, tmp_path
):
    generation, warnings = read(tmp_path, openai_ids, {**STATED, "language": stated})

    assert generation.language == ""
    assert len(warnings) == warned


def test_tokens_added_after_the_timestamps_are_suppressed_with_a_warning(openai_ids, tmp_path):
    ids = {**openai_ids, "\u0295new": 51865, "\u0295er": 51866}

    generation, warnings = read(tmp_path, ids, STATED, dims=replace(DIMS, n_vocab=51872))

    assert generation.suppressed == (1, 2, 7, *range(51865, 51872))  # padding of the table as well
    assert "2 tokens that were added" in warnings[0]


def test_rows_behind_the_times_that_no_token_has_need_no_warning(openai_ids, tmp_path):
    _, warnings = read(tmp_path, openai_ids, STATED, dims=replace(DIMS, n_vocab=51904))

    assert warnings == ()


def test_openais_settings_are_not_used_for_another_vocabulary_of_the_same_size(tmp_path):
    ids = {k: v for k, v in OWN_IDS.items() if k != "<|startofprev|>"}

    with pytest.raises(CheckpointError, match=r"which token is <\|startofprev\|>"):
        read(tmp_path, ids)


def test_an_english_only_vocabulary_has_no_languages_though_its_tokenizer_lists_them(tmp_path):
    generation, _ = read(tmp_path, OWN_IDS, dims=replace(DIMS, n_vocab=51864))

    assert not generation.is_multilingual
    assert generation.tasks == {}


def test_ids_that_transformers_fills_in_give_way_to_the_tokenizers(openai_ids, tmp_path):
    stated = {**STATED, "decoder_start_token_id": 50257, "eos_token_id": 50256}

    generation, warnings = read(tmp_path, openai_ids, stated)

    assert (generation.start_of_transcript, generation.end_of_text) == (50258, 50257)
    assert len(warnings) == 2


def test_the_first_of_several_ends_of_text_is_used(openai_ids, tmp_path):
    generation, _ = read(tmp_path, openai_ids, {**STATED, "eos_token_id": [50257, 50256]})

    assert generation.end_of_text == 50257


def test_heads_and_tokens_beyond_the_model_are_ignored_with_a_warning(openai_ids, tmp_path):
    stated = {
        **STATED,
        "alignment_heads": [[1, 1], [10, 12], [0, 2]],
        "suppress_tokens": [-1, 3, 51865],
    }

    generation, warnings = read(tmp_path, openai_ids, stated)

    assert generation.alignment_heads == ((1, 1),)
    assert generation.suppressed == (3,)
    assert any("2 alignment heads" in warning for warning in warnings)
    assert any("2 ids" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_start_token_id", "50258"),
        ("decoder_start_token_id", True),
        ("decoder_start_token_id", -1),
        ("decoder_start_token_id", 51865),
        ("eos_token_id", [[]]),
        ("no_timestamps_token_id", 1e4),
        ("lang_to_id", ["<|en|>"]),
        ("lang_to_id", {"<|en|>": "50259"}),
        ("task_to_id", 5),
        ("suppress_tokens", "1,2"),
        ("suppress_tokens", [1, "2"]),
        ("begin_suppress_tokens", [None]),
        ("alignment_heads", [[1]]),
        ("alignment_heads", [[0, 1.5]]),
        ("alignment_heads", {"0": 1}),
    ],
)
def test_a_setting_of_another_kind_is_rejected_by_its_key(key, value, openai_ids, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, openai_ids, {**STATED, key: value})

    assert key in caught.value.why


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 60_000) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=5,
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(STATED)), ANY, max_size=3))
def test_any_settings_are_rejected_or_within_the_model(changes, tmp_path):
    dims = replace(DIMS, n_vocab=1510)

    try:
        generation, _ = read(tmp_path, OWN_IDS, changes, dims=dims)
    except CheckpointError:
        return

    ids = [
        generation.start_of_transcript,
        generation.end_of_text,
        generation.start_of_previous,
        generation.no_speech,
        generation.no_timestamps,
        *generation.languages.values(),
        *generation.tasks.values(),
        *generation.suppressed,
        *generation.suppressed_at_start,
    ]
    assert all(type(i) is int and 0 <= i < dims.n_vocab for i in ids)
    assert all(0 <= a < 2 and 0 <= b < 2 for a, b in generation.alignment_heads)
