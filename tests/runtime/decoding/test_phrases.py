"""Phrases: which tokens get how much, that all is given back, and what the decoding makes of it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import whisperport
from whisperport.errors import UsageError
from whisperport.runtime.decoding.forks import BeamsAndForks, Forks
from whisperport.runtime.decoding.phrases import (
    DEFAULT_BONUS,
    MAX_PHRASES,
    Phrases,
    Spelling,
    checked_phrases,
    compiled,
    read_phrases,
    with_commas,
)
from whisperport.runtime.decoding.search import (
    Beams,
    Candidate,
    Sampling,
    Search,
    best_candidate,
)
from whisperport.runtime.engine.coarse import CoarseLogits, SumError
from whisperport.runtime.engine.scores import FORK_MARGIN, Scores
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle

CLIPS = shipped_audio()
V = 12  # tokens of the small vocabulary here; 11 is the end of the text
END = 11
token_lists = st.lists(st.integers(0, 5), max_size=12)
phrase_sets = st.dictionaries(
    st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    st.sampled_from([0.5, 1.0, 2.0]),
    max_size=5,
)


def tree(phrases: dict[tuple[int, ...], float], ends_in_letter: Any = lambda _: False) -> Phrases:
    return Phrases([Spelling(*item, True) for item in phrases.items()], ends_in_letter)


def logits(**values: float) -> np.ndarray:
    """A row (V,) in which all tokens but these are improbable: logits(t3=2, end=1)."""
    row = np.full(V, -30, np.float32)
    for name, value in values.items():
        row[END if name == "end" else int(name[1:])] = value
    return row


def decoded(
    model: Callable[[tuple[int, ...]], np.ndarray], phrases: Phrases | None, search: Search
) -> tuple[list[int], int]:
    """The text of a search with phrases, and how many rows of logits it needed."""
    n_rows, candidates = 0, [Candidate() for _ in range(search.width)]
    for _ in range(10):
        scores = [Scores(model(tuple(candidate.tokens))) for candidate in candidates]
        for candidate, each in zip(candidates, scores, strict=True):
            each.bonus = phrases and phrases.after(candidate.tokens)
        n_rows += len(scores)
        candidates, _, is_finished = search.advance(candidates, scores)
        assert len({tuple(each.tokens) for each in candidates}) == len(candidates)
        if is_finished:
            break
    return best_candidate(search.finish(candidates), None).tokens, n_rows


def as_model(rows: dict[tuple[int, ...], np.ndarray]) -> Callable[[tuple[int, ...]], np.ndarray]:
    return lambda tokens: rows.get(tokens, logits(end=0)).copy()


def random_model(seed: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Logits that depend on all tokens; tokens 0 to 5 and the end are probable."""

    def model(tokens: tuple[int, ...]) -> np.ndarray:
        row = np.full(V, -30, np.float32)
        drawn = np.random.default_rng([seed, len(tokens), *tokens])
        row[[*range(6), END]] = drawn.normal(0, 2, 7)
        return row

    return model


SEARCHES: dict[str, Callable[[], Search]] = {
    "greedy": lambda: Forks(END),
    "one beam": lambda: BeamsAndForks(END, 1, 1.0),
    "beams": lambda: BeamsAndForks(END, 3, 1.0),
    "patience": lambda: BeamsAndForks(END, 3, 2.0),
}
IMPATIENT = {"no patience": lambda: BeamsAndForks(END, 3, 0.1)}
WITHOUT: dict[str, Callable[[], Search]] = {
    "greedy": lambda: Sampling(END, 0.0, 1, None),
    "one beam": lambda: Beams(END, 1, 1.0),
    "beams": lambda: Beams(END, 3, 1.0),
    "patience": lambda: Beams(END, 3, 2.0),
    "no patience": lambda: Beams(END, 3, 0.1),
}


@pytest.mark.parametrize("kind", WITHOUT)
@given(phrase_sets, st.integers(0, 10_000))
def test_only_a_text_with_a_phrase_differs_from_that_without_a_list(
    kind: str, phrases: dict[tuple[int, ...], float], seed: int
) -> None:
    without, _ = decoded(random_model(seed), None, WITHOUT[kind]())

    text, _ = decoded(random_model(seed), tree(phrases), (SEARCHES | IMPATIENT)[kind]())

    if text != without:
        assert granted(tree(phrases), [*text, END]) > 0


