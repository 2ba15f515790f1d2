"""The limits of a machine, the parts of a time, and what of `make bench-peers` needs no peer."""

import importlib
import math
import re
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import randn
from torch.utils._pytree import tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from whisperport.apps.bench import roofline, transcribing
from whisperport.apps.bench.acceptance import TOKENS
from whisperport.apps.bench.memory import peak_memory_mib
from whisperport.apps.bench.roofline import Limit, Rates, Work, limits_of, measure_rates, work_of
from whisperport.apps.bench.timed import Clock
from whisperport.apps.bench.transcribing import (
    UNCACHED_CALLS,
    BenchOptions,
    BenchResult,
    run_bench,
    time_uncached,
)
from whisperport.errors import UsageError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle
from whisperport.program.dims import Dims
from whisperport.program.program_kind import ALIGN, UNCACHED_DECODER
from whisperport.program.runner import Binding, Runner
from whisperport.program.spec import ProgramSpec, UncachedForm
from whisperport.runtime import DecodeOptions, Engine
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import whisper_text_errors
from whisperport.verification.clips import ShippedAudio, shipped_audio

from ...embedded import default_bundle
from ...micro import DIMS, GENERATION
from ...runtime.engine.test_engine import Eager as EagerUncached

# The work of programs is that of torch's own counter, and the limits are those of the machine's rates.

SIZES = replace(DIMS, n_audio_layer=3, n_audio_ffn=48, n_text_layer=2, n_text_ffn=96)
RATES = Rates(read_gb=10, gflop=100, gop_8_bits=400)


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    model = Whisper(SIZES).eval().requires_grad_(False)
    names = ("encoder", "cross_kv", "prefill_4", "step", "step_2", "align")
    found = whisper_programs(Parts(model, [(0, 0)]), names)
    return {one.name: one for one in found}


@pytest.mark.parametrize("name", ["encoder", "cross_kv", "prefill_4", "step", "step_2"])
def test_the_operations_are_those_that_torch_counts(
    programs: dict[str, Program], name: str
) -> None:
    program = programs[name]
    work = work_of(program.spec, "fp32", SIZES, tokens=SIZES.n_text_ctx)
    inputs = [randn(tensor.shape) for tensor in program.spec.inputs]
    arguments, _ = tree_unflatten(inputs, program.exported.call_spec.in_spec)

    with FlopCounterMode(display=False) as counter:
        program.exported.module()(*arguments)

    assert work is not None
    assert 1e9 * work.gflop == pytest.approx(counter.get_total_flops(), rel=0.02)
    in_8_bits = work_of(program.spec, "w8", SIZES, tokens=SIZES.n_text_ctx)
    assert in_8_bits is not None
    assert in_8_bits.gflop + in_8_bits.gop_8_bits == pytest.approx(work.gflop)
    assert in_8_bits.read_gb < work.read_gb


def test_a_step_reads_its_weights_and_its_keys_and_values(programs: dict[str, Program]) -> None:
    step = programs["step"]
    weights = step.exported.state_dict.items()
    used = [value for name, value in weights if not re.search(r"cross_attn\.(key|value)\.", name)]
    stored = sum(value.numel() for value in used if value.ndim > 1)
    cached = sum(
        math.prod(tensor.shape)
        for tensor in step.spec.inputs
        if tensor.name.startswith(("self", "cross"))
    )

    work = work_of(step.spec, "fp32", SIZES, tokens=SIZES.n_text_ctx)

    assert work is not None
    assert 1e9 * work.read_gb == pytest.approx(4 * (stored + cached), rel=0.02)


def test_a_program_whose_work_is_not_known_has_no_limit(programs: dict[str, Program]) -> None:
    assert work_of(programs["align"].spec, "fp32", SIZES) is None
    assert work_of(programs["step"].spec, "bf16", SIZES) is None  # how fast is not measured
    assert work_of(ProgramSpec("other", (), ()), "fp32", SIZES) is None


def test_the_limit_is_the_longer_of_reading_and_multiplying() -> None:
    assert Work(read_gb=1, gflop=1).limit_ms(RATES) == pytest.approx(100)
    assert Work(read_gb=0.1, gflop=1, gop_8_bits=8).limit_ms(RATES) == pytest.approx(30)
    assert Limit("step", "fp32", Work(1, 1), limit_ms=100, ms=125).share == pytest.approx(0.8)


