"""Programs that return the sum of all exponentials: the same texts and probabilities as without it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whisperport.errors import NumericalError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
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
from whisperport.runtime.engine.scores import Scores

from ...extent import core_or_all
from ...micro import DIMS, GENERATION
from ..traced_runners import engine_of

STEPS = ("step", "step_4")
# Logits of the two programs differ by rounding; each token's logarithm is right within 1e-5.
CLOSE = 1e-4


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
        assert logprobs(found) == pytest.approx(logprobs(expected), abs=CLOSE)


def logprobs(decoded: list[Decoded]) -> list[float]:
    return [one.avg_logprob for one in decoded]


def test_the_sum_of_the_program_is_used(
    engines: Any, audio: Callable[[int], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the logits after the prompt, and a quite improbable token, are added up on the host."""
    engine, _ = engines(True)
    added: list[int] = []
    monkeypatch.setattr(
        "whisperport.runtime.engine.scores.log_sum_exp", lambda row, peak: added.append(1) or 0.0
    )
    monkeypatch.setattr("whisperport.runtime.engine.scores.LEAST_PART", 1e-9)

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
