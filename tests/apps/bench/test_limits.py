"""The limits of a machine, and the parts of `make bench-peers` that need no other implementation."""

import importlib
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper
from torch import randn
from torch.utils._pytree import tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from whisperport.apps.bench import roofline
from whisperport.apps.bench.roofline import Limit, Rates, Work, limits_of, measure_rates, work_of
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle
from whisperport.program.dims import Dims
from whisperport.program.program_kind import ALIGN
from whisperport.program.spec import ProgramSpec

from ...embedded import default_bundle
from ...micro import DIMS

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