def test_programs_that_run_here_and_were_measured_have_a_limit() -> None:
    manifest = Bundle.open(default_bundle()).manifest
    how = {entry.spec.name: "run here" for entry in manifest.programs}

    found = limits_of(manifest, {"encoder": 10.0, "step": 1.0, ALIGN: 1.0}, how, RATES)
    emulated = limits_of(manifest, {"encoder": 10.0}, how | {"encoder": "emulated"}, RATES)

    assert [one.program for one in found] == ["encoder", "step"]
    assert emulated == []


def test_the_measured_graphs_are_as_onnx_writes_them() -> None:
    floats = (TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.FLOAT)
    assert graph_of("MatMul", floats) == roofline._MATMUL
    integers = (TensorProto.UINT8, TensorProto.INT8, TensorProto.INT32)
    assert graph_of("MatMulInteger", integers) == roofline._MATMUL_INTEGER


def graph_of(operator: str, types: tuple[int, int, int]) -> bytes:
    axes = ["m", "k"], ["k", "n"], ["m", "n"]
    values = [
        helper.make_tensor_value_info(name, kind, axis)
        for name, kind, axis in zip("abc", types, axes, strict=True)
    ]
    node = helper.make_node(operator, ["a", "b"], ["c"])
    graph = helper.make_graph([node], "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return bytes(model.SerializeToString())


def test_the_rates_of_this_machine_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "SIZE", 256)
    monkeypatch.setattr(roofline, "READ_BYTES", 2**20)

    rates = measure_rates(1)

    assert min(rates.read_gb, rates.gflop, rates.gop_8_bits) > 0.1


# The parts of `make bench-peers` that need no other implementation.

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def answer(wall_s, cpu_s=1.0, **more):
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_mib": 100.0, **more}


def test_every_round_measures_every_contender_in_another_order():
    in_turn = importlib.import_module("benchmarks.peers.measuring").in_turn
    names = ["a", "b", "c"]

    orders = [in_turn(names, number) for number in range(-1, 3)]

    assert all(sorted(order) == names for order in orders)
    assert len({order[0] for order in orders[1:]}) == 3


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    measuring = importlib.import_module("benchmarks.peers.measuring")
    ours, theirs = [1.0, 10.0, 1.0], [2.0, 20.0, 4.0]  # other load in the second round

    ratio = measuring.median_ratio([*map(answer, theirs)], [*map(answer, ours)], "wall_s")

    assert ratio == 2.0


def test_a_row_has_the_word_errors_of_all_files_together():
    cases = importlib.import_module("benchmarks.peers.contenders")
    row_of = importlib.import_module("benchmarks.peers.measuring").row_of
    case = cases.Case("2 files", "files", Path("x.npz"), 4.0, ("one two three", "four"))
    found = [answer(2.0, 3.0, texts=["one two", "four"])] * 2

    row = row_of("peer", found, None, case)

    assert row["wer"] == pytest.approx(1 / 4)
    assert row["cpu_s_per_audio_s"] == pytest.approx(3 / 4)
    assert row["ratio"] is None


def test_no_line_of_the_tables_is_longer_than_100_columns(capsys):
    print_tables = importlib.import_module("benchmarks.peers.measuring").print_tables
    contenders = importlib.import_module("benchmarks.peers.contenders").CONTENDERS
    part = {"wall_s": 88.888, "cpu_s": 88.888}
    row = {
        "model": "turbo-narrowed",
        "case": "one window, 64 tokens",
        "wall_s": 12345.678,
        "ratio": 123.45,
        "cpu_s_per_audio_s": 123.4567,
        "cpu_ratio": 123.45,
        "peak_mib": 20000.0,
        "tokens": 64,
    }
    start = {"import": part, "load": part, "first": part, "total": part, "cpu_ratio": 123.45}
    failed = {"model": "m", "case": "c", "reason": f"not measured: {'x' * 300}"}

    print_tables(
        {
            "rows": [r | {"contender": one.name} for one in contenders for r in (row, failed)],
            "start_up": [
                r | {"contender": one.name} for one in contenders for r in (start, failed)
            ],
        }
    )

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4 * len(contenders)
    assert max(map(len, lines)) <= 100


def test_every_contender_has_an_engine_and_a_known_format():
    contenders = importlib.import_module("benchmarks.peers.contenders").CONTENDERS
    formats = importlib.import_module("benchmarks.peers.convert").FORMATS
    engines = importlib.import_module("benchmarks.peers.engines")

    assert len({one.name for one in contenders}) == len(contenders)
    for one in contenders:
        assert hasattr(engines, one.engine), one.name
        assert one.format in ("", *formats), one.name
        assert one.is_ours == one.name.startswith("whisperport")


