"""One window at a time over a bundle's runners, in every variant of its programs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.placing import place_programs
from whisperport.errors import BundleError, NumericalError
from whisperport.model.network.rank4 import UncachedDecoder as UncachedModule
from whisperport.model.network.whisper import Whisper, shortened
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import PIECES, program_names, untraced_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import UNCACHED_DECODER, VOCAB_PROJECTION
from whisperport.program.runner import Array, Binding, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec, UncachedForm
from whisperport.program.window import ShortWindows
from whisperport.runtime import DecodeOptions, Decoder, Engine, decode_window, load_engine
from whisperport.runtime.engine.engine import in_standard_form
from whisperport.runtime.engine.trial import limits_of, try_bundle
from whisperport.runtime.engine.uncached_decoder import UncachedDecoder
from whisperport.targets import RunOptions
from whisperport.verification.eager import EagerRunner
from whisperport.verification.recording import BundleSession
from whisperport.verification.reference import Reference, reference_mel

from ...extent import EVERYTHING
from ...micro import DIMS, GENERATION
from ..runners import TorchRunner, engine_of

# One window at a time over a bundle's runners.


def micro_engine_of(micro: Whisper, runners: dict[str, Any]) -> Engine:
    embedding = micro.decoder.token_embedding.weight.numpy()
    positions = micro.decoder.positional_embedding.numpy()
    return Engine(DIMS, GENERATION, runners, embedding, positions)


@pytest.mark.parametrize("program", ["encoder", "cross_kv", "step", "prefill_4", "align"])
def test_a_program_that_is_missing_is_named(
    micro: Whisper, eager_runners: Any, program: str
) -> None:
    runners = eager_runners(micro, (4,))
    del runners[program]

    with pytest.raises(BundleError, match=program.replace("_4", "_P")) as missing:
        micro_engine_of(micro, runners)

    assert all(name in missing.value.why for name in runners)


def test_programs_of_several_lengths_are_one_that_reads_each_length(micro: Whisper) -> None:
    parts = Parts(micro, [(0, 0)])
    names = [*program_names(), "encoder_4", "cross_kv_4"]
    engine = Engine(
        DIMS,
        GENERATION,
        {program.name: EagerRunner(program) for program in untraced_programs(parts, names)},
        *(
            table.numpy()
            for table in (micro.decoder.token_embedding.weight, micro.decoder.positional_embedding)
        ),
        short_windows=ShortWindows(positions=(4,), min_logprob=-1.0),
    )
    mel = np.random.default_rng(0).standard_normal((DIMS.n_mels, DIMS.n_frames), np.float32)
    expected = shortened(micro, 4).encode(torch.from_numpy(mel[None, :, :8])).numpy()

    features = engine.encode(mel[:, :8])
    decoder = Decoder(engine)
    for window in (engine.encode(mel), features):
        decoder.start_window(window)

    assert engine.short_windows is not None
    np.testing.assert_array_equal(features, expected[0])
    behind = np.concatenate([features, engine.silence[4:]])[None]
    for name, array in engine.cross_kv.run({"features": behind}).items():
        np.testing.assert_allclose(decoder._cross_kv[name], array, atol=1e-6)
    with pytest.raises(ValueError, match="'mel'"):
        engine.encode(mel[:, :6])


def test_a_prompt_runs_in_the_smallest_program_that_takes_it(
    micro: Whisper, eager_runners: Any, audio: Any
) -> None:
    runners, used = eager_runners(micro, (4, 7)), []
    for name, rows in (("step", 1), ("prefill_4", 4), ("prefill_7", 7)):
        run = runners[name]._run
        runners[name]._run = lambda x, run=run, rows=rows: used.append(rows) or run(x)
    decoder = Decoder(micro_engine_of(micro, runners))

    for count in (1, 4, 5, 7, 8, 12):
        decoder.start_window(audio(0))
        decoder.prefill([1] * count)

    assert used == [1, 4, 7, 7, 7, 1, 7, 7]


@pytest.mark.parametrize(("tokens", "second_index"), [([], 0), ([1, 2], 2), ([1, 2], -1)])
def test_a_row_that_is_not_in_the_prompt_is_rejected(
    micro_decoder: Any, audio: Any, tokens: list[int], second_index: int
) -> None:
    decoder = micro_decoder()
    decoder.start_window(audio(0))

    with pytest.raises(ValueError, match="`second_index`"):
        decoder.prefill(tokens, second_index=second_index)


def test_a_new_window_forgets_the_last_one(micro_decoder: Any, audio: Any) -> None:
    decoder, fresh = micro_decoder(), micro_decoder()
    decoder.start_window(audio(1))
    decoder.prefill([1, 2, 3])
    decoder.step(4)

    for e in (decoder, fresh):
        e.start_window(audio(2))

    np.testing.assert_array_equal(decoder.prefill([5, 6])[0], fresh.prefill([5, 6])[0])


def test_two_decoders_of_one_engine_do_not_share_a_cache(micro_decoder: Any, audio: Any) -> None:
    first, alone = micro_decoder(), micro_decoder()
    second = Decoder(first.engine)
    for decoder in (first, second, alone):
        decoder.start_window(audio(0))

    steps = []
    for token in range(6):
        first.step(token)
        steps.append((second.step(token + 1), alone.step(token + 1)))
        first.step(token)

    for interleaved, expected in steps:
        np.testing.assert_array_equal(interleaved, expected)


def test_a_table_in_float16_is_read_as_float32(micro: Whisper, eager_runners: Any) -> None:
    embedding = micro.decoder.token_embedding.weight.numpy().astype(np.float16)
    positions = micro.decoder.positional_embedding.numpy().astype(np.float16)
    halved = Decoder(Engine(DIMS, GENERATION, eager_runners(micro), embedding, positions))
    full = Decoder(
        Engine(
            DIMS, GENERATION, eager_runners(micro), embedding.astype("f4"), positions.astype("f4")
        )
    )
    features = np.zeros((DIMS.n_audio_ctx, DIMS.n_audio_state), np.float32)
    for decoder in (halved, full):
        decoder.start_window(features)

    np.testing.assert_array_equal(halved.step(7), full.step(7))


def test_a_spectrogram_of_another_size_is_rejected(micro_decoder: Any) -> None:
    with pytest.raises(ValueError, match=r"'mel' as \(1, 8, 20\) float32"):
        micro_decoder().engine.encode(np.zeros((8, 21), np.float32))


@pytest.mark.parametrize("count", [1, 5, 6, 13])
def test_aligned_rows_are_those_of_one_pass(
    micro: Whisper, micro_decoder: Any, audio: Any, count: int
) -> None:
    """In pieces of five rows, the last one padded."""
    decoder, tokens = micro_decoder(), list(range(count))
    features = torch.from_numpy(audio(0))[None]
    one_pass = micro.logits(torch.tensor(tokens), micro.cross_kv(features)).numpy()
    decoder.start_window(audio(0))
    decoder.prefill([9, 9, 9])  # forgotten

    scores, rows = decoder.align(tokens)

    assert scores.shape == (3, count, DIMS.n_audio_ctx)
    # Sums of 16 float32 products in two orders, through two layers; logits reach 15.
    np.testing.assert_allclose(decoder.engine.logits_of(rows), one_pass, atol=1e-5 * 15)


def test_alignment_scores_are_those_of_the_heads_asked_for(
    micro: Whisper, micro_decoder: Any, audio: Any
) -> None:
    decoder, tokens = micro_decoder(), [1, 2, 3, 4, 5, 6, 7]
    features = torch.from_numpy(audio(0))[None]
    seen: list[torch.Tensor] = []
    hooks = [
        block.cross_attn.query.register_forward_hook(lambda *call: seen.append(call[-1]))
        for block in micro.decoder.blocks
    ]
    micro.logits(torch.tensor(tokens), micro.cross_kv(features))
    for hook in hooks:
        hook.remove()

    decoder.start_window(audio(0))
    scores, _ = decoder.align(tokens)

    width = DIMS.text_head_width
    for of_head, (layer, head) in zip(scores, [(0, 1), (1, 0), (1, 1)], strict=True):
        cut = slice(head * width, (head + 1) * width)
        keys = micro.decoder.blocks[layer].cross_attn.key(features)[0, :, cut]
        expected = seen[layer][0, :, cut] @ keys.T / width**0.5
        np.testing.assert_allclose(of_head, expected, atol=1e-4)  # scores reach 10


def test_nothing_to_align_is_rejected(micro_decoder: Any, audio: Any) -> None:
    decoder = micro_decoder()
    decoder.start_window(audio(0))

    with pytest.raises(ValueError, match="no tokens"):
        decoder.align([])


# Programs of other variants run through the same engine, and their arrays are not copied.

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


# Decoding without a cache says what decoding with one says.

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


# The vocabulary projection as a program of its own: the same logits, on a target of its own.

LOGITS_ATOL = 1e-5 * 15  # sums of 16 products in another order; logits reach 15

Programs = dict[str, Program]


@pytest.fixture
def usual(traced: Any) -> Programs:
    programs: Programs = traced({})
    return programs


@pytest.fixture
def apart(traced: Any) -> Callable[[Mapping[str, str]], Programs]:
    """`apart(variants)`: the programs with the projection apart."""
    return lambda variants: traced(variants, projected=False)


@pytest.mark.parametrize(
    "variants",
    [{}, {VOCAB_PROJECTION: "pieces"}, RANK4],
    ids=["whole", "pieces", "rank4"],
)
def test_a_projection_of_its_own_decodes_the_same_text(
    micro: Whisper, usual: Programs, apart: Any, audio: Any, variants: dict[str, str]
) -> None:
    programs = apart(variants)
    decoders = [Decoder(engine_of(micro, p)[0]) for p in (usual, programs)]
    options = DecodeOptions(language="en", prompt=(1, 2, 3, 4, 5), max_tokens=6)
    first = len(programs[VOCAB_PROJECTION].spec.outputs)
    assert first == (PIECES if VOCAB_PROJECTION in variants else 1)

    expected, found = (decode_window(decoder, audio(0), options) for decoder in decoders)

    assert len(expected.tokens) > 3
    assert found.tokens == expected.tokens
    for decoder in decoders:
        decoder.start_window(audio(1))
    prompts = [decoder.prefill([50, 51, 53, 57, 3], second_index=1) for decoder in decoders]
    np.testing.assert_allclose(prompts[1], prompts[0], atol=LOGITS_ATOL)
    np.testing.assert_allclose(decoders[1].step(4), decoders[0].step(4), atol=LOGITS_ATOL)


def test_only_some_programs_may_return_hidden_states(
    micro: Whisper, usual: Programs, apart: Any, audio: Any
) -> None:
    # given: the prefill still returns logits, as after a step was compiled apart
    mixed = {**apart({}), "prefill_4": usual["prefill_4"]}
    decoders = [Decoder(engine_of(micro, p)[0]) for p in (usual, mixed)]

    for decoder in decoders:
        decoder.start_window(audio(0))
        decoder.prefill([50, 51])
    steps = [decoder.step(3) for decoder in decoders]

    np.testing.assert_allclose(steps[1], steps[0], atol=LOGITS_ATOL)


def test_the_programs_apart_hold_no_vocabulary(apart: Any) -> None:
    programs = apart({})

    for name in ("prefill_4", "step"):
        rows = {t.shape[0] for t in programs[name].exported.state_dict.values()}
        assert DIMS.n_vocab not in rows
        assert programs[name].spec.outputs[0].shape[-1] == DIMS.n_text_state


def test_hidden_states_without_the_program_that_reads_them_are_an_error(
    micro: Whisper, apart: Any
) -> None:
    programs = apart({})
    del programs[VOCAB_PROJECTION]

    with pytest.raises(BundleError, match="no program `vocab_projection`"):
        engine_of(micro, programs)


def test_an_engine_with_logits_does_not_project(micro: Whisper, usual: Programs) -> None:
    engine, _ = engine_of(micro, usual)

    assert not engine.projects
    with pytest.raises(ValueError, match="vocab_projection"):
        engine.project(np.zeros((1, 16), np.float32))


def test_a_nan_of_the_projection_names_it(
    micro: Whisper, apart: Any, audio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runners = engine_of(micro, apart({}))
    decoder = Decoder(engine)
    decoder.start_window(audio(0))
    damaged = np.full((1, 1, DIMS.n_vocab), np.nan, np.float32)
    projection: TorchRunner = runners[VOCAB_PROJECTION]
    monkeypatch.setattr(projection, "_run", lambda _: [damaged])

    with pytest.raises(NumericalError, match=r"`vocab_projection` returned a NaN") as caught:
        decoder.step(1)
    assert caught.value.program == VOCAB_PROJECTION


def test_the_projection_is_exported_if_it_is_placed_or_has_a_precision() -> None:
    placement = {VOCAB_PROJECTION: "xnnpack"}
    placed = place_programs("onnxruntime", ExportOptions(placement=placement))

    assert placed.placements[VOCAB_PROJECTION].target == "xnnpack"
    assert placed.placements["step"].target == "onnxruntime"
    assert VOCAB_PROJECTION not in place_programs("onnxruntime", ExportOptions()).placements
    own = ExportOptions(precisions={VOCAB_PROJECTION: "fp32"})
    assert place_programs("onnxruntime", own).placements[VOCAB_PROJECTION].target == "onnxruntime"


@pytest.mark.skipif(not EVERYTHING, reason="an export takes a minute; runs in make test-all")
def test_an_exported_projection_passes_every_stage_of_a_bundle(exported: Any) -> None:
    # given: an exported bundle is a verified one
    run = RunOptions(threads=1)
    bundle: Bundle = exported("onnxruntime", "default", placement={VOCAB_PROJECTION: "xnnpack"})
    whole: Bundle = exported("onnxruntime", "default")
    manifest = bundle.manifest

    compared = [c for c in manifest.verification["checks"] if c["program"] == VOCAB_PROJECTION]
    reference = Reference.from_arrays(bundle.reference())
    mels = [reference_mel(manifest.dims, clip) for clip in reference.clips[:2]]
    spec = manifest.program(VOCAB_PROJECTION).spec
    recorded = list(BundleSession(bundle, run).inputs(spec, mels))
    decoders = [Decoder(load_engine(b, run)) for b in (whole, bundle)]
    options = DecodeOptions(language="en")
    texts = [
        [decode_window(d, d.engine.encode(mel), options).tokens for mel in mels] for d in decoders
    ]
    try_bundle(bundle, run, limits_of(bundle))

    assert manifest.is_verified(VOCAB_PROJECTION)
    assert len(compared) == 2
    assert 2 <= len(recorded) <= 8
    assert {array.shape for (array,) in recorded} == {(1, 1, manifest.dims.n_text_state)}
    assert texts[0] == texts[1]
