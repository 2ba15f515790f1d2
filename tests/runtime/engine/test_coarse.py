"""The vocabulary projection of 8 bits chooses the tokens of float32, and tells when it cannot."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.placing import place_programs
from whisperport.errors import LoweringError, NumericalError, UsageError
from whisperport.model.network.coarse_projection import CoarseProjection as Module
from whisperport.model.network.coarse_projection import block_of
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.onnx import SharedWeights, write_onnx
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import COARSE_PROJECTION, VOCAB_PROJECTION
from whisperport.program.runner import Array, Runner
from whisperport.program.signatures import expected_signature
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import DecodeOptions, Decoder, decode_together, decode_window, load_engine
from whisperport.runtime.engine.coarse import TOLERANCE, CoarseLogits, CoarseProjection
from whisperport.runtime.engine.scores import log_sum_exp
from whisperport.targets import RunOptions, get_target
from whisperport.verification.batch_check import bound_check
from whisperport.verification.reference import Reference, reference_mel

from ...extent import EVERYTHING, core_or_all
from ...micro import DIMS
from ..runners import engine_of

WIDTH = 64


class ModuleRunner(Runner):
    """Runs the module, with an error added to its logits: `noise` times the bound."""

    def __init__(self, table: torch.Tensor, noise: float = 0.0) -> None:
        shape = (1, 1, len(table))
        outputs = tuple(TensorSpec(name, shape) for name in ("logits", "bound"))
        hidden = TensorSpec("hidden", (1, 1, table.shape[1]))
        super().__init__(ProgramSpec(COARSE_PROJECTION, (hidden,), outputs))
        decoder: Any = torch.nn.Module()
        decoder.token_embedding = torch.nn.Embedding.from_pretrained(table)
        self.module, self.noise, self.calls = Module(decoder), noise, 0

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self.calls += 1
        logits, bound = (one.numpy() for one in self.module(torch.from_numpy(inputs[0])))
        return [logits + self.noise * bound, bound]


def projection(table: torch.Tensor, noise: float = 0.0) -> CoarseProjection:
    rows = table.numpy()
    return CoarseProjection(ModuleRunner(table, noise), rows, lambda hidden: hidden @ rows.T)


def tables(seed: int, spread: float, tokens: int = 3000) -> torch.Tensor:
    """A token embedding whose rows have very different lengths, and some outlying channels."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(tokens, WIDTH, generator=random)
    table *= torch.exp(spread * torch.randn(tokens, 1, generator=random))
    table[:, :2] *= 8
    return table


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.5]),
    scale=st.sampled_from([0.01, 0.3, 1.0, 10.0]),
    suppressed=st.sampled_from([0, 1, 20, 500, 2990]),
)
def test_a_decided_token_is_that_of_float32(
    seed: int, spread: float, scale: float, suppressed: int
) -> None:
    table = tables(seed, spread)
    random = np.random.default_rng(seed)
    hidden = (scale * random.standard_normal(WIDTH)).astype(np.float32)
    hidden[random.integers(WIDTH)] *= 20
    right = table.numpy() @ hidden
    best_first = np.argsort(-right)

    # when: the most probable tokens may not follow
    found = projection(table)(hidden)
    found.logits[best_first[:suppressed]] = right[best_first[:suppressed]] = -np.inf

    if found.decides(math.inf):
        token = int(found.logits.argmax())
        assert token == int(right.argmax())
        logprob = found.logits[token] - log_sum_exp(found.logits)
        assert abs(logprob - (right[token] - log_sum_exp(right))) <= TOLERANCE
    np.testing.assert_array_equal(found.complete(), table.numpy() @ hidden)


def test_confident_tokens_are_decided() -> None:
    table = torch.randn(3000, WIDTH, generator=torch.Generator().manual_seed(0))
    hidden = table[7].numpy()

    found = projection(table)(hidden)

    assert found.logits.argmax() == 7
    assert found.decides(math.inf)
    assert not found.decides(TOLERANCE)  # the rules compared probabilities that are nearly equal
    found.logits[7] = -np.inf
    found.logits[found.logits > found.floor] = -np.inf
    assert not found.decides(math.inf)


@pytest.mark.parametrize(
    "table",
    [
        torch.zeros(200, WIDTH),
        torch.ones(200, WIDTH),
        1e-30 * torch.randn(200, WIDTH),
        1e18 * torch.randn(200, WIDTH),
        torch.cat([1e4 * torch.randn(200, 1), torch.randn(200, WIDTH - 1)], dim=1),
    ],
    ids=["zeros", "equal", "tiny", "huge", "one large channel"],
)
def test_no_error_is_above_its_bound(table: torch.Tensor) -> None:
    coarse = projection(table)
    for seed in range(20):
        hidden = np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)
        logits, bound = coarse.bounded(hidden)

        error = np.abs(logits - table.numpy().astype(np.float64) @ hidden)

        assert (error <= bound).all()