def test_the_programs_for_sherpa_compute_what_openai_whisper_does():
    whisper = pytest.importorskip("whisper.model")
    programs = importlib.import_module("benchmarks.peers.sherpa_programs")
    dims = whisper.ModelDimensions(80, 8, 16, 2, 2, 60, 12, 16, 2, 2)
    torch.manual_seed(0)
    model = whisper.Whisper(dims).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding)
    mel, tokens = torch.randn(1, 80, 16), torch.tensor([[3, 5, 7, 11]])
    with torch.inference_mode():
        expected = model(mel, tokens)

        cross = programs.EncoderWithCrossKV(model)(mel)
        cache = [torch.zeros(2, 1, 12, 16) for _ in range(2)]
        decoder = programs.DecoderWithCache(model)
        first, *cache = decoder(tokens[:, :3], *cache, *cross, torch.tensor([0]))
        last, *_ = decoder(tokens[:, 3:], *cache, *cross, torch.tensor([3]))

    torch.testing.assert_close(torch.cat([first, last], dim=1), expected, rtol=1e-4, atol=1e-5)


def test_a_widened_model_computes_the_same_logits():
    whisper = pytest.importorskip("whisper.model")
    widened = importlib.import_module("benchmarks.models").widened
    audio = {"n_audio_ctx": 8, "n_audio_state": 16, "n_audio_head": 2, "n_audio_layer": 2}
    text = {"n_text_ctx": 12, "n_text_state": 16, "n_text_head": 2, "n_text_layer": 1}
    widths = {"n_mels": 80, "n_vocab": 60, "n_audio_ffn": 64, "n_text_ffn": 64}
    narrow_dims = Dims(**audio, **text, **widths)
    torch.manual_seed(0)

    def openai(dims):
        sizes = {k: v for k, v in asdict(dims).items() if not k.endswith("_ffn")}
        return whisper.Whisper(whisper.ModelDimensions(**sizes)).eval()

    narrow = openai(narrow_dims)
    for weight in narrow.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    wide_dims, weights = widened(narrow_dims, narrow.state_dict(), (48, 6, 3))
    wide = openai(wide_dims)
    wide.load_state_dict(weights)
    mel, tokens = torch.randn(1, 80, 16), torch.tensor([[3, 5, 7, 11]])
    with torch.inference_mode():
        expected, actual = narrow(mel, tokens), wide(mel, tokens)

    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# The parts of the time of transcribing: nothing is missing, and nothing is counted twice

ONE_THREAD = RunOptions(threads=1)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(default_bundle())


@pytest.fixture(scope="module")
def recording() -> ShippedAudio:
    return shipped_audio()[0]


@pytest.fixture(scope="module")
def result(bundle: Bundle, recording: ShippedAudio) -> BenchResult:
    """The result of the embedded model on a shipped audio file, with word timestamps."""
    options = BenchOptions(repeat=2, word_timestamps=True, run=ONE_THREAD)
    return run_bench([bundle], recording.path, options)[0]


def test_the_decoder_without_cache_is_timed_beside_the_whole(
    micro: Whisper, eager_runners: Any
) -> None:
    clock = Clock()
    runners = eager_runners(micro) | {
        UNCACHED_DECODER: EagerUncached(micro, UncachedForm(12, pieces=2))
    }
    timed = {name: clock.wrap_runner(runner) for name, runner in runners.items()}
    tables = micro.decoder.token_embedding.weight, micro.decoder.positional_embedding
    engine = Engine(micro.dims, GENERATION, timed, *(table.numpy() for table in tables))

    seconds = time_uncached(engine, clock)

    assert len(seconds) == UNCACHED_CALLS
    assert min(seconds) > 0
    without = {name: runner for name, runner in timed.items() if name != UNCACHED_DECODER}
    assert (
        time_uncached(Engine(micro.dims, GENERATION, without, np.empty(0), np.empty(0)), clock)
        == []
    )


