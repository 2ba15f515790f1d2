"""What an app's words lose against the checkpoint's is counted, and named as what it is."""

import numpy as np
import pytest

from whisperport.build.judge.words import ComparedWords, compare_words, longest_loop
from whisperport.build.layouts.reference import Emitted, TimedText
from whisperport.verification.clips import Clip

SPOKEN = "turn off the light in the kitchen please"


def emitted(text: str, *, timed: bool = True, words: bool = False) -> Emitted:
    end_s = 2.0 if timed else 0.0
    times = TimedText(0.0, end_s, text)
    return Emitted((), text, (times,), words=(times,) if words else ())


def compared(
    text: str, spoken: str = SPOKEN, language: str = "en", *, timed: bool = True
) -> ComparedWords:
    clip = Clip("a.wav", "", np.zeros(16, np.float32), language)
    return compare_words([clip], [emitted(spoken)], [emitted(text, timed=timed)], timed=True)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("", "no text", "the checkpoint emits 8 words"),
        ("Turn off the", "early stop", "after 3 of 8 words"),
        ("Turn off the light in the", "lost ending", "the last 2 of 8 words are missing"),
        ("Turn " + "off the " * 5, "loop", "`off the` 5 times in a row"),
    ],
)
def test_what_is_lost_is_named(text: str, kind: str, reason: str) -> None:
    losses = compared(text).losses
    assert (losses[0].kind, losses[0].reason) == (kind, reason)
    assert losses[0].clip == "a.wav"


@pytest.mark.parametrize(
    "text", [SPOKEN, SPOKEN.upper() + ".", SPOKEN.replace("please", "peas"), "so " + SPOKEN]
)
def test_other_words_alone_are_no_loss(text: str) -> None:
    assert not compared(text).losses


def test_a_loop_of_the_checkpoint_is_no_loss_of_the_app() -> None:
    text = "no " * 9
    assert not compared(text, text).losses


def test_characters_are_counted_where_no_spaces_are_written() -> None:
    words = compared("今日は", "今日は雨が降る", "ja")
    assert [loss.reason for loss in words.losses] == ["after 3 of 7 characters"]
    assert "characters" in str(words)


def test_lost_timestamps_are_wrong_although_no_word_differs() -> None:
    words = compared(SPOKEN, timed=False)
    assert [loss.kind for loss in words.losses] == ["lost timestamps"]
    assert not words
    assert compared(SPOKEN)


def test_the_bound_of_the_error_rate_is_part_of_the_result() -> None:
    # given two words of eight that differ
    words = compared("turn on the light in the kitchen now")
    # then counts, rate and bound are there, and lost words alone are no failure: the weights decide
    result = words.to_json()
    assert (result["differ"], result["length"], result["error_rate"]) == (2, 8, 0.25)
    assert result["increase_at_most"] >= 0.25
    assert words


@pytest.mark.parametrize(
    ("text", "phrase", "repeats"),
    [("a b a b a b c", "a b", 3), ("a a a a", "a", 4), ("a b c", "a", 1), ("", "", 0)],
)
def test_the_longest_loop_is_found(text: str, phrase: str, repeats: int) -> None:
    words, count = longest_loop(text.split())
    assert (" ".join(words), count) == (phrase, repeats)
