"""Word error rates with their bounds, and what short windows' texts decide."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from whisperport.program.window import ShortWindows
from whisperport.runtime.decoding.decode import Decoded
from whisperport.runtime.decoding.fallback import text_logprob
from whisperport.speech.text import LANGUAGES
from whisperport.verification import (
    TOKEN_GATES,
    TextErrors,
    TokenGate,
    Unit,
    bootstrap_interval,
    compare_logits,
    compare_tokens,
    text_errors,
    unit_of,
    whisper_text_errors,
)
from whisperport.verification.clips import ShippedAudio, shipped_audio
from whisperport.verification.error_rate import normalize_english
from whisperport.verification.short_windows import ShortText, lowest_trusted, short_window_check

CHARACTERS = st.text("请在车站右转", max_size=12)
WORDS = st.lists(st.sampled_from(["ask", "not", "what", "your", "country"]), max_size=8)
TOKENS = (
    *("one", "twenty", "five", "hundred", "million", "point", "double", "half", "dollars", "cents"),
    *(
        "percent",
        "zero",
        "oh",
        "third",
        "twenties",
        "minus",
        "$",
        "€",
        "¢",
        "%",
        ".",
        ",",
        "'",
        "-",
    ),
    *("1,000", "4.5", "3rd", "1960s", "٣", "²", "½", "(", ")", "[", "]", "<", ">", "um", "colour"),
    *("cause", "kinda", "sorta", "dunno", "won't", "gonna", "Mr.", "he's", "I'd", "café", "\n"),
)


@pytest.mark.parametrize(
    ("hypothesis", "reference", "errors"),
    [
        ("ask not what", "ask not what", TextErrors(0, 0, 0, 3)),
        ("ask now what", "ask not what", TextErrors(1, 0, 0, 3)),
        ("ask what", "ask not what", TextErrors(0, 1, 0, 3)),
        ("do ask not what", "ask not what", TextErrors(0, 0, 1, 3)),
        ("", "ask not what", TextErrors(0, 3, 0, 3)),
        ("", "", TextErrors(0, 0, 0, 0)),
        ("thank you", "", TextErrors(0, 0, 2, 0)),
        (" ASK, not:  What! ", "ask not what", TextErrors(0, 0, 0, 3)),
        ("...", "ask", TextErrors(0, 1, 0, 1)),
        ("thank you", "?!", TextErrors(0, 0, 2, 0)),
    ],
)
def test_errors_are_counted_by_kind(hypothesis: str, reference: str, errors: TextErrors) -> None:
    assert text_errors(hypothesis, reference) == errors


@pytest.mark.parametrize(
    ("hypothesis", "reference", "errors"),
    [
        ("请右转", "请右转。", (0, 0, 0, 3)),
        ("请左转", "请 右转", (1, 0, 0, 3)),
        ("右转", "请右转", (0, 1, 0, 3)),
        ("请向右转", "请右转", (0, 0, 1, 3)),
        ("ドアを閉めて", "ドアを開めて", (1, 0, 0, 6)),
        ("３時 ABC", "3時 abc", (0, 0, 0, 5)),  # full width, and words of another script
        ("", "锁门", (0, 2, 0, 2)),
        ("谢谢", "", (0, 0, 2, 0)),
        ("ปิดประตู", "เปิดประตู", (0, 1, 0, 7)),  # marks above and below do not count
    ],
)
def test_characters_are_counted_where_words_have_no_spaces(
    hypothesis: str, reference: str, errors: tuple[int, int, int, int]
) -> None:
    assert text_errors(hypothesis, reference, "characters") == TextErrors(*errors, "characters")


def test_one_wrong_character_is_not_a_whole_sentence() -> None:
    hypothesis, reference = "请在车站左转然后直走", "请在车站右转然后直走"

    assert text_errors(hypothesis, reference, "words").rate == 1.0
    assert text_errors(hypothesis, reference, "characters").rate == 0.1


def test_characters_are_counted_for_the_languages_of_whisper_s_paper() -> None:
    counted = {code for code in LANGUAGES if unit_of(code) == "characters"}

    assert counted == {"zh", "ja", "th", "lo", "my", "yue"}


def test_a_rate_has_the_name_of_its_unit() -> None:
    assert TextErrors().name == "WER"
    assert TextErrors(unit="characters").name == "CER"


def test_words_and_characters_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="cannot add characters to words"):
        TextErrors(0, 0, 0, 3) + TextErrors(0, 0, 0, 3, "characters")


def test_the_rate_is_errors_per_reference_word() -> None:
    assert TextErrors(1, 2, 3, 12).rate == 0.5
    assert TextErrors(0, 0, 9, 3).rate == 3


def test_words_invented_in_silence_count_when_clips_are_added() -> None:
    silent, speech = text_errors("thank you", ""), text_errors("ask not", "ask not")

    assert silent.rate == math.inf
    assert text_errors("", "").rate == 0
    assert (silent + speech).rate == 1


def test_an_error_count_equals_the_edit_distance() -> None:
    """By the textbook's table, on 200 random pairs."""
    random = np.random.default_rng(0)
    for _ in range(200):
        a, b = ([f"w{i}" for i in random.integers(0, 4, random.integers(1, 9))] for _ in range(2))
        table = list(range(len(a) + 1))
        for j, word in enumerate(b, 1):
            diagonal, table[0] = table[0], j
            for i, other in enumerate(a, 1):
                cost = min(diagonal + (word != other), table[i - 1] + 1, table[i] + 1)
                diagonal, table[i] = table[i], cost

        assert text_errors(" ".join(a), " ".join(b)).errors == table[-1]


