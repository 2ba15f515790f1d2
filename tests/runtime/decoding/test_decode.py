"""What is decoded: within the limits, what openai-whisper and transformers decode, and the next token."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import whisper
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from whisperport.errors import UsageError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.whisper import build_model
from whisperport.program.generation import Generation
from whisperport.runtime import (
    DecodeOptions,
    Decoder,
    Engine,
    Thresholds,
    decode_window,
    detect_language,
    start_tokens,
)
from whisperport.runtime.decoding.decode import check_language
from whisperport.runtime.decoding.rules import Rules, forbid_repeated_ngrams, penalize_repetition
from whisperport.runtime.decoding.search import Beams, Candidate, Sampling, numpy_sampler, top
from whisperport.runtime.engine.scores import Scores

from ...micro import DIMS, GENERATION
from ..runners import FEATURES, Scripted

ENGLISH_ONLY = replace(GENERATION, languages={}, tasks={})


TEXT = DecodeOptions(language="en", without_timestamps=True)
END = GENERATION.end_of_text


def test_the_end_of_text_ends_decoding_and_is_not_in_the_tokens() -> None:
    decoded = decode_window(Scripted([5, 6, END, 7]), FEATURES, TEXT)

    assert decoded.tokens == (5, 6)
    assert decoded.ended
    assert decoded.avg_logprob == pytest.approx(0, abs=1e-5)  # three tokens, each all but certain


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_limit_ends_it_without_an_end(limit: int) -> None:
    decoded = decode_window(Scripted([5]), FEATURES, replace(TEXT, max_tokens=limit))

    assert decoded.tokens == (5,) * limit
    assert not decoded.ended


def test_by_default_half_of_the_positions_are_decoded() -> None:
    decoded = decode_window(Scripted([5]), FEATURES, TEXT)

    assert len(decoded.tokens) == DIMS.n_text_ctx // 2


def test_a_limit_above_the_positions_is_met_at_the_last_position(
    micro_decoder: Any, audio: Any
) -> None:
    never_ends = replace(GENERATION, suppressed=(*GENERATION.suppressed, END))

    decoded = decode_window(micro_decoder(never_ends), audio(0), replace(TEXT, max_tokens=1000))

    prompt = len(start_tokens(GENERATION, "en", "transcribe"))
    assert len(decoded.tokens) == DIMS.n_text_ctx - prompt + 1  # the last is not read again
    assert not decoded.ended


def test_an_end_at_once_is_suppressed() -> None:
    decoded = decode_window(Scripted([END, END]), FEATURES, TEXT)

    assert len(decoded.tokens) == 1
    assert decoded.tokens[0] not in GENERATION.suppressed_at_start


@given(seed=st.integers(0, 10_000), timestamps=st.booleans(), beams=st.sampled_from([None, 2]))
@settings(max_examples=40)
def test_suppressed_tokens_are_never_decoded(
    micro_decoder: Any, audio: Any, seed: int, timestamps: bool, beams: int | None
) -> None:
    options = replace(TEXT, without_timestamps=not timestamps, beam_size=beams)

    decoded = decode_window(micro_decoder(), audio(seed), options)

    assert not set(decoded.tokens) & {*GENERATION.suppressed, END}
    assert decoded.tokens[:1] != (3,)
    assert decoded.avg_logprob <= 0
    assert 0 <= decoded.no_speech_prob <= 1


def test_earlier_windows_do_not_change_the_result(micro_decoder: Any, audio: Any) -> None:
    decoder = micro_decoder()
    alone = decode_window(micro_decoder(), audio(2), DecodeOptions())

    decode_window(decoder, audio(1), DecodeOptions(beam_size=3))
    after = decode_window(decoder, audio(2), DecodeOptions())

    assert after == alone


# Prompts and languages ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "task", "timestamps", "prompt"),
    [
        ("en", "transcribe", False, [50, 51, 53, 57]),
        ("de", "transcribe", True, [50, 52, 53]),
        ("de", "translate", False, [50, 52, 54, 57]),
    ],
)
def test_the_prompt_says_language_and_task(
    language: str, task: str, timestamps: bool, prompt: list[int]
) -> None:
    decoder = Scripted([END])

    decode_window(
        decoder,
        FEATURES,
        DecodeOptions(language=language, task=task, without_timestamps=not timestamps),
    )

    assert decoder.prompts == [prompt]


@pytest.mark.parametrize(("timestamps", "prompt"), [(False, [50, 57]), (True, [50])])
def test_an_english_only_model_is_told_neither(timestamps: bool, prompt: list[int]) -> None:
    decoder = Scripted([END], ENGLISH_ONLY)

    decoded = decode_window(decoder, FEATURES, DecodeOptions(without_timestamps=not timestamps))

    assert decoder.prompts == [prompt]
    assert decoded.language == "en"


@pytest.mark.parametrize(
    ("generation", "language", "task", "words"),
    [
        (GENERATION, "fr", "transcribe", "language `fr`"),
        (GENERATION, "en", "summarize", "task `summarize`"),
        (ENGLISH_ONLY, "de", "transcribe", "cannot transcribe `de`"),
        (ENGLISH_ONLY, "en", "translate", "cannot translate `en`"),
    ],
)
def test_what_the_checkpoint_cannot_do_is_rejected(
    generation: Generation, language: str, task: str, words: str
) -> None:
    options = DecodeOptions(language=language, task=task)

    with pytest.raises(UsageError, match=words) as refused:
        decode_window(Scripted([END], generation), FEATURES, options)

    assert "en" in refused.value.hint or "transcribe" in refused.value.hint


@pytest.mark.parametrize("code", ["en", "de"])
def test_the_most_probable_language_is_detected(code: str) -> None:
    decoder = Scripted([GENERATION.languages[code]])
    decoder.start_window(FEATURES)

    found, probability = detect_language(decoder)
    assert found == code
    assert probability is not None
    assert 1 / len(GENERATION.languages) < probability <= 1
    assert decoder.prompts == [[GENERATION.start_of_transcript]]


def test_the_language_of_a_checkpoint_that_names_its_own_is_not_detected() -> None:
    decoder = Scripted([GENERATION.languages["en"]], generation=replace(GENERATION, language="de"))
    decoder.start_window(FEATURES)

    assert detect_language(decoder) == ("de", None)
    assert decoder.prompts == []


def test_a_token_that_is_no_language_is_not_detected(micro_decoder: Any, audio: Any) -> None:
    decoder = micro_decoder()
    found = set()

    for seed in range(20):
        decoder.start_window(audio(seed))
        found.add(detect_language(decoder)[0])

    assert found <= set(GENERATION.languages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suppress_tokens": (5, 9999)}, "`suppress_tokens` contains token id 9999"),
        ({"suppress_tokens": (-2,)}, "`suppress_tokens` contains token id -2"),
        ({"prompt": (9999,)}, "`prompt` contains token id 9999"),
        ({"prefix": (-1,)}, "`prefix` contains token id -1"),
        ({"prefix": (5,) * DIMS.n_text_ctx}, "the prefix has more than"),
        ({"prefix": (5,) * (DIMS.n_text_ctx // 2 - 4)}, "the prefix has more than"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_used_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        decode_window(Scripted([END]), FEATURES, replace(TEXT, **options))


def test_the_longest_prefix_leaves_room_for_the_longest_prompt(
    micro_decoder: Any, audio: Any
) -> None:
    prefix = (5,) * (DIMS.n_text_ctx // 2 - 5)
    options = replace(TEXT, prefix=prefix, prompt=(5,) * DIMS.n_text_ctx)

    assert decode_window(micro_decoder(), audio(0), options).tokens


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda: Thresholds(no_speech_threshold=1.5), "no_speech_threshold"),
        (lambda: Thresholds(logprob_threshold=0.5), "logprob_threshold"),
        (
            lambda: Thresholds(compression_ratio_threshold=float("nan")),
            "compression_ratio_threshold",
        ),
        (lambda: DecodeOptions(temperature=-1), "temperature"),
        (lambda: DecodeOptions(max_tokens=0), "max_tokens"),
        (lambda: DecodeOptions(length_penalty=2), "length_penalty"),
    ],
)
def test_what_is_out_of_range_is_rejected(wrong: Any, name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is") as refused:
        wrong()

    assert "expected" in refused.value.why


# Against the originals ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mel() -> torch.Tensor:
    return torch.randn(1, 80, 200, generator=torch.Generator().manual_seed(7))


def engine_for(checkpoint: Any, eager_runners: Any) -> Engine:
    weights = checkpoint.weights
    return Engine(
        checkpoint.dims,
        checkpoint.generation,
        eager_runners(build_model(checkpoint), (4, 64)),
        weights["decoder.token_embedding.weight"].numpy(),
        weights["decoder.positional_embedding"].numpy(),
    )


@pytest.fixture(scope="module")
def original(tiny_openai_pt: Any) -> Any:
    return whisper.load_model(str(tiny_openai_pt), device="cpu")


@pytest.fixture(scope="module")
def openai_engine(tiny_openai_pt: Any, eager_runners: Any) -> Engine:
    return engine_for(load_checkpoint(tiny_openai_pt), eager_runners)


@pytest.mark.parametrize(
    "options",
    [
        {"language": "en", "without_timestamps": True},
        {"language": "de", "task": "translate", "without_timestamps": True},
        {"language": "en"},
        {"without_timestamps": True},
        {"language": "en", "without_timestamps": True, "beam_size": 3},
        {"language": "en", "beam_size": 3, "patience": 2.0, "length_penalty": 0.6},
        {"language": "en", "prompt": [*range(1000, 1090)], "prefix": [400, 500]},
        {"language": "en", "prefix": [*range(400, 650)], "sample_len": 215},
        {"language": "en", "suppress_tokens": []},
        {"language": "en", "suppress_tokens": [11, 13, 440], "without_timestamps": True},
        {"language": "en", "suppress_tokens": [-1, 440], "suppress_blank": False},
    ],
    ids=[
        *("text", "translation", "timestamps", "detected language", "beams"),
        *("beams with patience", "prompt and prefix", "prefix cut", "nothing suppressed"),
        *("three tokens suppressed", "one more suppressed, blanks not"),
    ],
)
def test_twenty_tokens_are_those_of_openai_whisper(
    original: Any, openai_engine: Engine, mel: torch.Tensor, options: dict[str, Any]
) -> None:
    # For windows other than 30 s the original counts its first timestamp in other units than 20 ms.
    options = {**options, "max_initial_timestamp": None}
    asked = whisper.DecodingOptions(**{"sample_len": 20, **options}, fp16=False)
    features = original.embed_audio(mel)
    theirs = whisper.decode(original, features[0], asked)
    renamed = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    max_tokens = renamed.pop("sample_len", 20)

    ours = decode_window(
        Decoder(openai_engine),
        openai_engine.encode(mel[0].numpy()),
        DecodeOptions(**renamed, max_tokens=max_tokens),
    )

    assert ours.tokens == tuple(theirs.tokens)
    assert ours.language == theirs.language
    # Sums of 20 log-probabilities of logits that differ by 1e-5.
    assert ours.avg_logprob == pytest.approx(theirs.avg_logprob, abs=1e-4)
    assert ours.no_speech_prob == pytest.approx(theirs.no_speech_prob, rel=1e-3)


def test_twenty_tokens_are_those_of_transformers(
    random_hf_whisper: Any, tiny_checkpoint: Any, eager_runners: Any, mel: torch.Tensor
) -> None:
    model = random_hf_whisper()
    engine = engine_for(tiny_checkpoint, eager_runners)
    with torch.no_grad():
        theirs = model.generate(mel, language="en", task="transcribe", max_new_tokens=20)[0]

    features = engine.encode(mel[0].numpy())
    ours = decode_window(Decoder(engine), features, replace(TEXT, max_tokens=20))

    assert ours.tokens == tuple(theirs.tolist())[-len(ours.tokens) :]
    assert len(ours.tokens) == 20


@pytest.mark.parametrize(
    "options", [DecodeOptions(language="German"), DecodeOptions(task="translate")]
)
def test_an_english_only_model_rejects_other_languages_and_translation_before_the_work(
    options: DecodeOptions,
) -> None:
    ids = {"start_of_transcript": 0, "end_of_text": 1, "start_of_previous": 2}
    ids |= {"no_speech": 3, "no_timestamps": 4}
    multilingual = Generation(
        **ids, languages={"en": 5, "de": 6}, tasks={"transcribe": 7, "translate": 8}
    )

    check_language(multilingual, options)
    with pytest.raises(UsageError, match="English-only") as raised:
        check_language(Generation(**ids), options)

    assert "multilingual checkpoint" in raised.value.hint


# Guards against loops: as the processors of transformers of the same name ---------------------------

V = 12
texts = st.lists(st.integers(0, V - 1), min_size=1, max_size=20)
rows = st.lists(st.floats(-50, 50, width=32), min_size=V, max_size=V)


def processed(processor: Any, text: list[int], row: list[float]) -> np.ndarray:
    """Return the logits that a processor of transformers makes of a row."""
    scores = torch.tensor([row], dtype=torch.float32)
    logits: np.ndarray = processor(torch.tensor([text]), scores)[0].numpy()
    return logits


@given(text=texts, row=rows, penalty=st.sampled_from([1.0, 1.1, 1.5, 4.0]))
def test_the_penalty_is_that_of_transformers(
    text: list[int], row: list[float], penalty: float
) -> None:
    logits = np.array(row, np.float32)
    penalize_repetition(logits, text, penalty)

    expected = processed(RepetitionPenaltyLogitsProcessor(penalty), text, row)
    np.testing.assert_array_equal(logits, expected)


@given(text=texts, row=rows, size=st.integers(1, 5))
def test_the_forbidden_ngrams_are_those_of_transformers(
    text: list[int], row: list[float], size: int
) -> None:
    logits = np.array(row, np.float32)
    forbid_repeated_ngrams(logits, text, size)

    expected = processed(NoRepeatNGramLogitsProcessor(size), text, row)
    np.testing.assert_array_equal(logits, expected)


@given(row=rows, text=texts)
def test_the_penalty_never_makes_a_token_more_probable(row: list[float], text: list[int]) -> None:
    """Published code for an accelerator divides negative logits too, which rewards repetition."""
    logits = np.array(row, np.float32)

    penalize_repetition(logits, text, 1.5)

    assert (logits <= np.array(row, np.float32)).all()


def test_timestamps_are_not_held_for_repetitions() -> None:
    rules = Rules(
        GENERATION,
        timestamps=False,
        suppressed=(),
        repetition_penalty=2.0,
        no_repeat_ngram_size=1,
    )
    begin = GENERATION.timestamp_begin
    logits = np.ones(DIMS.n_vocab, np.float32)

    rules.apply(Scores(logits), [begin, 5, begin + 2])

    assert logits[[begin, begin + 2, 6]].tolist() == [1, 1, 1]
    assert logits[5] == -np.inf


def test_text_on_both_sides_of_a_timestamp_is_one_phrase() -> None:
    begin = GENERATION.timestamp_begin
    rules = Rules(GENERATION, timestamps=True, suppressed=(), no_repeat_ngram_size=2)
    logits = np.ones(DIMS.n_vocab, np.float32)
    logits[begin:] = -9  # so that text may follow

    rules.apply(Scores(logits), [begin, 5, 6, begin + 1, begin + 1, 5])

    assert logits[6] == -np.inf
    assert logits[5] == 1


@pytest.mark.parametrize(
    "guard", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 3}], ids=str
)
def test_a_loop_without_a_guard_is_none_with_it(guard: dict[str, Any]) -> None:
    """The engine says one word for ever; the end of text is the second most probable."""
    engine = Scripted([5], second=GENERATION.end_of_text)
    options = DecodeOptions(language="en", without_timestamps=True)

    looping = decode_window(engine, FEATURES, options)
    guarded = decode_window(engine, FEATURES, replace(options, **guard))

    assert not looping.ended
    assert guarded.ended
    assert 1 <= len(guarded.tokens) <= 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0.9},
        {"repetition_penalty": float("nan")},
        {"no_repeat_ngram_size": -1},
    ],
    ids=str,
)
def test_a_guard_that_would_reward_repetition_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        DecodeOptions(**wrong)


# The next token: the largest of a row, or a sampled one; and how often a row is copied for it.

V = 51_865  # multilingual Whisper's vocabulary
ROW = 4 * V  # bytes


def logits(n: int = V, seed: int = 0) -> np.ndarray:
    """A row after the rules: a third of its logits is -inf."""
    generator = np.random.default_rng(seed)
    row = (4 * generator.standard_normal(n)).astype(np.float32)
    row[generator.random(n) < 0.3] = -np.inf
    return row


rows = hnp.arrays(
    np.float32,
    st.integers(1, 2000),
    elements=st.sampled_from([-np.inf, *np.linspace(-30, 30, 13).tolist()]),
)


@given(rows, st.integers(1, 12))
def test_the_top_are_the_largest_and_of_equals_the_first(row: np.ndarray, count: int) -> None:
    count = min(count, row.size)

    found = top(row, count)

    assert found.tolist() == np.argsort(-row, kind="stable")[:count].tolist()


def test_the_top_of_a_whole_vocabulary_are_found() -> None:
    for seed in range(20):
        row = logits(seed=seed)
        assert top(row, 6).tolist() == np.argsort(-row, kind="stable")[:6].tolist()


def test_the_top_of_what_is_no_number_are_still_so_many() -> None:
    row = np.full(V, np.nan, np.float32)

    assert len(set(top(row, 6).tolist())) == 6


def test_tokens_are_sampled_as_often_as_they_are_probable() -> None:
    """1000 tokens in several blocks, 20,000 samples; within five standard deviations."""
    row = np.full(1000, -np.inf, np.float32)
    said = [0, 3, 255, 256, 700, 999]
    row[said] = [1.0, 2.0, 0.0, 2.5, 1.5, 0.5]
    weights = np.exp(row.astype(np.float64))
    expected = weights / weights.sum()

    sampled = numpy_sampler(np.random.default_rng(0))(np.broadcast_to(row, (20_000, 1000)))

    counts = np.bincount(sampled, minlength=1000)
    deviation = np.sqrt(20_000 * expected * (1 - expected))
    assert (np.abs(counts - 20_000 * expected) <= 5 * deviation).all()
    assert set(np.flatnonzero(counts)) == set(said)


class Uniform:
    """A generator that returns the given number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@given(rows, st.sampled_from([0.0, 1e-12, 0.25, 0.5, 0.999999, 1 - 2**-53]))
