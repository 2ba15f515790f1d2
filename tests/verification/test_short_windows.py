"""Whether short windows may be used, and which texts the runtime trusts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.program.window import ShortWindows
from whisperport.runtime.decoding.decode import Decoded
from whisperport.runtime.decoding.fallback import text_logprob
from whisperport.verification.short_windows import ShortText, lowest_trusted, short_window_check

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