def test_a_bundle_without_the_uncached_decoder_has_no_time_of_it(result: BenchResult) -> None:
    assert result.uncached is None


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the separate process that measures memory, and the clips of the reference."""
    monkeypatch.setattr(transcribing, "peak_memory_mib", lambda *_, **__: None)
    monkeypatch.setattr(transcribing, "check_accuracy", lambda *_: ())


def test_the_parts_add_up_to_the_whole(result: BenchResult) -> None:
    assert sum(part.total_ms for part in result.parts) == pytest.approx(result.total_ms)


def test_the_cpu_time_of_the_parts_adds_up_and_splits_into_encoder_and_decoder(
    result: BenchResult,
) -> None:
    cpu = {part.name: part.cpu_ms or 0.0 for part in result.parts}

    decoder = sum(
        ms for name, ms in cpu.items() if name not in ("load", "mel", "encoder", "Python")
    )

    assert all(part.cpu_ms is not None and part.cpu_ms >= 0 for part in result.parts)
    assert result.cpu_s_per_audio_s * result.audio_s * 1e3 == pytest.approx(
        sum(cpu.values()) - cpu["load"]
    )
    assert result.decoder_cpu_s_per_audio_s * result.audio_s * 1e3 == pytest.approx(decoder)
    assert result.encoder_cpu_s_per_audio_s * result.audio_s * 1e3 == pytest.approx(cpu["encoder"])
    assert decoder > 0


def test_no_part_is_negative_so_nothing_was_counted_twice(result: BenchResult) -> None:
    assert all(part.total_ms > 0 for part in result.parts)


def test_every_program_that_ran_is_a_part_and_words_need_align(
    result: BenchResult, bundle: Bundle
) -> None:
    programs = {entry.spec.name for entry in bundle.manifest.programs}
    names = [part.name for part in result.parts]

    assert names[:2] == ["load", "mel"]
    assert names[-1] == "Python"
    # A short recording has no long prompt, and one text needs no batch.
    assert set(names[2:-1]) == programs - {"prefill_64", "step_8"}


def test_the_acceptance_table_has_the_latencies_and_the_accuracy(result: BenchResult) -> None:
    medians = {part.name: part.median_ms for part in result.parts}
    rows = {row.metric: row for row in result.acceptance}

    for row in rows.values():
        if row.unit == "ms":
            assert row.value == medians.get(row.programs[0]), row.metric
    assert rows["encoder latency"].value is not None
    assert (rows[TOKENS].value, rows[TOKENS].reference) == (6, 6)
    assert set(result.how.values()) == {"run here"}
    assert [*result.to_json()["acceptance"]] == [asdict(row) for row in result.acceptance]


def test_calls_are_as_many_as_another_observer_counts(
    result: BenchResult, bundle: Bundle, recording: ShippedAudio, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Counter[str]()

    def counted(run: Any) -> Any:
        def count(self: Any, *arrays: Any) -> Any:
            seen.update([getattr(self, "runner", self).spec.name])
            return run(self, *arrays)

        return count

    for kind, name in ((Runner, "run"), (Runner, "run_into"), (Binding, "run")):
        monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
    transcriber = Transcriber(bundle, ONE_THREAD)
    transcript = transcriber.transcribe(recording.path, TranscribeOptions(word_timestamps=True))

    assert {p.name: p.calls for p in result.parts if p.name in seen} == seen
    assert result.text == transcript.text


def test_speed_comes_with_accuracy(result: BenchResult, recording: ShippedAudio) -> None:
    assert result.errors is not None
    assert result.errors.length > 5
    assert result.errors.rate < 0.5
    assert result.whisper_errors == whisper_text_errors(result.text, recording.text)
    assert result.to_json()["wer_whisper_normalizer"] == result.whisper_errors.rate
    assert result.audio_s == pytest.approx(recording.seconds, abs=0.01)


def test_the_real_time_factor_leaves_loading_aside(result: BenchResult) -> None:
    load = result.parts[0].total_ms

    assert result.real_time_factor * result.audio_s * 1e3 == pytest.approx(result.total_ms - load)


def test_what_is_counted_follows_the_language_first_heard(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, no_memory: None
) -> None:
    heard = iter([("请左转", "zh"), ("请右转", "en")])

    def one_round(*_: object) -> transcribing._Round:
        text, language = next(heard)
        calls = {transcribing.LOAD: [0.1], transcribing.MEL: [0.1]}
        return transcribing._Round(calls, 1.0, 1.0, text, language)

    monkeypatch.setattr(transcribing, "_one_round", one_round)

    options = BenchOptions(repeat=1, run=ONE_THREAD, transcript="请右转")
    results = run_bench([bundle, bundle], Path("talk.wav"), options)

    assert [r.errors and (r.errors.name, r.errors.errors) for r in results] == [
        ("CER", 1),
        ("CER", 0),
    ]
    assert results[0].to_json()["cer"] == pytest.approx(1 / 3)
    assert [r.whisper_errors for r in results] == [r.errors for r in results]


def test_without_a_transcript_the_error_rate_is_not_known(
    bundle: Bundle, recording: ShippedAudio, tmp_path: Path, no_memory: None
) -> None:
    stranger = tmp_path / "stranger.wav"
    stranger.write_bytes(recording.path.read_bytes())

    unknown = run_bench([bundle], stranger, BenchOptions(repeat=1, run=ONE_THREAD))[0]
    told = BenchOptions(repeat=1, run=ONE_THREAD, transcript=unknown.text + " and more")
    known = run_bench([bundle], stranger, told)[0]

    assert unknown.errors is None
    assert unknown.to_json()["wer"] is None
    assert unknown.to_json()["wer_whisper_normalizer"] is None
    assert known.errors is not None
    assert known.errors.deletions == 2


def test_two_bundles_take_turns(bundle: Bundle, recording: ShippedAudio, no_memory: None) -> None:
    said: list[str] = []
    copy = Bundle(bundle.folder, bundle.manifest)
    options = BenchOptions(repeat=2, run=ONE_THREAD)

    with reporting(said.append):
        results = run_bench([bundle, copy], recording.path, options)

    assert [line.split(":")[0] for line in said if "round" in line] == [
        "round 1 of 2",
        "round 1 of 2",
        "round 2 of 2",
        "round 2 of 2",
    ]
    assert results[0].text == results[1].text


@pytest.mark.parametrize("target", ["onnxruntime", "xnnpack"])
def test_every_target_is_split_alike(
    target: str, exported: Any, monkeypatch: pytest.MonkeyPatch, no_memory: None
) -> None:
    decode = DecodeOptions(max_tokens=4, without_timestamps=True)  # no time may end a file early
    short = partial(TranscribeOptions, decode=decode, temperatures=(0,))
    monkeypatch.setattr(transcribing, "TranscribeOptions", short)
    recording = shipped_audio()[0].path

    result = run_bench([exported(target)], recording, BenchOptions(repeat=1, run=ONE_THREAD))[0]

    calls = {part.name: part.calls for part in result.parts}
    assert calls["encoder"] > 1  # windows of 2 s
    # The first window's keys detect the language too, and are computed once.
    assert calls["cross_kv"] == calls["encoder"]
    assert sum(part.total_ms for part in result.parts) == pytest.approx(result.total_ms)


def test_the_median_round_is_the_one_shown() -> None:
    rounds = [
        transcribing._Round({"load": [1.0], "step": [s, s]}, 1.0 + 2 * s + 0.5, 10.0, "", "en")
        for s in (0.3, 0.1, 0.2)
    ]

    parts = transcribing._parts(rounds[2], rounds, ["encoder", "step"])

    assert [(p.name, p.calls) for p in parts] == [("load", 1), ("step", 2), ("Python", 0)]
    assert parts[1].total_ms == pytest.approx(400)
    assert parts[1].median_ms == pytest.approx(200)
    assert parts[2].total_ms == pytest.approx(500)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="`repeat` is 0"):
        BenchOptions(repeat=0)


def test_memory_is_that_of_the_run_and_not_of_this_process(
    bundle: Bundle, recording: ShippedAudio
) -> None:
    held = np.ones(700 * 2**17)  # 700 MiB

    peak = peak_memory_mib(bundle.folder, recording.path, word_timestamps=False, run=ONE_THREAD)

    assert held.nbytes == 700 * 2**20
    assert peak is not None
    assert 50 < peak < 700


def test_memory_of_a_run_that_fails_is_not_known(bundle: Bundle, tmp_path: Path) -> None:
    missing = tmp_path / "missing.wav"

    assert peak_memory_mib(bundle.folder, missing, word_timestamps=False, run=ONE_THREAD) is None


def test_a_clock_that_saw_nothing_leaves_all_to_python() -> None:
    quiet = transcribing._Round({"load": [1.0], **Clock().calls}, 3.0, 1.0, "", "en")

    parts = transcribing._parts(quiet, [quiet], ["encoder"])

    assert [(p.name, p.total_ms) for p in parts] == [("load", 1000.0), ("Python", 2000.0)]
