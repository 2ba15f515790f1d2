"""Scores that a program returns: finite ones, and their sum of exponentials."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import NumericalError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.runner import Runner
from whisperport.program.signatures import LOGSUMEXP, expected_signature
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import (
    Batch,
    Decoded,
    DecodeOptions,
    Decoder,
    Engine,
    Step,
    decode_together,
    decode_window,
)
from whisperport.runtime.decoding.rules import Rules
from whisperport.runtime.engine.scores import MOST_FORBIDDEN, Scores, log_sum_exp

from ...extent import core_or_all
from ...micro import DIMS, GENERATION
from ..runners import engine_of

# Scores that a program returns: finite ones, and their sum of exponentials.


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


def test_an_improbable_token_has_the_known_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a sum of all exponentials again: most of them remain."""
    row = np.zeros(V, np.float32)
    scores = summed(row)
    scores.forbid(slice(50))
    monkeypatch.setattr("whisperport.runtime.engine.scores.log_sum_exp", None)

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


# Programs that return the sum of all exponentials: the same texts and probabilities as without it.

STEPS = ("step", "step_4")
# Logits of the two programs differ by rounding; each token's logarithm is right within 1e-5.
CLOSE_TO_TORCH = 1e-4


@pytest.fixture(scope="module")
def engines(micro: Whisper, traced: Any) -> Callable[..., tuple[Engine, dict[str, Any]]]:
    """`engines(summed)`: a new engine over the micro model, and its runners."""

    def programs(*summed: str) -> dict[str, Any]:
        parts = Parts(micro, [(0, 1), (1, 0)], summed=frozenset(summed))
        return {**traced({}), **{p.name: p for p in whisper_programs(parts, STEPS)}}

    made = {True: programs(*STEPS), False: programs()}
    return lambda summed: engine_of(micro, made[summed])


def test_the_output_is_part_of_the_signature(engines: Any) -> None:
    _, runners = engines(True)

    for name, rows in (("step", 1), ("step_4", 4)):
        spec = runners[name].spec
        assert spec.outputs[1] == TensorSpec(LOGSUMEXP, (rows, 1))
        assert spec == expected_signature(spec, DIMS, None, 1)


def test_a_program_that_returns_hidden_states_returns_no_sum(micro: Whisper) -> None:
    parts = Parts(micro, [(0, 0)], projected=False, summed=frozenset(["step"]))

    (step,) = whisper_programs(parts, ["step"])

    assert LOGSUMEXP not in [output.name for output in step.spec.outputs]
    with_sum = ProgramSpec(
        "step", step.spec.inputs, (*step.spec.outputs, TensorSpec(LOGSUMEXP, (1, 1)))
    )
    assert expected_signature(with_sum, DIMS, None, 1) == step.spec


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"without_timestamps": True},
        {"suppress_tokens": ()},
        {"beam_size": 3},
        {"temperature": 0.7},
        {"temperature": 0.7, "best_of": 3},
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_texts_and_probabilities_are_those_without_it(
    engines: Any, audio: Callable[[int], np.ndarray], options: dict[str, Any]
) -> None:
    asked = DecodeOptions(language="en", max_tokens=9, **options)
    features = [audio(seed) for seed in range(core_or_all(2, 4))]
    plain, summed = engines(False)[0], engines(True)[0]

    expected = [decode_window(Decoder(plain), each, asked) for each in features]
    singly = [decode_window(Decoder(summed), each, asked) for each in features]
    together = decode_together(summed, features, [asked] * len(features))

    assert any(len(one.tokens) > 3 for one in expected)
    for found in (singly, together):
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert logprobs(found) == pytest.approx(logprobs(expected), abs=CLOSE_TO_TORCH)


def logprobs(decoded: list[Decoded]) -> list[float]:
    return [one.avg_logprob for one in decoded]


def test_the_sum_of_the_program_is_used(
    engines: Any, audio: Callable[[int], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the logits after the prompt are added up on the host, however improbable a token is."""
    engine, _ = engines(True)
    added: list[int] = []
    monkeypatch.setattr(
        "whisperport.runtime.engine.scores.log_sum_exp", lambda row, peak: added.append(1) or 0.0
    )

    decoded = decode_window(
        Decoder(engine), audio(0), DecodeOptions(language="en", without_timestamps=True)
    )

    assert len(decoded.tokens) > 3
    assert len(added) == 1


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_no_number_is_an_error_that_names_the_logits(
    engines: Any, audio: Callable[[int], np.ndarray], name: str, value: float
) -> None:
    engine, runners = engines(True)
    call = runners[name].call

    def changed(*inputs: Any) -> Any:
        logits, _, *rest = call(*inputs)
        logits[:, 7] = value
        peak = logits.amax(-1, keepdim=True)
        return (logits, peak + (logits - peak).exp().sum(-1, keepdim=True).log(), *rest)

    runners[name].call = changed
    with pytest.raises(NumericalError, match=f"`{name}` returned a NaN or an infinity") as caught:
        step(engine, audio(0), batched=name != "step")

    assert "of `logits`" in caught.value.why


@pytest.mark.parametrize("name", STEPS)
def test_a_sum_that_is_no_number_is_an_error_that_names_it(
    engines: Any, audio: Callable[[int], np.ndarray], name: str
) -> None:
    engine, runners = engines(True)
    call = runners[name].call

    def changed(*inputs: Any) -> Any:
        logits, sums, *rest = call(*inputs)
        return (logits, sums + torch.inf, *rest)

    runners[name].call = changed
    with pytest.raises(NumericalError) as caught:
        step(engine, audio(0), batched=name != "step")

    assert f"of `{LOGSUMEXP}`" in caught.value.why


@pytest.mark.parametrize(
    "options", [{}, {"beam_size": 2}, {"temperature": 0.6}, {"without_timestamps": True}], ids=str
)
def test_a_nan_behind_a_finite_sum_is_an_error(
    engines: Any, audio: Callable[[int], np.ndarray], options: dict[str, Any]
) -> None:
    """Only a wrong program returns that; no text may come of it."""
    engine, runners = engines(True)
    call = runners["step"].call

    def changed(*inputs: Any) -> Any:
        logits, *rest = call(*inputs)
        logits[:, 7] = torch.nan
        return (logits, *rest)

    runners["step"].call = changed

    with pytest.raises(NumericalError, match="`step` returned a NaN"):
        decode_window(Decoder(engine), audio(0), DecodeOptions(language="en", **options))


@pytest.mark.parametrize("wrong", [-90.0, -3.0, 3.0, 90.0])
def test_a_wrong_sum_gives_wrong_probabilities_and_no_crash(
    engines: Any, audio: Callable[[int], np.ndarray], wrong: float
) -> None:
    """Verification finds it; a bundle may be run without."""
    engine, runners = engines(True)
    call = runners["step"].call

    def changed(*inputs: Any) -> Any:
        logits, sums, *rest = call(*inputs)
        return (logits, sums + wrong, *rest)

    runners["step"].call = changed

    decoded = decode_window(Decoder(engine), audio(0), DecodeOptions(language="en"))

    assert np.isfinite(decoded.avg_logprob)


def step(engine: Engine, features: np.ndarray, *, batched: bool) -> None:
    """Decode one token."""
    batch = Batch(engine, fewest=1)
    decoder = batch.decoder() if batched else Decoder(engine)
    assert decoder is not None
    decoder.start_window(features)
    decoder.prefill([GENERATION.start_of_transcript])
    (found,) = decoder.step_all([Step(3, decoder.cache)])
    assert isinstance(found, Scores)