@given(WORDS, WORDS)
def test_counts_add_up_to_the_words_of_the_hypothesis(
    hypothesis: list[str], reference: list[str]
) -> None:
    found = text_errors(" ".join(hypothesis), " ".join(reference))

    assert found.length == len(reference)
    assert len(reference) - found.deletions + found.insertions == len(hypothesis)
    assert (found.errors == 0) == (hypothesis == reference)


@given(CHARACTERS, CHARACTERS)
def test_counts_add_up_to_the_characters_of_the_hypothesis(hypothesis: str, reference: str) -> None:
    found = text_errors(hypothesis, reference, "characters")

    assert found.length == len(reference)
    assert len(reference) - found.deletions + found.insertions == len(hypothesis)
    assert (found.errors == 0) == (hypothesis == reference)


def test_the_interval_holds_the_rate_and_is_the_same_for_the_same_seed() -> None:
    random = np.random.default_rng(0)
    clips = [TextErrors(int(n), 0, 0, 20) for n in random.integers(0, 5, 60)]
    total = sum(clips, TextErrors()).rate

    low, high = bootstrap_interval(clips, seed=1)

    assert low < total < high
    assert (low, high) == bootstrap_interval(clips, seed=1)
    # Normal approximation: 1.96 standard errors to each side; 1,000 draws give it within 15 %.
    half = 1.96 * np.std([clip.rate for clip in clips]) / math.sqrt(60)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)


def test_clips_are_weighted_by_their_words() -> None:
    clips = [TextErrors(0, 0, 0, 1000), TextErrors(1, 0, 0, 1)]

    assert bootstrap_interval(clips, seed=0) == (0.0, 1.0)
    assert sum(clips, TextErrors()).rate < 0.001


def test_a_draw_of_silent_clips_may_be_infinite_but_never_a_nan() -> None:
    low, high = bootstrap_interval([TextErrors(0, 0, 2, 0), TextErrors(0, 0, 0, 5)], seed=0)

    assert low == 0
    assert high == math.inf


