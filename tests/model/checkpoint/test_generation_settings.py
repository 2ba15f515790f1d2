"""The sources of decoding settings, and settings that are rejected."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint.generation_settings import read_generation
from whisperport.speech.text.vocabulary import openai_generation, openai_tokenizer

from ...published_dims import whisper_dims

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