@pytest.mark.parametrize("kind", SEARCHES)
def test_names_that_share_their_first_token_do_not_take_the_place_of_other_words(kind: str) -> None:
    """Eight beginnings with a bonus are better than the right text, but none goes on."""
    row = logits(t1=0, t2=-0.5)
    row[3:11] = -1
    model = as_model({(): row, **{(n,): logits(t0=0) for n in range(3, 11)}, (1,): logits(t2=0)})
    listed = tree({(n, 11 - n): 3.0 for n in range(3, 11)})

    assert decoded(model, listed, SEARCHES[kind]())[0][:2] == [1, 2]


def granted(phrases: Phrases, tokens: Sequence[int]) -> float:
    """What a text gets, token by token."""
    return sum(gain(phrases, tokens[:i], token) for i, token in enumerate(tokens))


def gain(phrases: Phrases, tokens: Sequence[int], token: int) -> float:
    return phrases.after(tokens).of(token)[0]


@given(phrase_sets, token_lists)
def test_a_text_gets_the_bonuses_of_its_complete_phrases_and_no_others(
    phrases: dict[tuple[int, ...], float], tokens: list[int]
) -> None:
    """By trying all selections of occurrences that do not overlap."""
    bonus: dict[tuple[int, ...], float] = {}  # of a token, after the tokens of its phrase before it
    for phrase, value in phrases.items():
        for n in range(len(phrase)):
            bonus[phrase[: n + 1]] = max(value, bonus.get(phrase[: n + 1], 0.0))
    of_phrase = {p: sum(bonus[p[: n + 1]] for n in range(len(p))) for p in phrases}
    best = [0.0]  # of the first n tokens
    for end in range(1, len(tokens) + 1):
        ending = [p for p in phrases if tuple(tokens[max(0, end - len(p)) : end]) == p]
        best.append(max([best[-1], *(best[end - len(p)] + of_phrase[p] for p in ending)]))

    total = granted(tree(phrases), [*tokens, END])

    assert total <= best[-1] + 1e-5
    assert total >= 0 - 1e-5
    apart = [p for p in phrases if len(set(p)) == len(p)]
    if len(apart) == len(phrases) and not _share_tokens(apart):
        assert total == pytest.approx(best[-1])


def _share_tokens(phrases: list[tuple[int, ...]]) -> bool:
    return any(set(a) & set(b) for a, b in itertools.combinations(phrases, 2))


def test_a_phrase_that_stops_is_given_back_and_one_that_is_complete_is_kept() -> None:
    phrases = tree({(1, 2, 3): 2.0, (1, 2): 1.0})

    # What a token gets, what is pending behind it, and whether a phrase may become complete.
    assert phrases.after([]).of(1) == (2, 2, True)
    assert phrases.after([1]).of(2) == (2, 0, True)
    assert phrases.after([1, 2]).of(3) == (2, 0, False)
    assert gain(phrases, [1], 4) == -2  # nothing is complete
    assert gain(phrases, [1, 2], 4) == 0  # the phrase (1, 2) is, which shares its tokens
    assert gain(phrases, [1, 2, 3], 4) == 0
    assert phrases.after([1]).of(1) == (0, 2, True)  # given back, and begun again


def test_a_phrase_may_begin_inside_another_one() -> None:
    phrases = tree({(1, 2, 3): 2.0, (2, 4): 2.0})

    assert granted(phrases, [1, 2, 4, END]) == 4
    assert granted(phrases, [1, 2, END]) == 0


def test_what_is_written_without_a_space_does_not_begin_inside_a_word() -> None:
    letters = {0}
    phrases = Phrases([Spelling((1, 2), 2.0, False)], letters.__contains__)

    assert gain(phrases, [], 1) == gain(phrases, [5], 1) == 2
    assert gain(phrases, [0], 1) == 0
    assert not phrases.after([0]).tokens.size
    assert gain(phrases, [0, 1], 2) == 0  # the phrase has not begun
    assert gain(phrases, [5, 1], 2) == 2