@pytest.mark.parametrize(("clips", "n"), [([], 1000), ([TextErrors(0, 0, 0, 1)], 0)])
def test_nothing_to_draw_from_is_an_error(clips: list[TextErrors], n: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval(clips, seed=0, n=n)


def test_the_first_use_shows_no_warning_of_the_packages_source(tmp_path: Path) -> None:
    call = "from whisperport.verification.error_rate import normalize_english as n; print(n('Hi'))"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}  # compiles the package again
    command = [sys.executable, "-W", "error::SyntaxWarning", "-c", call]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    assert done.stdout.strip() == "hi", done.stderr


FP32 = TOKEN_GATES["fp32"]
REPORT_ONLY = TokenGate(min_agreement=0, max_mean_kl=math.inf, because="a test")


def logits(seed: int = 0, shape: tuple[int, int] = (20, 100)) -> np.ndarray:
    return (5 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def test_equal_logits_pass_every_gate() -> None:
    for gate in TOKEN_GATES.values():
        result = compare_logits(logits(), logits(), gate)

        assert result
        assert result.top1_agreement == 1
        assert result.mean_kl == 0
        assert result.n_positions == 20


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (None, logits(), "the output is missing"),
        (logits(), None, "the reference is missing"),
        (logits(shape=(0, 100)), logits(shape=(0, 100)), "expected at least"),
        (logits(shape=(3, 1)), logits(shape=(3, 1)), "expected at least"),
        (logits(shape=(3, 4)), logits(shape=(4, 4)), "expected shape (4, 4), got (3, 4)"),
        (logits().ravel(), logits(), "not a floating-point matrix"),
        (logits().astype(np.int8), logits(), "not a floating-point matrix"),
        ([[1.0, 2.0]], logits(), "not a floating-point matrix"),
    ],
)
def test_what_cannot_be_compared_fails_with_the_reason(
    actual: object, expected: object, reason: str
) -> None:
    result = compare_logits(actual, expected, REPORT_ONLY)  # type: ignore[arg-type]

    assert not result
    assert reason in result.reason
    assert math.isnan(result.mean_kl)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_is_not_finite_fails_on_either_side(bad: float, side: int) -> None:
    pair = [logits(), logits()]
    pair[side][2, 3] = bad

    result = compare_logits(pair[0], pair[1], REPORT_ONLY)

    assert not result
    assert ("output", "reference")[side] in result.reason


def test_only_a_flip_against_a_sure_reference_is_hard() -> None:
    expected = np.zeros((2, 4), np.float32)
    expected[0, :2] = [5.0, 4.95]  # margin 0.05
    expected[1, :2] = [5.0, 4.5]  # margin 0.5
    actual = expected.copy()
    actual[:, 1] = 5.01

    result = compare_logits(actual, expected, REPORT_ONLY)

    assert result.top1_agreement == 0
    assert result.hard_flips == 1


def test_one_hard_flip_fails_fp32_and_is_one_in_a_hundred_for_int8() -> None:
    expected = np.zeros((100, 4), np.float32)
    expected[:, 0] = 0.2
    actual = expected.copy()
    actual[7, 1] = 0.3

    fp32, int8 = (compare_logits(actual, expected, TOKEN_GATES[g]) for g in ("fp32", "w8a8"))

    assert not fp32
    assert "1 of 100 positions" in fp32.reason
    assert int8
    assert int8.worst_position == 7


def test_kl_is_that_of_the_textbook() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    shift = np.array([[1000.0], [-1000.0]])  # logits are known up to a constant

    result = compare_logits(np.log(q) + shift, np.log(p) - shift, REPORT_ONLY)

    assert result.mean_kl == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))


def test_a_large_divergence_fails_although_the_first_choice_agrees() -> None:
    expected = logits()

    result = compare_logits(expected * np.float32(0.5), expected, TOKEN_GATES["w8a8"])

    assert result.top1_agreement == 1
    assert not result
    assert "mean KL" in result.reason


