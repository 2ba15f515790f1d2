"""The three vocabularies of OpenAI's checkpoints, ours and openai-whisper's."""

from functools import cache

import pytest
import whisper.tokenizer

from whisperport.speech.text import Tokenizer, openai_generation, openai_tokenizer

OpenAITokenizer = whisper.tokenizer.Tokenizer


@cache
def our_tokenizer(n_vocab: int) -> Tokenizer:
    return Tokenizer.from_json(openai_tokenizer(n_vocab).to_str(), openai_generation(n_vocab))


def openai_whisper_tokenizer(n_vocab: int, language: str | None = None) -> OpenAITokenizer:
    n_languages = 100 if n_vocab == 51866 else 99
    return whisper.tokenizer.get_tokenizer(
        n_vocab > 51864, num_languages=n_languages, language=language
    )


@pytest.fixture(params=[51864, 51865, 51866])
def n_vocab(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def ours(n_vocab: int) -> Tokenizer:
    return our_tokenizer(n_vocab)


@pytest.fixture
def theirs(n_vocab: int) -> OpenAITokenizer:
    return openai_whisper_tokenizer(n_vocab)
