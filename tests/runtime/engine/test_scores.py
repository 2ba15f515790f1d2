"""Scores that a program returns: finite ones, and their sum of exponentials."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import NumericalError
from whisperport.model.network.whisper import Whisper
from whisperport.program.runner import Runner
from whisperport.runtime import DecodeOptions, Decoder, Engine, decode_window
from whisperport.runtime.decoding.rules import Rules
from whisperport.runtime.engine.scores import MOST_FORBIDDEN, Scores, log_sum_exp

from ...micro import DIMS, GENERATION

# The logarithm of the sum of all exponentials: computed here, or by a program and then corrected.

V = 51_865  # multilingual Whisper's vocabulary
# The given logarithm is rounded to float32, and a subtraction of 95% of the sum loses a factor of 20.
CLOSE = 5e-5


def logits(seed: int = 0, n: int = V) -> np.ndarray:
    return (4 * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def exact(row: np.ndarray) -> float:
    return float(np.logaddexp.reduce(row.astype(np.float64)))


def summed(row: np.ndarray) -> Scores:
    """Scores as a program returns them: with the logarithm of the sum, in float32."""
    return Scores(row, float(np.float32(exact(row))))


@pytest.mark.parametrize("offset", [0, 59, -61, 200, -200])
def test_log_sum_exp_is_that_of_float64(offset: int) -> None:
    """Also if the exponentials themselves are beyond the range of float32."""
    row = logits() + np.float32(offset)
    row[:100] = -np.inf

    expected = np.logaddexp.reduce(row.astype(np.float64))

    rounding = float(np.spacing(np.float32(abs(offset))))
    assert float(log_sum_exp(row)) == pytest.approx(expected, abs=1e-5 + rounding)


@pytest.mark.parametrize(
    "tokens",
    [
        slice(0, 0),
        slice(7),
        slice(V - 1501, None),
        slice(MOST_FORBIDDEN + 1),
        np.array([], np.int64),
        np.arange(0, V, V // 89),
    ],
    ids=str,
)
def test_forbidden_tokens_are_no_part_of_the_sum(tokens: slice | np.ndarray) -> None:
    row = logits()
    scores = summed(row)

    scores.forbid(tokens)

    assert (row[tokens] == -np.inf).all()
    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


@given(
    st.integers(0, 99),
    st.lists(st.lists(st.integers(0, 40), max_size=8, unique=True), max_size=4),
    st.floats(-40, 40, width=32),
    st.booleans(),
)
def test_the_sum_is_that_of_the_tokens_that_remain(
    seed: int, forbidden: list[list[int]], raised: float, known: bool
) -> None:
    """Also if a token was forbidden twice, or was nearly all of the sum."""
    row = logits(seed, n=42)
    row[7] += np.float32(raised)
    scores = summed(row) if known else Scores(row)

    for tokens in forbidden:
        scores.forbid(np.array(tokens, np.int64))

    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


def test_a_token_that_a_checkpoint_suppresses_twice_is_subtracted_once() -> None:
    generation = replace(GENERATION, suppressed_at_start=(5, 5))
    row = logits(n=generation.timestamp_begin + 9)
    row[5] += 9
    scores = summed(row)

    Rules(generation, timestamps=False, suppressed=()).apply(scores, [])

    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


def test_a_sum_does_not_change_with_the_logits_after_it() -> None:
    """The next step overwrites them."""
    row = logits()
    scores = summed(row)
    scores.forbid(slice(50))
    scores.forbid(np.array([77]))
    expected = exact(row)

    found = scores.log_sum()
    row[:] = 0

    assert found.value == pytest.approx(expected, abs=CLOSE)


def test_a_changed_logit_changes_the_sum() -> None:
    row = logits()
    scores = summed(row)

    scores.forget_sum()
    row[9] = 30

    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


def test_a_copy_is_independent() -> None:
    row = logits()
    scores = summed(row)
    scores.forbid(slice(9))
    copy = scores.copy()

    scores.forbid(slice(30, 60))

    assert copy.log_sum().value == pytest.approx(exact(copy.logits), abs=CLOSE)
    assert (copy.logits[30:60] > -np.inf).all()


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("timestamps", [True, False])
@given(data=st.data())
def test_rules_leave_the_sum_of_what_they_leave(
    timestamps: bool, penalty: float, data: st.DataObject
) -> None:
    begin, end = GENERATION.timestamp_begin, GENERATION.end_of_text
    size = begin + 40
    rules = Rules(
        GENERATION,
        timestamps=timestamps,
        suppressed={1, 2, end + 1},
        max_initial_timestamp=30,
        latest_timestamp=35,
        repetition_penalty=penalty,
    )
    said = st.lists(st.sampled_from([3, 4, begin + 3, begin + 4]), max_size=5)
    tokens = sorted(data.draw(said, "tokens"), key=lambda token: token >= begin)
    row = logits(data.draw(st.integers(0, 99), "seed"), n=size)
    row[data.draw(st.sampled_from([3, end, begin + 8]), "likely")] += 10
    scores = summed(row)

    rules.apply(scores, tokens)

    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


# A NaN or an infinity that a program returns is an error that names the program, never text.

TEXT = DecodeOptions(language="en", without_timestamps=True)
MEL = np.zeros((DIMS.n_mels, DIMS.n_frames), np.float32)
Change = Callable[[np.ndarray], np.ndarray]


class Changed(Runner):
    """A runner with one of its outputs changed."""

    def __init__(self, runner: Runner, output: str, change: Change) -> None:
        super().__init__(runner.spec)
        self.runner, self.output, self.change = runner, output, change

    def _run(self, inputs: Any) -> Any:
        names = [tensor.name for tensor in self.spec.inputs]
        outputs = self.runner.run(dict(zip(names, inputs, strict=True)))
        return list((outputs | {self.output: self.change(outputs[self.output])}).values())


@pytest.fixture
def with_output(micro: Whisper, eager_runners: Any) -> Callable[..., Decoder]:
    """`with_output(program, output, change)`: a decoder over the micro model, one program changed."""

    def make(program: str, output: str, change: Change) -> Decoder:
        runners = eager_runners(micro)
        runners[program] = Changed(runners[program], output, change)
        tables = micro.decoder.token_embedding.weight, micro.decoder.positional_embedding
        return Decoder(Engine(DIMS, GENERATION, runners, *(table.numpy() for table in tables)))

    return make


def one(value: float) -> Change:
    """The last value becomes `value`."""

    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[-1] = value
        return array

    return change


def transcribe(decoder: Decoder) -> None:
    decoded = decode_window(decoder, decoder.engine.encode(MEL), TEXT)
    decoder.align([*decoded.tokens, GENERATION.end_of_text])


PROGRAMS = [
    ("encoder", "features"),
    ("cross_kv", "cross_k_0"),
    ("cross_kv", "cross_v_1"),
    ("prefill_4", "logits"),
    ("step", "logits"),
    ("align", "scores"),
    ("align", "rows"),
]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_a_value_that_is_not_finite_is_an_error_that_names_the_program(
    with_output: Any, program: str, output: str, value: float
) -> None:
    decoder = with_output(program, output, one(value))

    with pytest.raises(NumericalError, match=f"the program `{program}` returned") as caught:
        transcribe(decoder)

    assert caught.value.program == program
    assert caught.value.why.startswith("1 of ")
    assert f"`{output}`" in caught.value.why
    assert "whisperport verify" in caught.value.hint


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_large_values_are_no_error(with_output: Any, program: str, output: str) -> None:
    """Their sum and their squares overflow; they themselves do not."""
    huge = np.finfo(np.float32).max
    decoder = with_output(program, output, lambda array: np.full_like(array, huge))

    if program == "encoder":
        assert (decoder.engine.encode(MEL) == huge).all()
    elif program == "cross_kv":
        decoder.start_window(np.zeros((DIMS.n_audio_ctx, DIMS.n_audio_state), np.float32))
    else:
        decoder.start_window(np.zeros((DIMS.n_audio_ctx, DIMS.n_audio_state), np.float32))
        decoder.prefill([1, 2, 3])
        decoder.step(4)
        decoder.align([1, 2])


@pytest.mark.parametrize("table", ["embedding", "positions"])
def test_a_table_that_is_not_finite_is_an_error_that_names_the_tables(
    micro: Whisper, eager_runners: Any, table: str
) -> None:
    tables = {
        "embedding": micro.decoder.token_embedding.weight.numpy().copy(),
        "positions": micro.decoder.positional_embedding.numpy().copy(),
    }
    tables[table][:, 0] = np.nan
    decoder = Decoder(Engine(DIMS, GENERATION, eager_runners(micro), **tables))

    with pytest.raises(NumericalError, match="the bundle's tables contain"):
        transcribe(decoder)