@settings(max_examples=50)
@given(sigma=st.floats(1e-6, 1e-2), seed=st.integers(0, 99))
def test_kl_of_small_noise_is_at_most_half_its_variance(sigma: float, seed: int) -> None:
    """To second order KL is half the variance of the noise under p: the premise of the fp32 gate.

    The variance of 100 draws under a peaked p is itself random; 20 positions stay within 3 times.
    """
    expected = logits(seed).astype(np.float64)
    noise = sigma * np.random.default_rng(seed + 1).standard_normal(expected.shape)

    result = compare_logits(expected + noise, expected, REPORT_ONLY)

    assert 0 <= result.mean_kl <= 3 * sigma**2 / 2


def test_equal_tokens_pass() -> None:
    result = compare_tokens([1, 2, 3], (1, 2, 3))

    assert result
    assert result.first_difference is None
    assert result.numbers() == {"n_expected": 3, "n_actual": 3, "n_same": 3}


@pytest.mark.parametrize(
    ("actual", "expected", "side"), [([], [], "reference"), ([], [1], "output"), ([1], [], "refer")]
)
def test_empty_runs_fail(actual: list[int], expected: list[int], side: str) -> None:
    result = compare_tokens(actual, expected)

    assert not result
    assert f"the {side}" in result.reason


