"""However a run of tokens is cut into prompts and steps, and whatever the cache held before."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.model.network.whisper import Whisper
from whisperport.program.masks import MASKED
from whisperport.program.runner import Binding
from whisperport.program.signatures import CacheForm, KvLayout
from whisperport.runtime import Cache, Decoder

from ...extent import core_or_all
from ...micro import DIMS

# Sums of 16 float32 products in two orders, through two layers; logits reach 15.
ATOL = 1e-5 * 15

tokens = st.lists(st.integers(0, DIMS.n_vocab - 1), min_size=1, max_size=DIMS.n_text_ctx)


@given(tokens=tokens, data=st.data())
@settings(max_examples=core_or_all(25, 60))
def test_any_cut_into_prompts_and_steps_gives_the_logits_of_one_pass(
    micro: Whisper, micro_decoder: Any, audio: Any, tokens: list[int], data: st.DataObject
) -> None:
    decoder = micro_decoder()
    features = audio(0)
    one_pass = micro.logits(
        torch.tensor(tokens), micro.cross_kv(torch.from_numpy(features)[None])
    ).numpy()

    decoder.start_window(features)
    done = 0
    while done < len(tokens):
        count = data.draw(st.integers(0, len(tokens) - done), label="rows of a prompt; 0: a step")
        if count:
            second_index = data.draw(st.integers(0, count - 1), label="also")
            last, second = decoder.prefill(tokens[done : done + count], second_index=second_index)
            np.testing.assert_allclose(second, one_pass[done + second_index], atol=ATOL)
        else:
            last, count = decoder.step(tokens[done]), 1
        done += count

        np.testing.assert_allclose(last, one_pass[done - 1], atol=ATOL)
    assert decoder.cache.length == len(tokens)


@given(tokens=tokens, before=tokens, size=st.floats(0, 100))
@settings(max_examples=core_or_all(10, 40))
def test_rows_beyond_its_length_do_not_matter(
    micro_decoder: Any, audio: Any, tokens: list[int], before: list[int], size: float
) -> None:
    """Rows of an earlier decoding, even a hundred times as large as any key: equal to the last bit."""
    fresh, used = micro_decoder(), micro_decoder()
    used.start_window(audio(1))
    used.prefill(before)
    for array in used.cache.arrays.values():
        array *= np.float32(size)

    for decoder in (fresh, used):
        decoder.start_window(audio(0))
    expected = fresh.prefill(tokens[:1])[0], *map(fresh.step, tokens[1:])
    actual = used.prefill(tokens[:1])[0], *map(used.step, tokens[1:])

    np.testing.assert_array_equal(actual, expected)


def layers(cache: Cache, start: str) -> list[np.ndarray]:
    return [array for name, array in cache.arrays.items() if name.startswith(start)]


def test_rows_of_a_prompts_padding_are_not_kept(micro_decoder: Any, audio: Any) -> None:
    decoder = micro_decoder(prefill_rows=(7,))
    decoder.start_window(audio(0))

    decoder.prefill([1, 2, 3])

    assert decoder.cache.length == 3
    assert all(not keys[:, :, 3:].any() for keys in layers(decoder.cache, "self_k"))
    assert all(not values[:, 3:].any() for values in layers(decoder.cache, "self_v"))
    assert all(keys[:, :, :3].all() for keys in layers(decoder.cache, "self_k"))


@pytest.mark.parametrize("new", [1, 2, 7])
@pytest.mark.parametrize("length", [0, 1, 20])
def test_a_new_row_sees_stored_rows_and_itself_and_new_rows_before_it(
    new: int, length: int
) -> None:
    cache = Cache(DIMS)
    cache.store(embed_tokens(length), length)

    mask = cache.mask(new)

    rows = DIMS.n_text_ctx
    assert mask.shape == (1, new, rows + new)
    assert set(np.unique(mask)) <= {0.0, MASKED}
    for i in range(new):
        seen = set(np.flatnonzero(mask[0, i] == 0))
        assert seen == {*range(length), *range(rows, rows + i + 1)}


def test_the_last_row_can_be_used_and_none_after_it(micro_decoder: Any, audio: Any) -> None:
    decoder = micro_decoder()
    decoder.start_window(audio(0))
    decoder.prefill(list(range(DIMS.n_text_ctx - 1)))
    decoder.step(5)

    for overfull in (lambda: decoder.step(5), lambda: decoder.prefill([5])):
        with pytest.raises(ValueError, match=r"25 tokens do not fit into a cache of 24"):
            overfull()

    assert decoder.cache.length == DIMS.n_text_ctx


def test_storing_more_rows_than_there_is_room_for_is_rejected() -> None:
    cache = Cache(DIMS)
    cache.store(embed_tokens(20), 20)

    with pytest.raises(ValueError, match="25 tokens do not fit into a cache of 24"):
        cache.store(embed_tokens(5), 5)

    assert cache.length == 20


def test_a_cleared_cache_is_as_a_new_one(micro_decoder: Any, audio: Any) -> None:
    decoder, fresh = micro_decoder(), micro_decoder()
    for e in (decoder, fresh):
        e.start_window(audio(0))
    decoder.prefill([1, 2, 3, 4, 5])

    decoder.cache.clear()

    np.testing.assert_array_equal(decoder.prefill([6, 7])[0], fresh.prefill([6, 7])[0])
    np.testing.assert_array_equal(decoder.step(8), fresh.step(8))


def test_a_copy_goes_its_own_way(micro_decoder: Callable[..., Decoder], audio: Any) -> None:
    decoder = micro_decoder()
    decoder.start_window(audio(0))
    decoder.prefill([1, 2, 3])
    copy = Cache(DIMS)

    copy.copy_of(decoder.cache)
    ahead = decoder.step(4, copy)
    decoder.step(9, copy)
    own = decoder.step(4)

    assert (decoder.cache.length, copy.length) == (4, 5)
    np.testing.assert_array_equal(ahead, own)


def test_logits_of_a_prompt_stay_as_they_are(micro_decoder: Any, audio: Any) -> None:
    """Even if the program writes those of the next prompt to the same array."""
    decoder, again = micro_decoder(), micro_decoder()
    for each in (decoder, again):
        each.start_window(audio(0))
    found = decoder.prefill([1, 2, 3], second_index=1)

    decoder.prefill([4, 5, 6])

    np.testing.assert_array_equal(found, again.prefill([1, 2, 3], second_index=1))


FORMS = [
    CacheForm(),
    CacheForm(self_k=KvLayout(1, "float16"), self_v=KvLayout(2, "float16"), mask="float16"),
]


@pytest.mark.parametrize("form", FORMS, ids=["usual", "turned float16"])
def test_rows_are_appended_along_the_axis_and_in_the_dtype_of_the_signature(
    form: CacheForm,
) -> None:
    heads, width, n = DIMS.n_text_head, DIMS.text_head_width, DIMS.n_text_ctx
    cache = Cache(DIMS, form)
    for start, count in ((0, 3), (3, 1)):
        new = embed_tokens(count + 2, form)  # two rows of padding
        for number, array in enumerate(new.values()):
            array *= 10 * start + number
        cache.store(new, count)

    assert cache.length == 4
    for name, array in cache.arrays.items():
        rows = form.self_k if "_k_" in name else form.self_v
        assert (array.shape, array.dtype) == (rows.shape(heads, width, n), rows.dtype)
        number = list(cache.arrays).index(name)
        by_row = array.swapaxes(0, rows.axis)
        assert (by_row[:3] == number).all()
        assert (by_row[3] == 30 + number).all()
        assert not by_row[4:].any()


@pytest.mark.parametrize("new", [1, 3])
def test_a_mask_has_the_dtype_and_the_value_of_the_signature(new: int) -> None:
    cache = Cache(DIMS, FORMS[1])
    cache.store(embed_tokens(2, FORMS[1]), 2)

    mask = cache.mask(new)

    assert mask.dtype == np.float16
    assert set(np.unique(mask)) == {0, MASKED}


def test_programs_that_read_a_cache_are_told_of_every_part_that_was_written() -> None:
    cache, other = Cache(DIMS), Cache(DIMS)
    other.store(embed_tokens(5), 5)
    recorder = RecordingBinding()
    cache.bindings[recorder.runner] = recorder

    cache.store(embed_tokens(3), 3)
    cache.store(embed_tokens(1), 1)
    cache.copy_of(other)

    for name, array in cache.arrays.items():
        parts = [part for named, part in recorder.parts if named == name]
        assert [array[part].size * DIMS.n_text_ctx // array.size for part in parts] == [3, 1, 5]
        assert all((array[part] == 1).all() for part in parts)


def test_a_copy_has_bindings_of_its_own() -> None:
    cache, recorder = Cache(DIMS), RecordingBinding()
    cache.bindings[recorder.runner] = recorder

    cache.copy().store(embed_tokens(1), 1)

    assert recorder.parts == []


def test_a_binding_copies_if_it_wants_to_be_told_of_changes(micro_decoder: Any) -> None:
    runner = micro_decoder().engine.align

    assert not Binding(runner).copies
    assert RecordingBinding().copies
    assert not Cache(DIMS).is_copied


class RecordingBinding(Binding):
    """A binding that records the changed parts."""

    def __init__(self) -> None:
        self.runner: Any = object()
        self.parts: list[Any] = []

    def changed(self, name: str, part: Any) -> None:
        self.parts.append((name, part))


def embed_tokens(count: int, form: CacheForm = FORMS[0]) -> dict[str, np.ndarray]:
    """New rows of ones, for each layer."""
    heads, width = DIMS.n_text_head, DIMS.text_head_width
    return {
        f"new_{kind}_{i}": np.ones(rows.shape(heads, width, count), rows.dtype)
        for kind, rows in (("k", form.self_k), ("v", form.self_v))
        for i in range(DIMS.n_text_layer)
    }
