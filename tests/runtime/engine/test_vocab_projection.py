"""The vocabulary projection as a program of its own: the same logits, on a target of its own."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.placing import place_programs
from whisperport.errors import BundleError, NumericalError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import PIECES
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import VOCAB_PROJECTION
from whisperport.runtime import DecodeOptions, Decoder, decode_window, load_engine
from whisperport.runtime.engine.trial import limits_of, try_bundle
from whisperport.targets import RunOptions
from whisperport.verification.bundle_check import reference_mel
from whisperport.verification.recording import BundleSession
from whisperport.verification.reference import Reference

from ...extent import EVERYTHING
from ...micro import DIMS
from ..traced_runners import TorchRunner, engine_of

RANK4 = {"cross_kv": "rank4", "prefill_4": "rank4", "step": "rank4"}
ATOL = 1e-5 * 15  # sums of 16 products in another order; logits reach 15

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
    np.testing.assert_allclose(prompts[1], prompts[0], atol=ATOL)
    np.testing.assert_allclose(decoders[1].step(4), decoders[0].step(4), atol=ATOL)


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

    np.testing.assert_allclose(steps[1], steps[0], atol=ATOL)


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
