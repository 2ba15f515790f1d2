"""Guards against loops do what transformers' processors of the same name do, and end a loop."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from whisperport.errors import UsageError
from whisperport.runtime import DecodeOptions, decode_window
from whisperport.runtime.decoding.rules import Rules, forbid_repeated_ngrams, penalize_repetition
from whisperport.runtime.engine.scores import Scores

from ...micro import DIMS, GENERATION
from ..runners import FEATURES, Scripted

V = 12
texts = st.lists(st.integers(0, V - 1), min_size=1, max_size=20)
rows = st.lists(st.floats(-50, 50, width=32), min_size=V, max_size=V)


@given(text=texts, row=rows, penalty=st.sampled_from([1.0, 1.1, 1.5, 4.0]))
def test_the_penalty_is_that_of_transformers(
    text: list[int], row: list[float], penalty: float
) -> None:
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([text]), torch.tensor([row], dtype=torch.float32)
    )[0].numpy()

    logits = np.array(row, np.float32)
    penalize_repetition(logits, text, penalty)

    np.testing.assert_array_equal(logits, expected)


@given(text=texts, row=rows, size=st.integers(1, 5))
def test_the_forbidden_ngrams_are_those_of_transformers(
    text: list[int], row: list[float], size: int
) -> None:
    expected = NoRepeatNGramLogitsProcessor(size)(
        torch.tensor([text]), torch.tensor([row], dtype=torch.float32)
    )[0].numpy()

    logits = np.array(row, np.float32)
    forbid_repeated_ngrams(logits, text, size)

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
