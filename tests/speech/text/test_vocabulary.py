"""The vocabularies built from ranks, against openai-whisper and transformers."""

import lzma
from importlib.resources import files
from pathlib import Path

import pytest
import whisper
from transformers.models.whisper.configuration_whisper import (
    NON_SPEECH_TOKENS,
    NON_SPEECH_TOKENS_MULTI,
)
from whisper.tokenizer import TO_LANGUAGE_CODE

from whisperport.errors import TokenizerError, UsageError
from whisperport.speech.text import LANGUAGES, language_code, openai_generation, openai_tokenizer
from whisperport.speech.text.vocabulary import openai_bpe

from .conftest import OpenAITokenizer


@pytest.mark.parametrize("name", ["gpt2", "multilingual"])
def test_the_shipped_ranks_are_openais(name: str) -> None:
    shipped = (files("whisperport.speech.text") / "ranks" / f"{name}.txt.xz").read_bytes()

    tokens = lzma.decompress(shipped).splitlines()
    expected = Path(whisper.__file__).parent / "assets" / f"{name}.tiktoken"
    assert b"".join(b"%b %d\n" % (token, i) for i, token in enumerate(tokens)) == (
        expected.read_bytes()
    )


def test_the_ranks_come_with_their_licence() -> None:
    notice = (files("whisperport.speech.text") / "ranks" / "NOTICE").read_text()

    assert "MIT License" in notice
    assert "Copyright (c) 2022 OpenAI" in notice


def test_size_and_special_tokens_are_openais(n_vocab: int, theirs: OpenAITokenizer) -> None:
    tokenizer = openai_tokenizer(n_vocab)

    assert tokenizer.get_vocab_size() == n_vocab == theirs.encoding.n_vocab
    for token, i in theirs.special_tokens.items():
        assert tokenizer.token_to_id(token) == i
    added = tokenizer.get_added_tokens_decoder()
    assert {entry.content: i for i, entry in added.items()} == theirs.special_tokens
    assert all(entry.special for entry in added.values())


def test_the_file_it_makes_is_the_same_each_time(n_vocab: int) -> None:
    first = openai_tokenizer(n_vocab).to_str()
    openai_tokenizer.cache_clear()
    openai_bpe.cache_clear()

    assert openai_tokenizer(n_vocab).to_str() == first


def test_the_ids_of_generation_are_openais(n_vocab: int, theirs: OpenAITokenizer) -> None:
    generation = openai_generation(n_vocab)

    assert generation.end_of_text == theirs.eot
    assert generation.start_of_transcript == theirs.sot
    assert generation.start_of_previous == theirs.sot_prev
    assert generation.no_speech == theirs.no_speech
    assert generation.no_timestamps == theirs.no_timestamps
    assert generation.timestamp_begin == theirs.timestamp_begin
    if n_vocab == 51864:
        assert not generation.is_multilingual
        assert generation.tasks == {}
    else:
        expected = {c: theirs.to_language_token(c) for c in theirs.all_language_codes}
        assert generation.languages == expected
        assert generation.tasks == {
            "transcribe": theirs.transcribe,
            "translate": theirs.translate,
        }


def test_cantonese_came_with_large_v3() -> None:
    assert "yue" not in openai_generation(51865).languages
    assert openai_generation(51866).languages["yue"] == 50358
    assert len(openai_generation(51866).languages) == 100


def test_suppressed_tokens_are_openais(n_vocab: int, theirs: OpenAITokenizer) -> None:
    suppressed = openai_generation(n_vocab).suppressed

    special = {
        theirs.transcribe,
        theirs.translate,
        theirs.sot,
        theirs.sot_prev,
        theirs.sot_lm,
        theirs.no_speech,
    }
    assert suppressed == tuple(sorted({*theirs.non_speech_tokens, *special}))


@pytest.mark.parametrize(
    ("n_vocab", "published"), [(51864, NON_SPEECH_TOKENS), (51865, NON_SPEECH_TOKENS_MULTI)]
)
def test_suppressed_tokens_are_those_of_transformers_and_the_tasks(
    n_vocab: int, published: list[int]
) -> None:
    suppressed = set(openai_generation(n_vocab).suppressed)

    first_task = 50357 if n_vocab == 51864 else 50358
    assert suppressed == {*published, first_task, first_task + 1}


@pytest.mark.parametrize(
    ("n_vocab", "published"),  # `begin_suppress_tokens` of openai/whisper-tiny.en, tiny, large-v3
    [(51864, (220, 50256)), (51865, (220, 50257)), (51866, (220, 50257))],
)
def test_a_text_does_not_begin_with_a_blank_or_the_end(
    n_vocab: int, published: tuple[int, int]
) -> None:
    assert openai_generation(n_vocab).suppressed_at_start == published


@pytest.mark.parametrize("n_vocab", [0, 50257, 51863, 51867])
def test_an_unknown_size_is_rejected_with_the_known_ones(n_vocab: int) -> None:
    with pytest.raises(TokenizerError, match=r"51864, 51865, 51866"):
        openai_tokenizer(n_vocab)
    with pytest.raises(TokenizerError, match=f"has {n_vocab} token ids"):
        openai_generation(n_vocab)


def test_languages_are_openais_in_their_order() -> None:
    assert list(LANGUAGES.items()) == list(whisper.tokenizer.LANGUAGES.items())


# Languages by code, name and alias.


def test_every_code_and_name_and_alias_of_openai_is_understood() -> None:
    for code in LANGUAGES:
        assert language_code(code.upper()) == code
    for name, code in TO_LANGUAGE_CODE.items():
        assert language_code(f" {name.title()} ") == code


@pytest.mark.parametrize(
    ("name", "hint"), [("germn", "german"), ("klingon-7", "use a code"), ("", "use a code")]
)
def test_an_unknown_language_is_rejected_with_the_closest(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        language_code(name)

    assert hint in caught.value.hint