def test_tokens_with_probability_zero_are_never_sampled(row: np.ndarray, uniform: float) -> None:
    row[0] = 0.0

    (token,) = numpy_sampler(Uniform(uniform))(row[None])  # type: ignore[arg-type]

    assert np.isfinite(row[token])


def test_the_same_seed_draws_the_same_tokens() -> None:
    first, second = (numpy_sampler(np.random.default_rng(7)) for _ in range(2))

    assert [first(logits()[None]) for _ in range(20)] == [second(logits()[None]) for _ in range(20)]


@pytest.mark.parametrize(
    "search",
    [
        Sampling(0, 0.0, 1, None),
        Sampling(0, 0.7, 3, numpy_sampler(np.random.default_rng(0))),
        Beams(0, 3, 1.0),
    ],
    ids=["greedy", "sampled", "beams"],
)
def test_each_token_has_its_part_of_the_log_probability(search: Sampling | Beams) -> None:
    candidates = [Candidate() for _ in range(search.width)]
    for step in range(4):
        rows = [logits(7, seed=10 * step + beam) for beam in range(len(candidates))]
        for row in rows:
            row[0] = 8.0 * step - 12  # the end becomes probable
        candidates, _, _ = search.advance(candidates, [Scores(row) for row in rows])

    finished = search.finish(candidates)

    assert any(each.ended for each in finished)
    for each in finished:
        assert len(each.logprobs) == len(each.tokens) > 0
        of_text = sum(each.logprobs)
        assert each.logprob < of_text if each.ended else each.logprob == pytest.approx(of_text)


@pytest.mark.parametrize(
    ("what", "make", "width", "copies"),
    [
        ("greedy", lambda: Sampling(50257, 0.0, 1, numpy_sampler(np.random.default_rng(0))), 1, 1),
        ("sampled", lambda: Sampling(50257, 0.4, 1, numpy_sampler(np.random.default_rng(0))), 1, 2),
        (
            "best of 5",
            lambda: Sampling(50257, 0.4, 5, numpy_sampler(np.random.default_rng(0))),
            5,
            6,
        ),
        ("beam 5", lambda: Beams(50257, 5, 1.0), 5, 1),
    ],
)
def test_no_row_is_copied_twice(
    what: str, make: Callable[[], Sampling | Beams], width: int, copies: int
) -> None:
    """Live copies: summing the probabilities needs one; sampling needs another one of all divided rows."""
    search = make()
    found = [Scores(logits(seed=seed)) for seed in range(width)]
    paths = [Candidate() for _ in range(width)]
    search.advance(paths, found)

    tracemalloc.start()
    make().advance([Candidate() for _ in range(width)], found)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < (copies + 0.6) * ROW