@pytest.mark.parametrize(
    ("actual", "first"), [([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([9], 0)]
)
def test_the_first_difference_is_found(actual: list[int], first: int) -> None:
    result = compare_tokens(actual, [1, 2, 3])

    assert not result
    assert result.first_difference == first
    assert result.numbers()["n_same"] == first


@given(st.lists(st.integers(0, 5), min_size=1), st.lists(st.integers(0, 5), min_size=1))
def test_tokens_before_the_first_difference_are_the_same(a: list[int], e: list[int]) -> None:
    result = compare_tokens(a, e)

    assert bool(result) == (a == e)
    at = result.first_difference
    if at is not None:
        assert a[:at] == e[:at]
        assert a[at : at + 1] != e[at : at + 1]


@pytest.mark.parametrize(
    ("hypothesis", "reference", "plain", "whisper"),
    [
        ("I'll wait", "I will wait", (1, 0, 0, 3), (0, 0, 0, 3)),
        ("it costs 25 dollars", "it costs twenty-five dollars", (1, 1, 0, 5), (0, 0, 0, 3)),
        ("set it to 25", "set it to twenty-five", (1, 1, 0, 5), (0, 0, 0, 4)),
        ("the colour grey", "the color gray", (2, 0, 0, 3), (0, 0, 0, 3)),
        ("um turn it off", "turn it off", (0, 0, 1, 3), (0, 0, 0, 3)),
        ("the cause", "the because", (1, 0, 0, 2), (1, 0, 0, 2)),
        ("turn it on", "turn it off", (1, 0, 0, 3), (1, 0, 0, 3)),
        ("thank you", "", (0, 0, 2, 0), (0, 0, 2, 0)),
    ],
)
def test_english_words_are_counted_after_whispers_normalizer(
    hypothesis: str,
    reference: str,
    plain: tuple[int, int, int, int],
    whisper: tuple[int, int, int, int],
) -> None:
    assert text_errors(hypothesis, reference) == TextErrors(*plain)
    assert whisper_text_errors(hypothesis, reference) == TextErrors(*whisper)


@pytest.mark.parametrize(
    ("language", "unit"), [("de", None), ("zh", None), ("en", "characters"), ("zh", "words")]
)
def test_the_basic_normalizer_serves_other_languages_and_characters(
    language: str, unit: Unit | None
) -> None:
    errors = whisper_text_errors("I'll 25 请左转", "I will 25 请右转", language, unit)

    expected = unit or unit_of(language)
    assert errors == text_errors("I'll 25 请左转", "I will 25 请右转", expected)


@pytest.fixture(scope="module")
def openai() -> Callable[[str], str]:
    from whisper.normalizers import EnglishTextNormalizer  # needs openai-whisper

    return EnglishTextNormalizer()


@given(
    st.lists(st.sampled_from(TOKENS)).map(" ".join) | st.lists(st.sampled_from(TOKENS)).map("".join)
)
@example("the cause of it, kinda, sorta, dunno")
@settings(max_examples=500)
def test_english_is_normalized_as_by_openai(openai: Callable[[str], str], text: str) -> None:
    assert normalize_english(text) == openai(text).strip()


@pytest.mark.parametrize("clip", shipped_audio(), ids=lambda clip: clip.path.stem)
def test_shipped_transcripts_are_normalized_as_by_openai(
    openai: Callable[[str], str], clip: ShippedAudio
) -> None:
    assert normalize_english(clip.text) == openai(clip.text).strip()


def test_a_number_too_long_for_python_does_not_stop_the_count() -> None:
    assert whisper_text_errors("1" * 5000, "one").substitutions == 1


def test_the_tables_are_loaded_only_when_english_is_normalized() -> None:
    code = "import sys, whisperport.verification; sys.exit('whisper_normalizer' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Whether short windows may be used, and which texts the runtime trusts

SAID = "turn the light on in ten minutes please"


def text(
    avg_logprob: float = -0.1,
    short: str = SAID,
    *,
    correct: str = SAID,
    positions: int = 375,
    is_whole: bool = True,
    text_logprob: float = -1.0,
) -> ShortText:
    return ShortText(
        correct=correct,
        full=SAID,
        short=short,
        positions=positions,
        avg_logprob=avg_logprob,
        text_logprob=text_logprob,
        is_whole=is_whole,
        unit="words",
    )


RIGHT = [text(-0.05), text(-0.1), text(-0.15), text(-0.2, positions=500), text(-0.1)]


def test_windows_that_keep_all_words_are_used_from_the_shortest_one_on_that_held_a_clip() -> None:
    # When no text differs
    windows, check = short_window_check(RIGHT)
    # Then all lengths are used, and the limit is twice as far below the lowest as that below the median
    assert windows == ShortWindows(positions=(375, 500, 750, 1000), min_logprob=-0.4)
    assert check.passed
    assert check.value["extra_errors"] == 0
    assert check.value["increase_bound"] == pytest.approx(3 / (5 * 8))
    # When no clip fits in the shortest
    longer = [text(each.avg_logprob, positions=500) for each in RIGHT]
    windows, _ = short_window_check(longer)
    # Then it is not used
    assert windows is not None
    assert windows.positions == (500, 750, 1000)


def test_a_text_that_differs_is_below_the_limit() -> None:
    # Given a text that differs, and is less probable than the right ones
    wrong = text(-0.25, "turn the light on in two minutes please")
    # When the limit follows from all texts
    # Then that text is not trusted, although the others alone would trust it
    assert wrong.is_trusted(lowest_trusted(RIGHT))
    assert not wrong.is_trusted(lowest_trusted([*RIGHT, wrong]))
    # When the clip is judged
    windows, check = short_window_check([*RIGHT, wrong])
    # Then its error counts, because the limit of the others did not see it, and there are no windows
    assert check.value["extra_errors"] == 1
    assert check.value["decoded_again"] == 0
    assert windows is None
    assert check.rule == "not used: 1 more errors in 48 words"


def test_an_improbable_text_that_differs_is_decoded_again_and_no_error() -> None:
    # Given a text that differs, and is far less probable than the right ones
    windows, check = short_window_check([*RIGHT, text(-0.6, "stop")])
    # Then the full window replaces it
    assert windows is not None
    assert (check.value["texts_differ"], check.value["decoded_again"]) == (1, 1)
    assert check.value["extra_errors"] == 0


def test_a_text_that_is_more_probable_than_all_others_together_is_trusted() -> None:
    # Given short texts, whose uncertain timestamps make the mean low
    sure, unsure = text(-0.4, text_logprob=-0.6), text(-0.4, text_logprob=-0.8)
    # Then the probability of the text decides, unless its end is missing
    assert sure.is_trusted(-0.2)
    assert not unsure.is_trusted(-0.2)
    assert not replace(sure, is_whole=False).is_trusted(-0.2)
    # And a wrong text that is so probable counts as an error, whatever the limit
    windows, check = short_window_check([*RIGHT, text(-0.6, "stop", text_logprob=-0.6)])
    assert windows is None
    assert check.value["extra_errors"] == 8


def test_the_probability_of_a_text_counts_its_end_and_not_its_timestamps() -> None:
    # Given tokens of which the first and the last are timestamps, and an end of -0.1
    decoded = Decoded((9, 1, 2, 9), "en", -3.6 / 5, 0.0, 0.0, True, (-1.0, -0.2, -0.3, -2.0))
    # Then the text and its end count
    assert text_logprob(decoded, 9) == pytest.approx(-0.6)


def test_where_all_right_texts_are_sure_no_mean_is_enough() -> None:
    # Given right texts that are more probable than all others together
    sure = [text(-0.05 * n, text_logprob=-0.1) for n in range(1, 7)]
    # Then no other text is trusted, however high its mean
    assert lowest_trusted(sure) == 0.0
    assert not text(-0.01, text_logprob=-0.8).is_trusted(0.0)
    assert lowest_trusted([*sure, text(-0.3)]) < 0.0


def test_probable_texts_that_differ_are_a_reason_not_to_use_short_windows() -> None:
    # Given a wrong text that is as probable as right ones
    texts = [*RIGHT, text(-0.1, "turn the light of in two minutes")]
    # When it is judged
    windows, check = short_window_check(texts)
    # Then there are no windows, and the check says why and does not fail the bundle
    assert windows is None
    assert check.passed
    assert check.rule.startswith("not used: ")
    # When the bundle states windows that trust it
    stated = ShortWindows(positions=(250,), min_logprob=-1.0)
    _, check = short_window_check(texts, stated)
    # Then the check fails
    assert not check.passed
    assert "3 more errors in 48 words" in check.reason


def test_a_text_that_is_nearer_to_the_transcript_than_the_full_window_s_is_no_loss() -> None:
    # Given short windows that correct an error of the full one
    better = [
        text(each.avg_logprob, "turn the lights on", correct="turn the lights on") for each in RIGHT
    ]
    # When they are judged with a limit that trusts them
    _, check = short_window_check(better, ShortWindows(positions=(250,), min_logprob=-1.0))
    # Then there are fewer errors
    assert check.passed
    assert check.value["extra_errors"] < 0


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (RIGHT[:3], "fewer than 4 clips"),
        ([text(is_whole=False)] * 6, "6 of 6 clips need the full window"),
        ([text(short="", correct="")] * 6, "the clips have no words"),
    ],
)
def test_without_evidence_there_are_no_short_windows(texts: list[ShortText], reason: str) -> None:
    # When too little can be seen
    windows, check = short_window_check(texts)
    # Then there are none, and the check says why
    assert windows is None
    assert reason in check.rule


@given(st.lists(st.tuples(st.floats(-5, 0), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_the_limit_is_a_number_that_trusts_no_text_that_differs(
    drawn: list[tuple[float, bool, bool]],
) -> None:
    # Given any texts
    texts = [
        text(logprob, SAID if same else "stop", is_whole=whole) for logprob, same, whole in drawn
    ]
    # When the limit follows from them
    limit = lowest_trusted(texts)
    # Then it is no positive number, and above each text that differs, as far as a number can be
    assert -math.inf < limit <= 0
    wrong = [each.avg_logprob for each in texts if each.is_whole and each.differs]
    assert all(value < limit or value > -0.011 for value in wrong)
