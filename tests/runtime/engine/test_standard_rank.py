"""Programs of other variants run through the same engine, and their arrays are not copied."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from whisperport.errors import BundleError
from whisperport.model.network.whisper import Whisper
from whisperport.program.runner import Array, Binding
from whisperport.runtime import DecodeOptions, Decoder, decode_window
from whisperport.runtime.engine.engine import in_standard_form

from ...micro import DIMS
from ..traced_runners import TorchRunner, engine_of

RANK4 = {"cross_kv": "rank4", "prefill_4": "rank4", "step": "rank4"}


@pytest.mark.parametrize(
    "variants",
    [RANK4, {"cross_kv": "rank4"}, {"step": "rank4"}, {"prefill_4": "rank4"}],
    ids=["all", "cross_kv", "step", "prefill"],
)
def test_variants_may_be_mixed_and_decode_the_same_text(
    micro: Whisper, traced: Any, audio: Callable[[int], np.ndarray], variants: dict[str, str]
) -> None:
    decoders = [Decoder(engine_of(micro, traced(v))[0]) for v in ({}, variants)]
    greedy = DecodeOptions(language="en", prompt=(1, 2, 3, 4, 5), max_tokens=6)
    beams = DecodeOptions(language="de", beam_size=2, max_tokens=5)

    for options in (greedy, beams) if variants == RANK4 else (greedy,):
        expected, found = (decode_window(decoder, audio(0), options) for decoder in decoders)

        assert len(expected.tokens) > 3
        assert found.tokens == expected.tokens
    tokens = [50, 51, 53, 1, 2]
    for one, wanted in zip(*(decoder.align(tokens) for decoder in decoders), strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-4)  # logits reach 15
    steps = [decoder.step(9) for decoder in decoders]
    np.testing.assert_allclose(steps[1], steps[0], atol=1e-4)


def test_a_binding_of_a_program_in_another_form_copies_if_the_program_does(
    micro: Whisper, traced: Any
) -> None:
    engine, runners = engine_of(micro, traced(RANK4))

    assert engine.step.binding().copies
    runners["step"].binding = partial(Binding, runners["step"])
    assert not engine.step.binding().copies


def test_the_cache_is_bound_as_a_view_and_every_change_is_told_with_its_place(
    micro: Whisper, traced: Any, audio: Callable[[int], np.ndarray]
) -> None:
    engine, runners = engine_of(micro, traced(RANK4))
    decoder: Decoder = Decoder(engine)
    decoder.start_window(audio(0))

    decoder.prefill([50, 51, 53])
    decoder.step(1)
    decoder.step(2)

    (binding,) = runners["step"].bindings
    heads, width, n = DIMS.n_text_head, DIMS.text_head_width, DIMS.n_text_ctx
    for name, array in decoder.cache.arrays.items():
        assert binding.bound[name].shape[0] == 1
        assert binding.bound[name].shape[1:] == array.shape
        assert np.shares_memory(binding.bound[name], array)
        # bound at the first step, so the prefill's rows are not told, and two rows are
        told = [part for named, part in binding.parts if named == name]
        assert [binding.bound[name][part].size for part in told] == [heads * width] * 2
        for index, part in enumerate(told, start=3):
            axis = 2 if "_k_" in name else 1
            expected = array.take([index], axis=axis)
            np.testing.assert_array_equal(binding.bound[name][part][0], expected)
    stored = [array for name, array in decoder.cache.arrays.items() if "_k_" in name]
    assert all(keys[:, :, 3:5].all() and not keys[:, :, 5:].any() for keys in stored)
    assert n == decoder.cache.rows


def test_a_runner_of_the_usual_form_is_used_as_it_is(micro: Whisper, traced: Any) -> None:
    _, runners = engine_of(micro, traced({}))

    for runner in runners.values():
        assert in_standard_form(runner) is runner


def test_a_program_that_returns_another_shape_than_it_states_is_named(
    micro: Whisper, traced: Any
) -> None:
    class Liar(TorchRunner):
        def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
            return [array[0] for array in super()._run(inputs)]

    runner = in_standard_form(Liar(traced(RANK4)["cross_kv"]))

    with pytest.raises(BundleError, match=r"'cross_kv' returned 'cross_k_0' as \(2, 8, 10\)"):
        runner.run({"features": np.zeros((1, 10, 16), np.float32)})
