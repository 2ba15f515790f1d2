"""However a run of tokens is cut into prompts and steps, whatever the cache held, and short caches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle
from whisperport.program.masks import MASKED
from whisperport.program.runner import Binding
from whisperport.program.signatures import CacheForm, KvLayout
from whisperport.runtime import (
    Batch,
    Cache,
    DecodeOptions,
    Decoder,
    Engine,
    Step,
    decode_together,
    decode_window,
    load_engine,
)
from whisperport.runtime.engine.scores import Scores
from whisperport.runtime.kv_cache import cache
from whisperport.runtime.kv_cache.cache import room_for
from whisperport.speech.audio import load_audio, log_mel
from whisperport.targets import RunOptions, get_target
from whisperport.verification.clips import shipped_audio

from ...edited_bundles import copy_of_shipped, rehash
from ...embedded import default_bundle
from ...extent import core_or_all
from ...micro import DIMS, GENERATION

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


# The programs of a bundle may hold caches in float16 and in either layout; the engine follows them.
#
# The shipped bundle's ONNX files are changed at their borders, where each cache is cast and transposed.
# What they compute stays what it was, but for the rounding of keys and values to 11 bits.

ONNX = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
DECODING = ("cross_kv", "prefill_4", "prefill_64", "step", "align", "step_8")
RUN = RunOptions(threads=1, trust=True)
HALF = CacheForm(*(KvLayout(axis, "float16") for axis in (2, 1, 2, 1)), mask="float16")
TURNED = CacheForm(*(KvLayout(axis) for axis in (1, 2, 1, 2)))
HALF_TURNED = CacheForm(*(KvLayout(axis, "float16") for axis in (1, 2, 1, 2)), mask="float16")


def in_form(name: str, form: CacheForm) -> tuple[str, bool] | None:
    """The dtype of a tensor in this form, and whether its last two axes change places; None: no cache."""
    if name == "mask":
        return form.mask, False
    rows = getattr(form, name.rpartition("_")[0].replace("new", "self"), None)
    if rows is None:
        return None
    usual = getattr(CacheForm(), name.rpartition("_")[0].replace("new", "self"))
    return rows.dtype, rows.axis != usual.axis


def change_file(path: Path, form: CacheForm) -> None:
    """Cast and transpose the caches of an ONNX file at its borders."""
    model = onnx.load(path, load_external_data=False)
    graph, before, after = model.graph, [], []
    for tensor, is_input in (
        *((t, True) for t in graph.input),
        *((t, False) for t in graph.output),
    ):
        found = in_form(tensor.name, form)
        if found is None:
            continue
        (dtype, turned), inner = found, f"{tensor.name}_inside"
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == tensor.name else name for name in names]
        perm = [0, 2, 1] if turned else [0, 1, 2]
        steps = [
            ("Transpose", {"perm": perm}),
            ("Cast", {"to": ONNX["float32" if is_input else dtype]}),
        ]
        names = [tensor.name, f"{tensor.name}_turned", inner][:: 1 if is_input else -1]
        (before if is_input else after).extend(
            helper.make_node(kind, [source], [result], **attributes)
            for (kind, attributes), source, result in zip(steps, names[:2], names[1:], strict=True)
        )
        sizes = [dim.dim_value for dim in tensor.type.tensor_type.shape.dim]
        kind = helper.make_tensor_type_proto(ONNX[dtype], [sizes[axis] for axis in perm])
        tensor.type.CopyFrom(kind)
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, path)


def change_manifest(document: dict[str, Any], form: CacheForm) -> None:
    for entry in document["programs"]:
        if entry["spec"]["name"] not in DECODING:
            continue
        for tensor in (*entry["spec"]["inputs"], *entry["spec"]["outputs"]):
            found = in_form(tensor["name"], form)
            if found:
                heads, *others = tensor["shape"]
                tensor["shape"] = [heads, *(others[::-1] if found[1] else others)]
                tensor["dtype"] = found[0]


@pytest.fixture(scope="module")
def shipped() -> Engine:
    return load_engine(Bundle.open(default_bundle(), check_hashes=False), RUN)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[CacheForm], Engine]:
    """`changed(form)`: the shipped bundle with caches in another form."""

    def make(form: CacheForm) -> Engine:
        folder = copy_of_shipped(tmp_path / "bundle")
        for name in DECODING:
            change_file(folder / "onnxruntime" / f"{name}.onnx", form)
        rehash(folder, lambda document: change_manifest(document, form))
        return load_engine(Bundle.open(folder), RUN)

    return make


@pytest.fixture(scope="module")
def features(shipped: Engine) -> np.ndarray:
    """The features of a shipped clip."""
    samples, dims = load_audio(shipped_audio()[1].path), shipped.dims
    return shipped.encode(log_mel(samples, dims.n_mels, n_frames=dims.n_frames))


@pytest.mark.parametrize(
    ("form", "tolerance"),
    # Keys and values of 11 bits: 2 to the power of -11, through 2 layers; logits reach 30.
    [(HALF, 30 * 2**-10), (TURNED, 1e-4), (HALF_TURNED, 30 * 2**-10)],
    ids=["float16", "turned", "turned float16"],
)
def test_a_bundle_with_caches_in_another_form_decodes_the_same_tokens(
    shipped: Engine,
    changed: Callable[[CacheForm], Engine],
    features: np.ndarray,
    form: CacheForm,
    tolerance: float,
) -> None:
    engine = changed(form)
    assert (shipped.cache_form, engine.cache_form) == (CacheForm(), form)
    greedy = DecodeOptions(language="en", prompt=tuple(range(400, 420)))
    beams = DecodeOptions(language="en", beam_size=2)
    decoders = Decoder(shipped), Decoder(engine)

    for options in (greedy, beams):
        expected, found = (decode_window(decoder, features, options) for decoder in decoders)
        assert len(expected.tokens) > 5
        assert found.tokens == expected.tokens
        for together in decode_together(engine, [features] * 3, [options] * 3):
            assert together.tokens == expected.tokens

    scores, rows = decoders[0].align(expected.tokens)
    found_scores, found_rows = decoders[1].align(expected.tokens)
    np.testing.assert_allclose(found_rows, rows, atol=tolerance)
    np.testing.assert_allclose(found_scores, scores, atol=tolerance)
    last = [decoder.step(expected.tokens[-1]) for decoder in decoders]
    np.testing.assert_allclose(last[1], last[0], atol=tolerance)


# Caches that begin short and grow decode as those with room for all tokens, singly and in batches.

ROWS = 2
N = DIMS.n_text_ctx
any_token = st.integers(0, DIMS.n_vocab - 1)


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
            piece = data.draw(st.lists(any_token, min_size=1, max_size=N - short.cache.length))
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
        prompt = data.draw(st.lists(any_token, min_size=1, max_size=6))
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
            row: data.draw(any_token) for row in data.draw(st.sets(st.sampled_from(range(ROWS))))
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