@pytest.mark.parametrize("search", ["greedy", "beams", "samples"])
def test_the_choice_has_the_bonus_and_the_probability_has_not(search: str) -> None:
    row = np.full(V, -5, np.float32)
    row[[3, 4]] = 2, 1
    own = float(row[4] - np.log(np.exp(row.astype(np.float64)).sum()))
    scores = Scores(row)
    scores.bonus = tree({(4,): 1.5}).after([])
    before = row.copy()
    kinds = {
        "greedy": lambda: Forks(END),
        "beams": lambda: BeamsAndForks(END, 1, 1.0),
        "samples": lambda: Sampling(END, 0.5, 1, lambda rows: rows.argmax(axis=1).tolist()),
    }
    searching = kinds[search]()

    candidates, _, _ = searching.advance([Candidate()], [scores])
    candidate = max(candidates, key=lambda candidate: candidate.score)
    finished = best_candidate(searching.finish(candidates), None)

    assert candidate.tokens == [4]
    assert finished.logprob == pytest.approx(own, abs=1e-5)
    assert finished.score == pytest.approx(own + 1.5, abs=1e-5)
    assert finished.logprobs == pytest.approx([own], abs=1e-5)
    assert np.array_equal(row, before)


def test_a_forbidden_token_stays_forbidden() -> None:
    scores = Scores(np.zeros(V, np.float32))
    scores.bonus = tree({(4,): 20.0}).after([])
    scores.forbid(np.array([4]))

    assert scores.preferred(3) == []
    assert scores.raised()[4] == -np.inf


MODEL = {  # 1 2 is the most probable; 3 4 is 3 nats less, 3 5 is 12 less
    (): logits(t1=0, t3=-3),
    (1,): logits(t2=0),
    (3,): logits(t4=0, t5=-9),
    (1, 2): logits(t6=0),
    (3, 4): logits(t6=0),
    (3, 5): logits(t6=0),
}


@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize(
    ("phrase", "expected"),
    [
        ((3, 4), [3, 4, 6]),  # 4 nats of bonus, 3 less probable
        ((3, 5), [1, 2, 6]),  # 4 nats of bonus, 12 less probable: the text that was best goes on
        ((3, 4, 7), [1, 2, 6]),  # it does not complete
        ((7, 8), [1, 2, 6]),
        ((1, 2), [1, 2, 6]),
    ],
)
def test_a_phrase_is_followed_to_its_end_before_it_decides(
    kind: str, phrase: tuple[int, ...], expected: list[int]
) -> None:
    tokens, _ = decoded(as_model(MODEL), tree({phrase: 2.0}), SEARCHES[kind]())

    assert tokens == expected


def test_phrases_that_are_improbable_cost_no_step() -> None:
    tokens, n_rows = decoded(as_model(MODEL), tree({(7, 8): 2.0, (8, 9): 2.0}), Forks(END))

    assert (tokens, n_rows) == ([1, 2, 6], 4)


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_text_that_has_ended_waits_for_a_phrase_that_is_open(kind: str) -> None:
    model = as_model({(): logits(end=0, t3=-3), (3,): logits(t4=0), (3, 4): logits(end=0)})

    assert decoded(model, tree({(3, 4): 2.0}), SEARCHES[kind]())[0] == [3, 4]
    assert decoded(model, tree({(3, 4): 1.0}), Forks(END))[0] == []


def test_coarse_logits_decide_only_if_no_bonus_can_raise_an_inexact_token_above_the_best() -> None:
    row = np.linspace(0, 1, V, dtype=np.float32)
    row[3] = 5 + FORK_MARGIN
    exact = SumError(0.0, np.array([3]), np.empty(0, np.float32), 1)
    coarse = CoarseLogits(row, 2.0, exact, row.copy)

    assert coarse.decides(np.inf)
    assert coarse.decides(np.inf, tree({(4,): 2.9}).after([]))
    assert not coarse.decides(np.inf, tree({(4,): 3.1}).after([]))


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(default_bundle())


