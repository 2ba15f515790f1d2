"""Tokens to text, and vocabularies built from ranks, against openai-whisper and transformers."""

import json
import lzma
import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import whisper.tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers.models.whisper.configuration_whisper import (
    NON_SPEECH_TOKENS,
    NON_SPEECH_TOKENS_MULTI,
)
from whisper.normalizers import BasicTextNormalizer
from whisper.tokenizer import LANGUAGES as OPENAI_LANGUAGES
from whisper.tokenizer import TO_LANGUAGE_CODE

from whisperport.errors import TokenizerError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.speech.text import (
    LANGUAGES,
    Tokenizer,
    language_code,
    normalize,
    openai_generation,
    openai_tokenizer,
)
from whisperport.speech.text.tokenizer import with_merges_as_texts
from whisperport.speech.text.vocabulary import openai_bpe

from ...embedded import default_bundle
from ...extent import core_or_all

OpenAITokenizer = whisper.tokenizer.Tokenizer

# A few words in each script and of each difficulty that Whisper meets.

SAMPLES = {
    "en": " And so my fellow Americans, ask not what your country can do for you.",
    "en-contractions": "I'm sure they'd've said we'll, it's; don't 'quote' me.",
    "en-numbers": "In 1969, 3.14 % of $1,000,000 = 31,400.",
    "de": " Fünf große Bären äßen Übergrößenträger.",
    "fr": " Où est l'œuvre d'Élodie ? « Ici », dit-elle…",
    "es": " ¿Cómo estás, niño? ¡Qué pingüino!",
    "pl": " Zażółć gęślą jaźń",
    "tr": " İstanbul'da ılık bir ığdır",
    "vi": " Tiếng Việt có nhiều dấu thanh",
    "ru": " Съешь же ещё этих мягких французских булок",
    "el": " Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "he": " שָׁלוֹם עולם",
    "ar": " السَّلامُ عليكم ورحمة الله",
    "fa": " می‌خواهم بروم",
    "ur": " آپ کیسے ہیں؟",
    "hi": " नमस्ते दुनिया, क्षत्रिय",
    "bn": " আমি বাংলায় গান গাই",
    "ta": " வணக்கம் உலகம்",
    "te": " తెలుగు భాష",
    "si": " ශ්‍රී ලංකාව",
    "th": " ภาษาไทยไม่มีช่องว่าง",
    "lo": " ສະບາຍດີ",
    "my": " မင်္ဂလာပါ",
    "km": " ភាសាខ្មែរ",
    "bo": " བོད་སྐད་",
    "ka": " ქართული ენა",
    "hy": " Հայերեն լեզու",
    "am": " አማርኛ ቋንቋ",
    "zh": "我们今天去北京,好吗?",
    "yue": "你食咗飯未呀",
    "ja": "すもももももももものうち。東京タワー",
    "ko": " 한국어를 배우고 있어요",
    "haw": " Aloha kākahiaka ʻāina",
    "yo": " Ẹ káàárọ̀ ọ̀rẹ́ mi",
    "emoji": "👍🏽 family 👨‍👩‍👧‍👦 flag 🇩🇪 ❤️",
    "combining": "e\u0301 a\u0308\u0304 Z\u0351\u0343\u0342",
    "plane-1": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀𒀁 🀄",
    "music": "♪ la la ♫♬ [Applause] (laughs) -- >> SPEAKER:",
    "spaces": "  two   three\t\ttab\n\nlines \u3000wide\u00a0hard \u0085 ",
    "control": "\x00\x01\x1f\x7f\u200b\ufeff\ufffd",
    "special": "<|endoftext|><|en|><|0.00|> <|startoftranscript|",
    "empty": "",
}


# Ids and text, against openai-whisper's tokenizer.

N_VOCABS = st.sampled_from([51864, 51865, 51866])
TEXT = st.text(max_size=30) | st.text(" \n\t'aé1.-中👍\u0301", max_size=30)
ANY_ID = st.integers(0, 51863)


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


@pytest.mark.parametrize("name", SAMPLES)
def test_text_is_encoded_as_by_openai_and_comes_back(
    name: str, ours: Tokenizer, theirs: OpenAITokenizer
) -> None:
    text = SAMPLES[name]

    ids = ours.encode(text)

    assert ids == theirs.encode(text, disallowed_special=())
    assert ours.decode(ids) == text


def test_names_of_all_languages_are_encoded_as_by_openai(
    ours: Tokenizer, theirs: OpenAITokenizer
) -> None:
    for language in OPENAI_LANGUAGES.values():
        for text in (language, f" {language}", language.title()):
            assert ours.encode(text) == theirs.encode(text)


