"""Decoding without a cache says what decoding with one says."""

from typing import Any

import numpy as np
import pytest
import torch

from whisperport.model.network.uncached_decoder import UncachedDecoder as UncachedModule
from whisperport.model.network.whisper import Whisper
from whisperport.program.program_kind import UNCACHED_DECODER
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec, TensorSpec, UncachedForm
from whisperport.runtime import Decoder, Engine
from whisperport.runtime.engine.uncached_decoder import UncachedDecoder

from ...micro import GENERATION

TOKENS = [50, 51, 53, 57, 7, 30, 2, 69]
ATOL = 1e-5  # float32 sums in another order


class Eager(Runner):
    """`uncached_decoder` in torch."""

    def __init__(self, model: Whisper, form: UncachedForm) -> None:
        d, t = model.dims.n_text_state, model.dims.n_audio_ctx
        inputs = TensorSpec("features", (1, t, d)), TensorSpec("embeddings", (1, d, *form.layout))
        pieces = [
            TensorSpec(f"logits_{i}", (1, form.sequence_length, 70 // form.pieces))
            for i in range(2)
        ]
        super().__init__(ProgramSpec(UNCACHED_DECODER, inputs, tuple(pieces)))
        self.module = UncachedModule(model.decoder, form).eval()

    def _run(self, inputs: Any) -> Any:
        with torch.no_grad():
            return [out.numpy() for out in self.module(*map(torch.from_numpy, inputs))]


@pytest.fixture(params=["host", "graph"])
def engine(micro: Whisper, eager_runners: Any, request: pytest.FixtureRequest) -> Engine:
    """Of all programs, `uncached_decoder` of 12 rows among them."""
    runners = eager_runners(micro) | {
        UNCACHED_DECODER: Eager(micro, UncachedForm(12, request.param, pieces=2))
    }
    tables = micro.decoder.token_embedding.weight, micro.decoder.positional_embedding
    return Engine(micro.dims, GENERATION, runners, *(table.numpy() for table in tables))


@pytest.fixture
def decoder(engine: Engine) -> UncachedDecoder:
    decoder = engine.uncached_decoder()
    assert decoder is not None
    return decoder


@pytest.fixture
def features() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((10, 16)).astype(np.float32)


def test_prefill_and_steps_give_the_logits_of_the_cached_decoder(
    engine: Engine, decoder: UncachedDecoder, features: np.ndarray
) -> None:
    cached = Decoder(engine)
    for either in (cached, decoder):
        either.start_window(features)

    for ours, theirs in zip(
        decoder.prefill(TOKENS[:4], second_index=1),
        cached.prefill(TOKENS[:4], second_index=1),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=ATOL)
    for token in TOKENS[4:]:
        np.testing.assert_allclose(decoder.step(token), cached.step(token), atol=ATOL)
    assert decoder.tokens == TOKENS


def test_rows_after_the_tokens_hold_token_0_and_its_positions(
    engine: Engine, decoder: UncachedDecoder, features: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of zeros would leave its layer norm nothing to divide by."""
    runner = decoder._runner
    given: list[np.ndarray] = []
    run = type(runner)._run
    monkeypatch.setattr(
        type(runner), "_run", lambda self, inputs: given.append(inputs[1]) or run(self, inputs)
    )
    decoder.start_window(features)

    decoder.prefill(TOKENS[:5])

    rows = given[0].reshape(-1, 12).T  # (S, d)
    expected = engine._embedding[[*TOKENS[:5], *[0] * 7]]
    if given[0].shape[3] == 1:
        expected = expected + engine._positions[:12]
    np.testing.assert_array_equal(rows, expected)


def test_what_the_rows_after_the_tokens_hold_changes_no_logits(
    decoder: UncachedDecoder, features: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundles that were exported with rows of zeros verify as before."""
    decoder.start_window(features)
    logits = decoder.prefill(TOKENS[:4])[0]
    monkeypatch.setattr("whisperport.runtime.engine.uncached_decoder.PADDING", 33)
    decoder.start_window(features)

    np.testing.assert_array_equal(decoder.prefill(TOKENS[:4])[0], logits)


def test_the_next_window_removes_the_tokens_of_the_last(
    decoder: UncachedDecoder, features: np.ndarray
) -> None:
    decoder.start_window(features)
    alone = decoder.prefill(TOKENS[:3])[0]
    decoder.start_window(-features)
    decoder.prefill(TOKENS)
    decoder.start_window(features)

    np.testing.assert_array_equal(decoder.prefill(TOKENS[:3])[0], alone)


def test_more_tokens_than_rows_are_rejected_and_leave_the_others(
    decoder: UncachedDecoder, features: np.ndarray
) -> None:
    decoder.start_window(features)
    decoder.prefill([50] * 12)

    with pytest.raises(ValueError, match="13 tokens do not fit into a sequence of 12"):
        decoder.step(7)

    assert len(decoder.tokens) == 12


def test_no_tokens_and_no_audio_are_rejected(
    decoder: UncachedDecoder, features: np.ndarray
) -> None:
    with pytest.raises(ValueError, match="call `start_window` first"):
        decoder.prefill([50])
    decoder.start_window(features)
    with pytest.raises(ValueError, match="the prompt has 0 tokens"):
        decoder.prefill([])


def test_an_engine_of_a_bundle_without_it_has_none(micro: Whisper, eager_runners: Any) -> None:
    engine = Engine(micro.dims, GENERATION, eager_runners(micro), np.empty(0), np.empty(0))

    assert engine.uncached_decoder() is None