def test_a_runtime_that_is_less_precise_than_the_bound_is_not_believed() -> None:
    table = tables(3, 0.0)
    hidden = table[9].numpy()

    found = projection(table, noise=1.5)(hidden)

    assert found.floor == -math.inf
    np.testing.assert_array_equal(found.logits, table.numpy() @ hidden)


def test_more_likely_tokens_than_are_worth_it_are_all_computed_in_float32() -> None:
    table = torch.ones(5000, WIDTH)
    hidden = np.ones(WIDTH, np.float32)

    found = projection(table)(hidden)

    assert found.floor == -math.inf
    np.testing.assert_array_equal(found.logits, table.numpy() @ hidden)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("output", ["logits", "bound"])
def test_a_logit_that_is_no_finite_number_is_an_error(
    output: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also -inf, which is never the largest of its block: the token would silently never be decoded."""
    table = tables(3, 0.0)
    coarse = projection(table)
    run = coarse._runner.run

    def changed(inputs: Any) -> Any:
        outputs = {name: array.copy() for name, array in run(inputs).items()}
        outputs[output][0, 0, 9] = value
        return outputs

    monkeypatch.setattr(coarse._runner, "run", changed)

    with pytest.raises(NumericalError, match=r"`coarse_projection` returned a NaN"):
        coarse(table[9].numpy())


@pytest.mark.parametrize(("width", "block"), [(384, 128), (512, 128), (80, 16), (1280, 128)])
def test_a_block_divides_the_width(width: int, block: int) -> None:
    assert block_of(width) == block


def test_a_width_that_has_no_block_is_an_error() -> None:
    with pytest.raises(LoweringError, match="multiple of 16"):
        block_of(100)


@pytest.fixture(scope="module")
def programs(micro: Whisper) -> dict[str, Program]:
    names = ("encoder", "cross_kv", "prefill_4", "step", "step_4", "align")
    parts = Parts(micro, [(0, 1), (1, 0)], projected=False)
    made = whisper_programs(parts, (*names, VOCAB_PROJECTION, COARSE_PROJECTION))
    return {program.spec.name: program for program in made}


@pytest.fixture
def engines(micro: Whisper, programs: dict[str, Program]) -> Any:
    """An engine without the coarse projection, one with it, and the runners of the latter."""
    exact = {name: one for name, one in programs.items() if name != COARSE_PROJECTION}
    return engine_of(micro, exact)[0], *engine_of(micro, programs)


OPTIONS = [
    DecodeOptions(language="en", max_tokens=10),
    DecodeOptions(language="en", max_tokens=10, without_timestamps=True),
    DecodeOptions(language="en", max_tokens=10, repetition_penalty=1.3, no_repeat_ngram_size=2),
    DecodeOptions(language="en", max_tokens=6, beam_size=3),
    DecodeOptions(language="en", max_tokens=6, temperature=0.7, best_of=2),
]


@pytest.mark.parametrize("options", OPTIONS, ids=["times", "text", "guards", "beams", "samples"])
def test_the_text_is_that_of_float32(engines: Any, audio: Any, options: DecodeOptions) -> None:
    exact, coarse, _ = engines
    for seed in range(core_or_all(4, 8)):
        expected, found = (decode_window(Decoder(e), audio(seed), options) for e in (exact, coarse))

        assert found.tokens == expected.tokens
        assert found.avg_logprob == pytest.approx(expected.avg_logprob, abs=TOLERANCE)


def test_several_texts_together_are_those_of_float32(engines: Any, audio: Any) -> None:
    exact, coarse, _ = engines
    features, options = [audio(seed) for seed in range(6)], [OPTIONS[0]] * 6

    expected, found = (decode_together(e, features, options) for e in (exact, coarse))

    assert [one.tokens for one in found] == [one.tokens for one in expected]


@pytest.mark.parametrize(("options", "uses"), [(OPTIONS[0], True), (OPTIONS[3], False)])
def test_only_greedy_steps_use_it(
    engines: Any, audio: Any, options: DecodeOptions, uses: bool, monkeypatch: Any
) -> None:
    _, coarse, runners = engines
    calls: list[int] = []
    run = runners[COARSE_PROJECTION]._run
    monkeypatch.setattr(
        runners[COARSE_PROJECTION], "_run", lambda inputs: (calls.append(1), run(inputs))[1]
    )

    decoded = decode_window(Decoder(coarse), audio(0), options)

    assert len(decoded.tokens) > 2
    assert bool(calls) == uses


@pytest.mark.parametrize("width", [16, 384])
def test_onnx_runtime_keeps_the_bound(width: int, tmp_path: Any) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from whisperport.model.trace.program import trace

    torch.manual_seed(0)
    table = 0.05 * torch.randn(1000, width)
    runner = ModuleRunner(table)
    program = trace("coarse", runner.module, (torch.zeros(1, 1, width),), ["logits", "bound"])
    write_onnx(program, tmp_path / "coarse.onnx", SharedWeights(tmp_path / "weights.bin"))
    session = onnxruntime.InferenceSession(tmp_path / "coarse.onnx")
    assert (tmp_path / "weights.bin").stat().st_size < 2 * table.numel() + 100_000

    for seed in range(5):
        hidden = np.random.default_rng(seed).standard_normal((1, 1, width)).astype(np.float32)
        hidden[0, 0, seed] *= 50

        logits, bound = session.run(None, {"hidden": hidden})

        np.testing.assert_allclose(bound, runner.run({"hidden": hidden})["bound"], rtol=1e-5)
        error = np.abs(logits[0, 0] - table.numpy().astype(np.float64) @ hidden[0, 0])
        assert (error <= bound[0, 0]).all()
        assert error.max() > 0.05 * bound.max()  # the bound tells something


def test_its_signature_is_that_of_a_bundle(programs: dict[str, Program]) -> None:
    spec = programs[COARSE_PROJECTION].spec
    assert expected_signature(spec, DIMS, window=None, heads=2) == spec


def test_it_brings_the_projection_in_float32_with_it() -> None:
    options = ExportOptions(placement={COARSE_PROJECTION: "onnxruntime"})

    placed = place_programs("xnnpack", options)

    assert placed.placements[COARSE_PROJECTION].target == "onnxruntime"
    assert placed.placements[VOCAB_PROJECTION].target == "xnnpack"
    assert COARSE_PROJECTION not in place_programs("onnxruntime", ExportOptions()).placements


def test_a_target_without_the_operator_is_an_error() -> None:
    with pytest.raises(UsageError, match="`xnnpack` cannot run `coarse_projection`") as caught:
        place_programs("xnnpack", ExportOptions(placement={COARSE_PROJECTION: "xnnpack"}))
    assert "--placement coarse_projection=onnxruntime" in str(caught.value.hint)


def test_a_bound_that_does_not_hold_fails_the_verification() -> None:
    table = tables(5, 0.0)
    rows = table[:2].numpy()
    clip: Any = type("Clip", (), {"logits": rows @ table.numpy().T, "name": "a.wav"})

    passed = bound_check(projection(table), rows, clip)
    failed = bound_check(projection(table, noise=3), rows, clip)

    assert passed.passed
    assert 0 < passed.value["part_of_bound"] <= 1
    assert not failed.passed
    assert "times its bound" in failed.reason


@pytest.mark.skipif(not EVERYTHING, reason="an export takes 10 s of CPU time; make test-all")
def test_an_exported_bundle_decodes_with_it(micro_checkpoint: Any, tmp_path: Any) -> None:
    options = ExportOptions(placement={COARSE_PROJECTION: "onnxruntime"}, run=RunOptions(threads=1))

    bundle = export(micro_checkpoint, "onnxruntime", tmp_path / "micro", options)

    checks = bundle.manifest.verification["checks"]
    assert [c for c in checks if c["program"] == COARSE_PROJECTION and c["passed"]]
    assert bundle.manifest.is_verified(COARSE_PROJECTION)
    assert load_engine(bundle, RunOptions(threads=1)).coarse is not None


@pytest.mark.skipif(not EVERYTHING, reason="an export takes a minute; runs in make test-all")
def test_the_embedded_model_says_the_same_and_seldom_needs_float32(
    exported: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunOptions(threads=1)
    bundle = exported("onnxruntime", "default", placement={COARSE_PROJECTION: "onnxruntime"})
    whole = exported("onnxruntime", "default")
    decided: list[bool] = []
    decides = CoarseLogits.decides
    monkeypatch.setattr(
        CoarseLogits,
        "decides",
        lambda self, margin: (decided.append(decides(self, margin)), decided[-1])[1],
    )

    reference = Reference.from_arrays(bundle.reference())
    mels = [reference_mel(bundle.manifest.dims, clip) for clip in reference.clips]
    texts = [
        [
            decode_window(d, d.engine.encode(mel), DecodeOptions(language="en")).tokens
            for mel in mels
        ]
        for d in (Decoder(load_engine(b, run)) for b in (whole, bundle))
    ]

    assert texts[0] == texts[1]
    assert len(decided) > 50
    assert sum(decided) > 0.95 * len(decided)


def test_the_bounds_are_in_float32_also_where_the_weights_of_other_programs_have_8_bits(
    tmp_path: Path,
) -> None:
    width = 1024  # of large models: 2 x 8 limits per token are summed
    table = torch.randn(300, width, generator=torch.Generator().manual_seed(0))
    decoder: Any = torch.nn.Module()
    decoder.token_embedding = torch.nn.Embedding.from_pretrained(table)
    hidden = torch.randn(1, 1, width)
    program = trace(COARSE_PROJECTION, Module(decoder), (hidden,), ["logits", "bound"])
    target = get_target("onnxruntime").with_precisions({COARSE_PROJECTION: "w8"})

    (entry,) = target.lower([program], tmp_path)

    runner = target.load(tmp_path, [entry], RunOptions(threads=1))[COARSE_PROJECTION]
    expected = Module(decoder)(hidden)[1].numpy()
    found = runner.run({"hidden": hidden.numpy()})["bound"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # sums of 16 products in float32