@given(n_vocab=N_VOCABS, text=TEXT)
@settings(max_examples=core_or_all(60, 400))
def test_any_text_is_encoded_as_by_openai_and_comes_back(n_vocab: int, text: str) -> None:
    ours, theirs = our_tokenizer(n_vocab), openai_whisper_tokenizer(n_vocab)

    ids = ours.encode(text)

    assert ids == theirs.encode(text, disallowed_special=())
    assert ours.decode(ids) == text


@given(n_vocab=N_VOCABS, words=st.lists(TEXT, min_size=1), n_tokens=st.integers(1, 20))
@settings(max_examples=core_or_all(30, 400))
def test_the_end_of_a_text_has_the_last_tokens_of_the_text(
    n_vocab: int, words: list[str], n_tokens: int
) -> None:
    ours = our_tokenizer(n_vocab)
    text = " ".join(words * (4000 // len(" ".join(words) + " ")))

    end = ours.end_of(text, n_tokens)

    assert text.endswith(end)
    assert len(end) <= n_tokens * 128 + 256
    assert ours.encode(end)[-n_tokens:] == ours.encode(text)[-n_tokens:]


@pytest.mark.parametrize(
    "text", ["x" * 65_536, "\U0001f600" * 9_000, "\ud800" * 30_000, " " * 65_536]
)
def test_an_end_has_enough_tokens_and_not_many_bytes(ours: Tokenizer, text: str) -> None:
    end = ours.end_of(text, 100)

    assert len(end.encode("utf-8", "replace")) <= 100 * 128 + 256
    assert len(ours.encode(end)) >= 100


def test_a_short_text_is_its_own_end(ours: Tokenizer) -> None:
    assert ours.end_of("one two", 223) == "one two"


def test_characters_of_unicode_are_cut_as_by_openai(ours: Tokenizer) -> None:
    # Both sides classify letters, numbers and spaces by their own Unicode tables.
    theirs = openai_whisper_tokenizer(len(ours._added.keys() | ours._tokens.keys()))
    for first in range(0, 0x30000, core_or_all(64, 16)):  # a quarter of it, or all
        block = [chr(c) for c in range(first, first + 16) if not 0xD800 <= c < 0xE000]
        text = " ".join(f"a{char}b1{char}2.{char}!" for char in block)

        assert ours.encode(text) == theirs.encode(text, disallowed_special=()), hex(first)


def test_special_tokens_are_never_made_from_text(ours: Tokenizer) -> None:
    for text in ("<|endoftext|>", "a<|en|>b", "<|0.00|>", "<|notimestamps|><|1.00|>"):
        ids = ours.encode(text)

        assert max(ids) < ours.generation.end_of_text
        assert ours.decode(ids) == text


def test_a_lone_surrogate_becomes_a_replacement(ours: Tokenizer) -> None:
    assert ours.decode(ours.encode("a\ud800b")) == "a\ufffdb"


def test_every_id_decodes_as_by_openai(ours: Tokenizer, theirs: OpenAITokenizer) -> None:
    generation = ours.generation

    for i in range(theirs.encoding.n_vocab):
        expected = theirs.encoding.decode([i])
        if i < generation.end_of_text:
            assert ours.decode([i]) == expected
        elif i < generation.timestamp_begin:
            assert ours.decode([i], timestamps=True) == ""
            assert expected.startswith("<|")
        else:
            assert ours.decode([i]) == ""
            assert ours.decode([i], timestamps=True) == expected


@given(n_vocab=N_VOCABS, ids=st.lists(ANY_ID, max_size=20))
@example(n_vocab=51865, ids=[162, 235, 162])  # halves of characters
@settings(max_examples=core_or_all(50, 300))
def test_any_ids_decode_as_by_openai_with_replacements_in_the_same_places(
    n_vocab: int, ids: list[int]
) -> None:
    ours, theirs = our_tokenizer(n_vocab), openai_whisper_tokenizer(n_vocab)
    begin, end = ours.generation.timestamp_begin, ours.generation.end_of_text
    spoken = [i for i in ids if i < end or i >= begin]

    text, timed = ours.decode(ids), ours.decode(ids, timestamps=True)

    assert text == theirs.decode(spoken)
    assert timed == theirs.decode_with_timestamps(spoken)


def test_times_are_written_in_steps_of_20_ms(ours: Tokenizer) -> None:
    begin = ours.generation.timestamp_begin
    ids = [begin, *ours.encode(" Hi."), begin + 51, begin + 1500]

    assert ours.decode(ids, timestamps=True) == "<|0.00|> Hi.<|1.02|><|30.00|>"


def test_an_id_beyond_the_vocabulary_is_rejected(ours: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="token id -1 is not in the vocabulary"):
        ours.decode([-1])


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("language", ["en", "ja", "yue"])
def test_words_are_those_of_openai(name: str, language: str) -> None:
    n_vocab = 51866
    ours, theirs = our_tokenizer(n_vocab), openai_whisper_tokenizer(n_vocab, language)
    ids = [*ours.encode(SAMPLES[name]), ours.generation.timestamp_begin + 7, theirs.eot]

    words, word_ids = ours.split_to_word_tokens(ids, language)

    assert (words, word_ids) == tuple(theirs.split_to_word_tokens(ids))


@given(
    ids=st.lists(ANY_ID | st.integers(50, 260), max_size=20), language=st.sampled_from(["en", "zh"])
)
@settings(max_examples=core_or_all(50, 300))
def test_words_of_any_ids_keep_every_id(ids: list[int], language: str) -> None:
    ours, theirs = our_tokenizer(51865), openai_whisper_tokenizer(51865, language)

    words, word_ids = ours.split_to_word_tokens(ids, language)

    assert [i for word in word_ids for i in word] == ids
    assert len(words) == len(word_ids)
    try:
        expected = theirs.split_to_word_tokens(ids)
    except IndexError:  # openai-whisper's own, on damaged characters
        return
    if [i for word in expected[1] for i in word] == ids:  # it drops the rest after damage
        assert (words, word_ids) == tuple(expected)


def small(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json with four tokens of text and those special ones that are checked."""
    added = [
        {"id": 4, "content": "<|endoftext|>", "special": True},
        {"id": 5, "content": "<|startoftranscript|>", "special": True},
    ]
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3}, "merges": ["a b"]}
    data = {
        "model": model,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "normalizer": None,
        "added_tokens": added,
    }
    return {**data, **changes}


def small_generation(**changes: Any) -> Any:
    from whisperport.program.generation import Generation

    ids = {
        "end_of_text": 4,
        "start_of_transcript": 5,
        "start_of_previous": 6,
        "no_speech": 7,
        "no_timestamps": 8,
        **changes,
    }
    return Generation(**ids)


def test_a_file_without_timestamps_still_writes_times() -> None:
    tokenizer = Tokenizer.from_json(json.dumps(small()), small_generation())

    assert tokenizer.encode("ab a") == [2, 3, 0]
    assert tokenizer.decode([5, 9, 2, 60, 4], timestamps=True) == "<|0.00|>ab<|1.02|>"


def test_merges_may_be_pairs() -> None:
    model = {**small()["model"], "merges": [["a", "b"]]}

    tokenizer = Tokenizer.from_json(json.dumps(small(model=model)), small_generation())

    assert tokenizer.encode("ab") == [2]


@pytest.mark.parametrize("merges", [["a b c"], [["a"]], [3], ["a x"]])
def test_merges_that_are_not_checked_yet_are_rejected_when_a_text_is_encoded(merges: Any) -> None:
    text = json.dumps(model_with(merges=merges))

    tokenizer = Tokenizer.from_json(text, small_generation(), check_merges=False)

    assert tokenizer.decode([2, 3, 0]) == "ab a"
    for _ in range(2):
        with pytest.raises(TokenizerError, match=r"merges|not a Whisper tokenizer"):
            tokenizer.encode("ab")


def model_with(**changes: Any) -> dict[str, Any]:
    return small(model={**small()["model"], **changes})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([], "no `model`"),
        ({}, "no `model`"),
        (None, "no `model`"),
        (model_with(type="Unigram"), "no `model` of type BPE"),
        (model_with(vocab=None), "`model.vocab` or `model.merges`"),
        (model_with(vocab={}), "`model.vocab` or `model.merges`"),
        (model_with(vocab={"a": "0"}), "the id of 'a'"),
        (model_with(vocab={"a": -1}), "the id of 'a'"),
        (model_with(vocab={"a": 2**40}), "the id of 'a'"),
        (model_with(vocab={"a": True}), "the id of 'a'"),
        (model_with(vocab={"a": 0, "b": 0}), "same id"),
        (model_with(vocab={"▁a": 0}, merges=[]), "not byte-level"),
        (model_with(merges=["a b c"]), "not a pair"),
        (model_with(merges=[["a"]]), "not a pair"),
        (model_with(merges=[3]), "not a pair"),
        (model_with(merges=["a x"]), "does not fit its merges"),
        (small(pre_tokenizer=None), "expected ByteLevel"),
        (small(pre_tokenizer={"type": "Metaspace"}), "expected ByteLevel"),
        (small(normalizer={"type": "Lowercase"}), "no `normalizer`"),
        (small(added_tokens=[]), "<|endoftext|> or <|startoftranscript|> is missing"),
        (small(added_tokens=[3]), "has no `content`"),
        (small(added_tokens={"a": 3}), "has no `content`"),
        (small(added_tokens=[{"content": "<|endoftext|>"}]), "the id of '<|endoftext|>'"),
        (
            small(added_tokens=[{"content": "<|endoftext|>", "id": 3}]),
            "another checkpoint: <|endoftext|> is 3",
        ),
    ],
)
def test_a_foreign_or_damaged_file_is_rejected(data: Any, expected: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_json(json.dumps(data), small_generation())

    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}', b"\x00"]
)
def test_a_file_that_is_no_json_is_rejected(content: bytes) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer.from_json(content, small_generation())


def test_a_tokenizer_of_another_checkpoint_is_rejected() -> None:
    english = openai_tokenizer(51864).to_str()

    with pytest.raises(TokenizerError, match="belongs to another checkpoint"):
        Tokenizer.from_json(english, openai_generation(51865))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(["model", "pre_tokenizer", "normalizer", "added_tokens"])
MODEL_FIELDS = st.sampled_from(["type", "vocab", "merges"])


@given(top=st.dictionaries(FIELDS, JSON, max_size=2), inner=st.dictionaries(MODEL_FIELDS, JSON))
@settings(max_examples=core_or_all(50, 300), suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_a_tokenizer_or_rejected(top: dict[str, Any], inner: dict[str, Any]) -> None:
    text = json.dumps({**model_with(**inner), **top})

    try:
        tokenizer = Tokenizer.from_json(text, small_generation())
    except TokenizerError:
        return

    assert all(isinstance(i, int) for i in tokenizer.encode("ab ab"))


# Text made comparable, against openai-whisper's basic normaliser.

WORDS_OF_ANY_KIND = st.text() | st.text("ab <>[]() .,'é")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop [music] — 5 %!", "don t stop 5"),
        ("  Hello,\n(laughs) <unk> WORLD ", "hello world"),
        ("Ünïcode ﬁne", "ünïcode fine"),
        ("...", ""),
        ("a (b", "a b"),
    ],
)
def test_case_punctuation_and_annotations_go(text: str, expected: str) -> None:
    assert normalize(text) == expected


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_normalized_as_by_openai(name: str) -> None:
    assert normalize(SAMPLES[name]) == BasicTextNormalizer()(SAMPLES[name]).strip()


@given(WORDS_OF_ANY_KIND)
@example("(a]<b)>c")
@settings(max_examples=500)
def test_any_text_is_normalized_as_by_openai(text: str) -> None:
    assert normalize(text) == BasicTextNormalizer()(text).strip()


@pytest.mark.parametrize("name", SAMPLES)
def test_letters_are_split_as_by_openai(name: str) -> None:
    split = normalize(SAMPLES[name], split_letters=True)

    assert split == BasicTextNormalizer(split_letters=True)(SAMPLES[name]).strip()


# Joiners of letters, halves of Hangul syllables; U+11A3A of Zanabazar Square is left out: Unicode
# let it join what follows in version 10, and Oniguruma does not.
JOINED = st.text("a \u200d\u200c\u1100\u1161\u11a8\ud7b0한ำะ日\u3099\n")


@given(st.text(st.characters(exclude_characters="\U00011a3a", codec="utf-8")) | JOINED)
@settings(max_examples=500)
def test_any_letters_are_split_as_by_openai(text: str) -> None:
    split = normalize(text, split_letters=True)

    assert split == BasicTextNormalizer(split_letters=True)(text).strip()


@given(WORDS_OF_ANY_KIND)
@settings(max_examples=300)
def test_normalizing_again_changes_nothing(text: str) -> None:
    once = normalize(text)

    assert normalize(once) == once


@pytest.mark.parametrize("text", ["<" * 100_000, "(" * 100_000, "<a>" * 30_000 + "[" * 70_000])
def test_open_brackets_take_linear_time(text: str) -> None:
    start = time.perf_counter()
    normalize(text)

    assert time.perf_counter() - start < 2  # measured: 0.02 s; quadratic would take minutes


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


@pytest.mark.parametrize("n_vocab", core_or_all((51866,), (51864, 51865, 51866)))
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


def test_merges_as_texts_encode_alike_and_are_those_of_a_bundle() -> None:
    stored = openai_tokenizer(51_865).to_str().encode()

    content = with_merges_as_texts(stored)

    assert content != stored
    texts = SAMPLES.values()
    encoders = [Tokenizer.from_json(each, openai_generation(51_865)) for each in (stored, content)]
    expected, actual = ([encoder.encode(text) for text in texts] for encoder in encoders)
    assert actual == expected
    written = Bundle.open(default_bundle()).tokenizer_json()
    assert with_merges_as_texts(written) is written


@pytest.mark.parametrize("merges", [[], ["a b"], [["a ", "b"]]])
def test_merges_that_are_texts_or_cannot_be_stay_as_they_are(merges: list[object]) -> None:
    content = json.dumps({"model": {"merges": merges}}).encode()

    assert with_merges_as_texts(content) is content