def test_every_spelling_is_listed(transcriber: Transcriber) -> None:
    tokenizer = transcriber.tokenizer
    phrases = compiled(tokenizer, checked_phrases(["tachycardia"]), frozenset())
    assert phrases is not None

    for text in (" tachycardia", " Tachycardia", "tachycardia", "Tachycardia", '"tachycardia'):
        tokens = tokenizer.encode(text)
        n_tokens = len(tokens) - text.startswith('"')
        assert granted(phrases, tokens) == pytest.approx(DEFAULT_BONUS * n_tokens), text
    inside = [*tokenizer.encode(" x"), *tokenizer.encode("tachycardia")]
    assert granted(phrases, inside) == pytest.approx(0, abs=1e-6)
    chinese = compiled(tokenizer, checked_phrases(["北京"]), frozenset())
    assert chinese is not None
    assert granted(chinese, [*tokenizer.encode("我"), *tokenizer.encode("北京")]) > 0


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"without_timestamps": True}])
def test_a_transcription_prefers_its_phrases_and_others_change_nothing(
    transcriber: Transcriber, options: Any
) -> None:
    """The embedded model knows both words' tokens; this bonus is far above the default."""
    clip = next(clip for clip in CLIPS if "nine" in clip.text)
    plain = transcriber.transcribe(clip.path, **options)
    unrelated = transcriber.transcribe(clip.path, phrases=["Hallberg", "tachycardia"], **options)
    forced = transcriber.transcribe(clip.path, phrases=[("five", 20.0)], temperature=0.0, **options)

    assert unrelated.text == plain.text
    (segment,), (other,) = plain.segments, unrelated.segments
    assert other.tokens == segment.tokens
    assert other.logprobs == pytest.approx(segment.logprobs, abs=1e-6)
    assert "five" in forced.text
    assert "five" not in plain.text
    assert forced.segments[0].avg_logprob < plain.segments[0].avg_logprob


def test_a_list_is_read_from_a_file_and_its_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_text("\ufeffHallberg\t3.5\n\n  New   York \ntachycardia\r\nHallberg\n", "utf-8")

    assert read_phrases(file) == (
        ("Hallberg", 3.5),
        ("New York", DEFAULT_BONUS),
        ("tachycardia", DEFAULT_BONUS),
    )
    assert with_commas("a b, c,, ") == ["a b", "c"]


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "no phrases"),
        (b"\n \n", "no phrases"),
        (b"Anna\t-1\n", "'Anna'"),
        (b"Anna\tnan\n", "'Anna'"),
        (b"Anna\t1e9\n", "'Anna'"),
        (b"\n\nAnna\tx\n", "line 3"),
        (b"Anna\n...\n", "'...'"),
        (b"\t3\n", "line 1"),
        (b"a\x07b\n", "printable"),
        (b"x" * 201, "200"),
        (b"\xff\xfe", "UTF-8"),
        (b"\n".join(b"name%d" % i for i in range(MAX_PHRASES + 1)), "10,000"),
        (b"\n".join(b"name%d" % i for i in range(10**6)), "10,000"),
    ],
)
def test_a_bad_list_is_named(data: bytes, part: str, tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_bytes(data)

    with pytest.raises(UsageError) as raised:
        read_phrases(file)

    assert part in f"{raised.value.what} {raised.value.why} {raised.value.hint}"
    assert str(file) in raised.value.what


def test_options_that_are_copied_keep_the_checked_list() -> None:
    options = whisperport.TranscribeOptions(phrases=["Anna", ("New  York", 2)])  # type: ignore[arg-type]

    assert options.phrases == (("Anna", DEFAULT_BONUS), ("New York", 2.0))
    assert replace(options, word_timestamps=True).phrases is options.phrases


@pytest.mark.parametrize("phrases", ["Anna", [1], [("Anna",)], [("Anna", "x")], [""], [None]])
def test_bad_phrases_of_a_call_are_named(phrases: Any) -> None:
    with pytest.raises(UsageError, match="phrase"):
        whisperport.TranscribeOptions(phrases=phrases)


def test_a_phrase_that_no_token_can_spell_is_named(transcriber: Transcriber) -> None:
    with pytest.raises(UsageError, match="AC/DC"):
        transcriber.transcribe(CLIPS[0].path, phrases=["AC/DC"])

    assert transcriber.transcribe(CLIPS[0].path, phrases=["AC/DC"], suppress_tokens=()).text
