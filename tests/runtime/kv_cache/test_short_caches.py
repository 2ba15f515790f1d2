"""Caches that begin short and grow decode as those with room for all tokens, singly and in batches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.runtime import Batch, Decoder, Engine, Step
from whisperport.runtime.engine.scores import Scores
from whisperport.runtime.kv_cache import cache
from whisperport.runtime.kv_cache.cache import room_for
from whisperport.targets import RunOptions, get_target

from ...extent import core_or_all
from ...micro import DIMS, GENERATION

ROWS = 2
# Sums of the same numbers in another order, through two layers and up to 24 tokens; logits reach 15.
ATOL = 1e-5 * 15
N = DIMS.n_text_ctx
tokens = st.integers(0, DIMS.n_vocab - 1)


@pytest.fixture(scope="module")
def engine(micro: Whisper, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The micro model on ONNX Runtime."""
    folder = tmp_path_factory.mktemp("lowered")
    target = get_target("onnxruntime")
    names = ["encoder", "cross_kv", "prefill_4", "step", "align", f"step_{ROWS}"]
    programs = list(whisper_programs(Parts(micro, [(0, 0)]), names))
    entries = target.lower(programs, folder)
    runners = target.load(folder, entries, RunOptions(threads=1))
    embedding = micro.decoder.token_embedding.weight.numpy()
    positions = micro.decoder.positional_embedding.numpy()
    return Engine(DIMS, GENERATION, runners, embedding, positions)


@pytest.fixture(autouse=True)
def _shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caches grow in the few positions of the micro model: 2, 4, 8, 16, 24."""
    monkeypatch.setattr(cache, "FEWEST_ROWS", 2)


def full(engine: Engine) -> Decoder:
    """Return a decoder whose cache has room for all tokens."""
    return Decoder(engine, cache.Cache(DIMS))


@pytest.mark.parametrize(
    ("count", "limit", "room"),
    [(0, 448, 64), (64, 448, 64), (65, 448, 128), (129, 448, 256), (257, 448, 448), (0, 24, 24)],
)
def test_the_room_doubles_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch, count: int, limit: int, room: int
) -> None:
    monkeypatch.setattr(cache, "FEWEST_ROWS", 64)

    assert room_for(count, limit) == room


@given(data=st.data())
@settings(max_examples=core_or_all(5, 100), deadline=None)
def test_any_prompts_and_steps_give_the_logits_of_a_full_cache(
    engine: Engine, audio: Callable[[int], np.ndarray], data: st.DataObject
) -> None:
    short, long = Decoder(engine), full(engine)
    assert engine.short_caches
    for _ in range(2):  # two windows
        seed = data.draw(st.integers(0, 2))
        for decoder in (short, long):
            decoder.start_window(audio(seed))
        assert short.cache.rows == 2
        while short.cache.length < N and data.draw(st.booleans()):
            piece = data.draw(st.lists(tokens, min_size=1, max_size=N - short.cache.length))
            for found, expected in zip(short.prefill(piece), long.prefill(piece), strict=True):
                np.testing.assert_allclose(found, expected, atol=ATOL)
            assert short.cache.rows == room_for(short.cache.length, N)
        copies = [decoder.cache.copy() for decoder in (short, long)]
        if short.cache.length < N:
            found, expected = (
                decoder.step(5, copy) for decoder, copy in zip((short, long), copies, strict=True)
            )
            np.testing.assert_allclose(found, expected, atol=ATOL)
            np.testing.assert_allclose(short.step(6), long.step(6), atol=ATOL)


def test_align_reads_all_tokens_with_a_short_cache(
    engine: Engine, audio: Callable[[int], np.ndarray]
) -> None:
    short, long, text = Decoder(engine), full(engine), list(range(1, 24))
    for decoder in (short, long):
        decoder.start_window(audio(0))

    for found, expected in zip(short.align(text), long.align(text), strict=True):
        np.testing.assert_allclose(found, expected, atol=ATOL)
    assert short.cache.rows == N


@given(data=st.data())
@settings(max_examples=core_or_all(8, 100), deadline=None)
def test_the_rows_of_a_batch_grow_and_shrink_together(
    engine: Engine, audio: Callable[[int], np.ndarray], data: st.DataObject
) -> None:
    batch = Batch(engine, fewest=1)
    decoders = [decoder for _ in range(ROWS) if (decoder := batch.decoder())]
    singles: list[Any] = [full(engine) for _ in range(ROWS)]

    def start(row: int) -> None:
        seed = data.draw(st.integers(0, 2))
        prompt = data.draw(st.lists(tokens, min_size=1, max_size=6))
        for decoder in (decoders[row], singles[row]):
            decoder.start_window(audio(seed))
        found, expected = (d.prefill(prompt)[0] for d in (decoders[row], singles[row]))
        np.testing.assert_allclose(found, expected, atol=ATOL)

    for row in range(ROWS):
        start(row)
    for _ in range(data.draw(st.integers(1, 40))):
        for row in range(ROWS):
            if singles[row].cache.length == N or data.draw(st.integers(0, 9)) == 0:
                start(row)
        chosen = {
            row: data.draw(tokens) for row in data.draw(st.sets(st.sampled_from(range(ROWS))))
        }
        found = batch.step_all(
            [(decoders[row], Step(token, decoders[row].cache)) for row, token in chosen.items()]
        )
        for (row, token), scores in zip(chosen.items(), found, strict=True):
            assert isinstance(scores, Scores)
            np.testing.assert_allclose(scores.logits, singles[row].step(token), atol=ATOL)
        longest = max(decoder.cache.length for decoder in decoders)
        assert {decoder.cache.rows for decoder in decoders} == {batch.arrays["mask"].shape[2] - 1}
        assert longest <= decoders[0].cache.rows


def test_a_full_row_of_a_batch_is_an_error_and_the_others_go_on(
    engine: Engine, audio: Callable[[int], np.ndarray]
) -> None:
    batch = Batch(engine, fewest=1)
    decoder = batch.decoder()
    assert decoder is not None
    decoder.start_window(audio(0))
    decoder.prefill([1] * N)

    with pytest.raises(ValueError, match="25 tokens do not fit into a cache of 24"):
        batch.step_all([(decoder, Step(5, decoder.cache))])

    assert decoder.cache.length == N
