"""Texts decoded together give what each gives alone: tokens, probabilities and errors."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Barrier, Event, current_thread
from typing import Any

import numpy as np
import pytest

from whisperport.errors import NumericalError, UsageError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.runner import Binding
from whisperport.runtime import (
    Batch,
    BatchExecutor,
    Decoded,
    DecodeOptions,
    Decoder,
    Engine,
    Steps,
    Thresholds,
    complete,
    decode_window,
    decoding,
    decoding_with_fallback,
)
from whisperport.runtime.kv_cache.stepping import Step

from ...extent import core_or_all
from ...micro import DIMS, GENERATION
from ..runners import engine_of

ROWS = 4
GREEDY = DecodeOptions(language="en", max_tokens=9)
# Sums of 16 products in another order, through two layers and up to 9 tokens.
ATOL = 1e-5


@pytest.fixture(scope="module")
def programs(micro: Whisper, traced: Any) -> dict[str, Program]:
    (batch,) = whisper_programs(Parts(micro, [(0, 0)]), [f"step_{ROWS}"])
    return {**traced({}), batch.name: batch}


@pytest.fixture
def engine(micro: Whisper, programs: dict[str, Program]) -> Engine:
    return engine_of(micro, programs)[0]


def texts(count: int, options: DecodeOptions = GREEDY) -> list[DecodeOptions]:
    """Options of several texts: each has a prompt of another length, so that no two are at one position."""
    return [
        replace(
            options, prompt=tuple(range(1, 1 + i)), max_tokens=(options.max_tokens or 0) - i % 3
        )
        for i in range(count)
    ]


def submitted(
    executor: BatchExecutor, features: Sequence[np.ndarray], options: Sequence[DecodeOptions]
) -> list[Any]:
    """The futures of the decoding of each window."""
    pairs = zip(features, options, strict=True)
    return [executor.submit(lambda d, f=f, o=o: decoding(d, f, o)) for f, o in pairs]


def submitted_together(
    executor: BatchExecutor, features: Sequence[np.ndarray], options: Sequence[DecodeOptions]
) -> list[Any]:
    """The same; none begins before all are submitted."""
    all_submitted = Event()

    def waiting(decoder: Decoder) -> Steps[None]:
        all_submitted.wait(60)
        yield from ()

    executor.submit(waiting)
    futures = submitted(executor, features, options)
    all_submitted.set()
    return futures


def decoded_together(
    engine: Engine,
    features: Sequence[np.ndarray],
    options: Sequence[DecodeOptions],
    limit: int = ROWS,
) -> list[Decoded]:
    executor = BatchExecutor(engine, limit)
    futures = submitted(executor, features, options)
    try:
        return [future.result(60) for future in futures]
    finally:
        executor.shutdown()


def check_equal(found: Sequence[Decoded], expected: Sequence[Decoded]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.ended == other.ended
        assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=ATOL)
        assert one.no_speech_prob == pytest.approx(other.no_speech_prob, abs=ATOL)


@pytest.mark.parametrize("limit", core_or_all([3], [1, 3, ROWS]))
@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        replace(GREEDY, beam_size=2),
        replace(GREEDY, beam_size=5, patience=2.0),
        replace(GREEDY, temperature=0.7, best_of=3),
        replace(GREEDY, without_timestamps=True, repetition_penalty=1.5),
    ],
    ids=["greedy", "2 beams", "more beams than rows", "samples", "no timestamps"],
)
def test_texts_decoded_together_are_those_decoded_alone(
    engine: Engine, audio: Callable[[int], np.ndarray], options: DecodeOptions, limit: int
) -> None:
    """Ten texts of different lengths: rows are left at different times, and taken by later texts."""
    features, chosen = [audio(seed) for seed in range(10)], texts(10, options)
    alone = [decode_window(Decoder(engine), f, o) for f, o in zip(features, chosen, strict=True)]
    assert len({len(one.tokens) for one in alone}) > 1

    together = decoded_together(engine, features, chosen, limit)

    check_equal(together, alone)


def test_each_text_falls_back_to_its_own_temperature(
    engine: Engine, audio: Callable[[int], np.ndarray]
) -> None:
    features, temperatures = [audio(seed) for seed in range(8)], (0.0, 0.4, 0.8)
    options = replace(GREEDY, beam_size=2, best_of=3)
    at_0 = replace(options, best_of=None)
    usual = sorted(decode_window(Decoder(engine), f, at_0).avg_logprob for f in features)
    between = (usual[3] + usual[4]) / 2  # rounding errors must not decide
    fails = Thresholds(
        compression_ratio_threshold=None, logprob_threshold=between, no_speech_threshold=None
    )
    how = options, temperatures, fails, str
    decoders = [(Decoder(engine), each) for each in features]
    alone = [complete(one, decoding_with_fallback(one, each, *how)) for one, each in decoders]
    assert len({decoded.temperature for decoded, _ in alone}) > 1

    executor = BatchExecutor(engine, 3)
    futures = [
        executor.submit(lambda d, f=f: decoding_with_fallback(d, f, *how))  # type: ignore[misc]
        for f in features
    ]
    together = [future.result(60) for future in futures]
    executor.shutdown()

    assert [decoded.temperature for decoded, _ in together] == [d.temperature for d, _ in alone]
    check_equal([decoded for decoded, _ in together], [decoded for decoded, _ in alone])


def test_one_run_of_the_program_decodes_a_token_of_every_row(
    micro: Whisper, programs: dict[str, Program], audio: Callable[[int], np.ndarray]
) -> None:
    engine, runners = engine_of(micro, programs)
    counts = dict.fromkeys(("prefill_4", "step", f"step_{ROWS}"), 0)
    for name in counts:
        inner = runners[name].call

        def counted(*inputs: Any, name: str = name, inner: Any = inner) -> Any:
            counts[name] += 1
            return inner(*inputs)

        runners[name].call = counted
    features = [audio(seed) for seed in range(ROWS)]
    options = replace(GREEDY, without_timestamps=True, max_tokens=6, suppress_tokens=(-1, 49))

    executor = BatchExecutor(engine, ROWS)
    futures = submitted_together(executor, features, [options] * ROWS)
    found = [future.result(60) for future in futures]
    executor.shutdown()

    assert [len(one.tokens) for one in found] == [6] * ROWS
    # The prompt has 4 tokens, and the first token follows from it.
    assert counts == {"prefill_4": 0, "step": 0, f"step_{ROWS}": 4 + 5}


def test_each_thread_has_a_batch_of_its_own(
    engine: Engine, audio: Callable[[int], np.ndarray]
) -> None:
    """Two decodings that wait for each other run on two threads; then both threads decode texts."""
    executor, meeting = BatchExecutor(engine, 3, threads=2), Barrier(2)

    def met(decoder: Decoder) -> Steps[str]:
        meeting.wait(60)
        yield from ()
        return current_thread().name

    names = {future.result(60) for future in [executor.submit(met), executor.submit(met)]}
    features, options = [audio(seed) for seed in range(10)], texts(10)
    futures = submitted(executor, features, options)
    found = [future.result(60) for future in futures]
    executor.shutdown()

    assert len(names) == 2
    alone = [decode_window(Decoder(engine), f, o) for f, o in zip(features, options, strict=True)]
    check_equal(found, alone)


def test_the_memory_of_a_batch_is_free_when_its_decoders_are_gone(engine: Engine) -> None:
    """Without a garbage collection, which a transcription does not cause."""
    batch = Batch(engine)
    decoders = [batch.decoder() for _ in range(ROWS)]
    seen = weakref.ref(batch)
    gc.disable()
    try:
        del batch, decoders
        assert seen() is None
    finally:
        gc.enable()


def test_a_prompt_longer_than_four_tokens_is_not_decoded_by_steps(
    micro: Whisper, programs: dict[str, Program], audio: Callable[[int], np.ndarray]
) -> None:
    engine, runners = engine_of(micro, programs)
    counts = {f"step_{ROWS}": 0}
    inner = runners[f"step_{ROWS}"].call

    def counted(*inputs: Any) -> Any:
        counts[f"step_{ROWS}"] += 1
        return inner(*inputs)

    runners[f"step_{ROWS}"].call = counted
    options = replace(GREEDY, prompt=(1, 2), max_tokens=2, suppress_tokens=(-1, 49))

    decoded_together(engine, [audio(seed) for seed in range(ROWS)], [options] * ROWS)

    assert counts == {f"step_{ROWS}": 1}


def test_a_single_row_is_decoded_by_the_step_itself(
    micro: Whisper, programs: dict[str, Program], audio: Callable[[int], np.ndarray]
) -> None:
    engine, runners = engine_of(micro, programs)
    runners[f"step_{ROWS}"].call = None  # calling it fails

    (found,) = decoded_together(engine, [audio(0)], [GREEDY])

    check_equal([found], [decode_window(Decoder(engine), audio(0), GREEDY)])


@pytest.mark.parametrize("beams", core_or_all([6], [2, 3, 6]))
def test_beams_of_one_window_are_rows_of_a_batch(
    micro: Whisper, programs: dict[str, Program], audio: Callable[[int], np.ndarray], beams: int
) -> None:
    """With more beams than rows, the last ones have caches of their own."""
    engine, runners = engine_of(micro, programs)
    options = replace(GREEDY, beam_size=beams)
    alone = [decode_window(Decoder(engine), audio(seed), options) for seed in range(3)]
    batch = Batch(engine)
    decoder = batch.decoder()
    assert decoder is not None

    together = [decode_window(decoder, audio(seed), options) for seed in range(3)]

    check_equal(together, alone)
    assert batch.binding is runners[f"step_{ROWS}"].bindings[-1]
    assert {name for name, _ in runners[f"step_{ROWS}"].bindings[-1].parts} == {
        name for name in batch.arrays if name != "mask"
    }
    assert sum(1 for _ in iter(batch.take, None)) == ROWS - 1  # every other row is free again


@pytest.mark.parametrize("others_copy", [True, False])
def test_the_program_is_told_of_every_change_of_its_arrays(
    micro: Whisper,
    programs: dict[str, Program],
    audio: Callable[[int], np.ndarray],
    others_copy: bool,
) -> None:
    """A copy that is updated with the reported parts only is always equal: a device keeps such a copy."""
    engine, runners = engine_of(micro, programs)
    if not others_copy:
        for name in runners.keys() - {f"step_{ROWS}"}:
            runners[name].binding = partial(Binding, runners[name])
    batch = Batch(engine)
    binding = runners[f"step_{ROWS}"].bindings[-1]
    copies = {name: array.copy() for name, array in binding.bound.items()}
    decoders = [batch.decoder() for _ in range(3)]
    for seed, decoder in enumerate(decoders):
        assert decoder is not None
        decode_window(decoder, audio(seed), replace(GREEDY, beam_size=2))

    for name, part in binding.parts:
        copies[name][part] = binding.bound[name][part]

    for name, array in binding.bound.items():
        np.testing.assert_array_equal(copies[name], array)
        assert array.any()


def test_a_row_that_is_released_is_as_a_new_one(
    engine: Engine, audio: Callable[[int], np.ndarray]
) -> None:
    batch = Batch(engine)
    row = batch.take()
    assert row is not None
    decoder = batch.decoder()
    assert decoder is not None
    decoder.start_window(audio(0))
    decoder.prefill([1, 2, 3])
    row.start_window(decoder.cache.audio)  # type: ignore[attr-defined]
    row.copy_of(decoder.cache)

    batch.release(row)

    again = batch.take()
    assert again is row
    assert row.length == 0
    assert (row.step_mask[..., : row.rows] < 0).all()
    assert not row.bindings


def test_a_nan_of_one_row_is_the_error_of_its_text_only(
    micro: Whisper, programs: dict[str, Program], audio: Callable[[int], np.ndarray]
) -> None:
    engine, runners = engine_of(micro, programs)
    inner = runners[f"step_{ROWS}"].call
    features = [audio(seed) for seed in range(ROWS)]
    options = texts(ROWS)
    expected = [
        decode_window(Decoder(engine), f, o) for f, o in zip(features, options, strict=True)
    ]

    def damaged(x: Any, mask: Any, *caches: Any) -> Any:
        logits, *rest = inner(x, mask, *caches)
        lengths = (mask[:, 0] == 0).sum(1)
        logits[lengths == lengths.max()] = float("nan")  # the text with the longest prompt
        return (logits, *rest)

    runners[f"step_{ROWS}"].call = damaged
    executor = BatchExecutor(engine, ROWS)
    futures = submitted_together(executor, features, options)
    executor.shutdown()

    with pytest.raises(NumericalError, match=f"step_{ROWS}"):
        futures[-1].result()
    check_equal([futures[0].result()], expected[:1])


def test_an_error_of_the_program_is_the_error_of_every_text_and_the_executor_goes_on(
    micro: Whisper, programs: dict[str, Program], audio: Callable[[int], np.ndarray]
) -> None:
    engine, runners = engine_of(micro, programs)
    inner = runners[f"step_{ROWS}"].call

    def broken(*_: Any) -> Any:
        runners[f"step_{ROWS}"].call = inner
        raise OSError("the device was unplugged")

    runners[f"step_{ROWS}"].call = broken
    executor = BatchExecutor(engine, ROWS)
    features = [audio(seed) for seed in range(2 * ROWS)]
    futures = submitted(executor, features, [GREEDY] * len(features))
    executor.shutdown()

    for future in futures[:ROWS]:
        with pytest.raises(OSError, match="unplugged"):
            future.result()
    expected = [decode_window(Decoder(engine), each, GREEDY) for each in features[ROWS:]]
    check_equal([future.result() for future in futures[ROWS:]], expected)


def test_an_error_before_the_first_step_is_the_result(engine: Engine) -> None:
    executor = BatchExecutor(engine, 1)

    def fails(_: Decoder) -> Any:
        raise UsageError("no such language")

    def result(_: Decoder) -> Steps[int]:
        return 3
        yield []

    with pytest.raises(UsageError, match="no such language"):
        executor.submit(fails).result(60)
    assert executor.submit(result).result(60) == 3
    executor.shutdown()


def test_a_shutdown_cancels_what_has_not_begun_and_waits_for_the_rest(engine: Engine) -> None:
    executor, begun, go = BatchExecutor(engine, 1), Event(), Event()

    def waits(number: int, _: Decoder) -> Steps[int]:
        begun.set()
        assert go.wait(60)
        return number
        yield []

    futures = [executor.submit(partial(waits, number)) for number in range(3)]
    assert begun.wait(60)
    go.set()
    executor.shutdown(cancel_futures=True)

    assert futures[0].result() == 0
    assert all(future.cancelled() or future.done() for future in futures[1:])


@pytest.mark.parametrize("limit", [0, ROWS + 1])
def test_more_decodings_than_rows_are_rejected(engine: Engine, limit: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to {ROWS}"):
        BatchExecutor(engine, limit)


def test_a_bundle_without_the_program_has_no_batch(micro: Whisper, traced: Any) -> None:
    engine = engine_of(micro, traced({}))[0]

    assert engine.batch_size == 1
    with pytest.raises(ValueError, match="step_B"):
        Batch(engine)


def test_an_error_of_a_step_is_raised_inside_the_decoding() -> None:
    class Broken:
        def step_all(self, steps: Sequence[Step]) -> Any:
            raise OSError("unplugged")

    def tries() -> Steps[str]:
        try:
            yield []
        except OSError as error:
            return f"decoded until {error}"
        return "all"

    assert complete(Broken(), tries()) == "decoded until unplugged"


def test_the_stronger_mask_of_step_and_batch_step_hides_tokens_from_both(
    micro: Whisper, programs: dict[str, Program]
) -> None:
    _, runners = engine_of(micro, programs)
    tables = (micro.decoder.token_embedding.weight, micro.decoder.positional_embedding)

    engine = Engine(
        DIMS,
        GENERATION,
        runners,
        *(table.numpy() for table in tables),
        masks={"step": -64.0, f"step_{ROWS}": -128.0},
    )

    row = Batch(engine).take()
    assert row is not None
    assert row.step_mask.min() == -128
