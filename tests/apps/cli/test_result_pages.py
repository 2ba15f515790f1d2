"""The pages of `sensitivity`, `bench`, `inspect`, `verify`, `compare` and `judge`, without torch.

Each says its verdict first, marks what is at fault, and shows no markup of names in files.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.apps.bench.acceptance import AcceptanceRow
from whisperport.apps.bench.roofline import Limit, Rates, Work
from whisperport.apps.bench.transcribing import BenchResult, Part
from whisperport.apps.cli.bench_page import bench_page
from whisperport.apps.cli.compare_page import compare_page
from whisperport.apps.cli.inspect_page import inspect_page
from whisperport.apps.cli.judge_page import judge_page
from whisperport.apps.cli.log_plot import Line, Tag, log_plot, short_number
from whisperport.apps.cli.sensitivity_page import sensitivity_page
from whisperport.apps.cli.verify_page import layers_page, verify_page
from whisperport.build.judge.identity import ChangedWeight, Identity
from whisperport.build.judge.judge import WEIGHTS, AppRun, Judgement
from whisperport.build.judge.words import compare_words
from whisperport.build.layouts import layout_of
from whisperport.build.layouts.reference import Emitted
from whisperport.build.layouts.rules import Problem
from whisperport.model.inspection.lowered import Inspected
from whisperport.program.checks import Check
from whisperport.program.profiling import NodeProfile, Profile, by_time
from whisperport.system.page import text
from whisperport.verification import Report, TextErrors
from whisperport.verification.array_comparison import Comparison, Gate, min_sqnr_of
from whisperport.verification.clips import Clip
from whisperport.verification.diagnosis.divergence import (
    ComparedPrograms,
    ComparedValue,
    divergence,
)
from whisperport.verification.diagnosis.layers import LayerComparison
from whisperport.verification.reference import Reference
from whisperport.verification.tolerances import GATES, LOWERED, REWRITTEN

ATTACK = "</script><img src=x onerror=alert(1)>\"'\x1b[31m\u202e"


def expect_safe(page: str) -> None:
    """A page has no markup but its own, and loads nothing."""
    assert not re.search(r"<(script|img)|https?://|\x1b|\u202e", page)
    assert text(ATTACK) in page
    assert "default-src 'none'" in page


def first_of(page: str) -> str:
    """What a reader sees first: the verdict."""
    return page.partition("</dl>")[0].partition("<h1>")[2]


# sensitivity


def activation(name: str = "blocks.3.mlp.2", **changes: Any) -> dict[str, Any]:
    """Channel 54 of 128 reaches 5723; the others reach 10."""
    row: dict[str, Any] = {
        "activation": name,
        "operator": "Add",
        "tensor": "linear_23",
        "shape": [1, 1500, 128],
        "smallest": -5723.0,
        "largest": 40.0,
        "typical": 3.93,
        "step": 22.6,
        "channel": 54,
        "typical_db": -4.4,
        "alone_db": 5.9,
        "ruined": True,
        "text": f"{name}: channel 54 reaches -5723",
        "channels": [5723.0 if n == 54 else 10.0 for n in range(128)],
        "frames": [5723.0] * 1500,
    }
    return row | changes


def good(name: str = "ln_post") -> dict[str, Any]:
    return activation(name, typical_db=34.0, alone_db=None, ruined=False, channels=[], frames=[])


def test_the_page_of_a_sensitivity_begins_with_what_8_bits_ruin_and_why() -> None:
    page = sensitivity_page("encoder.onnx", [activation(), good()], 20.0, "whisperport export x")

    first = first_of(page)
    assert '<p class="big">One 8-bit scale ruins 1 of 2 activations.</p>' in first
    assert "channel 54 reaches 5,723, 572 times the median channel&#x27;s" in first
    assert "one 8-bit step is 22.6, and a typical value 3.93: typical values keep -4 dB" in first
    assert "<code>whisperport export x</code>" in first


def test_a_ruined_activation_has_a_row_and_a_picture_with_its_channel_marked() -> None:
    page = sensitivity_page("encoder.onnx", [activation(), good()], 20.0)

    row = re.search(r"<td>blocks.3.mlp.2<br>.*", page)
    assert row
    for cell in ("channel 54", "5,723", "3.93", "22.6", "-4 dB", "6 dB", "1 × 1500 × 128"):
        assert f">{cell}" in row[0]
    assert page.count("<figure>") == page.count('class="plot"') == 1
    assert '<b class="bad"' in page
    assert "channel 54: 5,723</b>" in page
    assert "<i></i>8-bit step: 22.6" in page
    assert 'class="thin"></i>typical: 3.93' in page


def test_an_activation_without_a_massive_channel_says_so() -> None:
    softmax = activation("Softmax", channel=None, smallest=0.0, largest=0.996, typical=0.0046)

    page = sensitivity_page("encoder.onnx", [softmax], 20.0)

    assert "no single channel: values reach 0.996, 217 times a typical value" in page
    assert '<b class="bad" style' not in page


def test_a_program_that_8_bits_do_not_ruin_says_so() -> None:
    page = sensitivity_page("encoder.onnx", [good()], 20.0, "whisperport export x")

    first = first_of(page)
    assert "One 8-bit scale ruins none of 1 activations." in first
    assert "ln_post: typical values keep 34 dB; the limit is 20 dB" in first
    assert 'class="verdict good"' in page
    assert "<figure>" not in page


def test_nothing_in_a_sensitivity_is_markup() -> None:
    row = activation(ATTACK, operator=ATTACK, tensor=ATTACK, text=ATTACK)

    expect_safe(sensitivity_page(ATTACK, [row, good(ATTACK)], 20.0, ATTACK))


def test_a_page_of_many_ruined_activations_is_small() -> None:
    rows = [activation(f"a{n}", channels=[1.0] * 1500, channel=None) for n in range(500)]

    page = sensitivity_page("encoder.onnx", rows, 20.0)

    assert len(page) < 3_000_000
    assert "450 more are in the table only" in page


# plots


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_a_plot_of_nothing_is_empty(values: list[float]) -> None:
    assert log_plot(values, "", ("", "")) == ""


@pytest.mark.parametrize("value", [1e-300, 1e-9, 1.0, 1e30, math.inf, math.nan])
def test_a_plot_shows_every_value_within_its_frame(value: float) -> None:
    plot = log_plot([1.0, value, 0.0] * 300, "", ("", ""), (Tag(1, ATTACK),), (Line(2.0, ATTACK),))

    heights = [float(one) for one in re.findall(r"100v-([\d.]+)", plot)]
    places = [float(one) for one in re.findall(r"(?:bottom|top):([\d.]+)%", plot)]
    assert len(heights) == 300 + 1  # of 900 values, and a wide one that is marked
    assert all(0 <= one <= 100 for one in (*heights, *places))
    assert "<img" not in plot


def test_numbers_are_short() -> None:
    numbers = (0.0046123, 3.9312, 22.64, 5723.1, 1e9, math.nan)

    assert [*map(short_number, numbers)] == ["0.00461", "3.93", "22.6", "5,723", "1e+09", "NaN"]


# bench

RATES = Rates(read_gb=10, gflop=100, gop_8_bits=400)


def measured(**changes: Any) -> BenchResult:
    fields: dict[str, Any] = {
        "bundle": Path("build/tiny"),
        "name": "tiny on onnxruntime",
        "audio": "talk.wav",
        "audio_s": 60.0,
        "parts": (
            Part("load", 1, 500.0, 500.0, 100.0),
            Part("encoder", 2, 800.0, 400.0, 300.0),
            Part("step", 100, 400.0, 4.0, None),
            Part("Python", 0, 300.0, None, 100.0),
        ),
        "total_ms": 2000.0,
        "real_time_factor": 0.025,
        "cpu_s_per_audio_s": 0.01,
        "encoder_cpu_s_per_audio_s": 0.005,
        "decoder_cpu_s_per_audio_s": 0.005,
        "peak_memory_mib": 200.0,
        "text": "",
        "errors": TextErrors(substitutions=3, length=100),
        "whisper_errors": None,
        "rounds": 3,
        "acceptance": (),
        "how": {"encoder": "run here"},
    }
    return BenchResult(**(fields | changes))


def limit(name: str, limit_ms: float, ms: float, **work: float) -> Limit:
    return Limit(name, "fp32", Work(**({"read_gb": 0.001, "gflop": 1.0} | work)), limit_ms, ms)


def test_the_page_of_a_measurement_begins_with_speed_and_errors() -> None:
    page = bench_page([measured()], RATES, [[limit("encoder", 200, 400)]], "here", "whisperport x")

    first = first_of(page)
    assert '"big">60.0 s of audio in 1.5 s: real-time factor 0.025, word error rate 3.0%.' in first
    assert "encoder: 800 ms, 40.0% of loading and transcribing" in first
    assert "3.0% (3 errors in 100 words)" in first
    assert "<code>whisperport x</code>" in first
    assert 'class="verdict good"' in page
    assert "was loaded" not in page
    # The bar is the measured time, and the line the limit.
    assert '<i style="width:100.0%"></i><b style="left:50.0%">' in page


def test_a_limit_above_the_measured_time_means_that_the_machine_was_loaded() -> None:
    limits = [limit("encoder", 896, 400), limit("step", 8, 4, read_gb=0.08)]

    page = bench_page([measured()], RATES, [limits], "here")

    first = first_of(page)
    loaded = "the machine was loaded with other work while the limit was measured"
    assert f"{loaded}: that of encoder, step is above the measured time" in first
    assert "Measure again on an idle machine" in first
    assert 'class="verdict mark"' in page
    assert f"The limit of encoder is above its measured time: {loaded}.</p>" in page
    assert f"The limit of step is above its measured time: {loaded}, or the CPU's caches" in page
    assert '<b class="mark">224%</b>' in page
    assert '<i style="width:44.6%"></i><b style="left:100.0%">' in page
    assert page.count('<span class="mark fill"') == 2


def test_without_a_transcript_the_page_says_that_errors_were_not_measured() -> None:
    page = bench_page([measured(errors=None)], RATES, [[]], "here")

    assert "real-time factor 0.025.</p>" in page
    assert "not measured: the correct transcript is not known" in page
    assert "Distance to the limit" not in page


def test_several_bundles_are_compared_first() -> None:
    faster = measured(bundle=Path("build/fast"), total_ms=1250.0, real_time_factor=0.0125)

    page = bench_page([measured(), faster], RATES, [[], [limit("step", 8, 4)]], "here", "next one")

    first = first_of(page)
    assert (
        "Of 2 bundles, fast is the fastest: real-time factor 0.013, 2.00 times as fast as tiny."
        in first
    )
    assert page.count("<code>next one</code>") == 1
    assert 'class="verdict mark"><p class="big">Of 2' in page


def test_a_failed_acceptance_is_in_the_verdict() -> None:
    failed = AcceptanceRow(
        metric=ATTACK,
        programs=("step",),
        targets=(ATTACK,),
        value=0.5,
        unit="share",
        reference=0.0,
        rule=ATTACK,
        passed=False,
        reason=ATTACK,
        evidence="run here",
    )
    hostile = measured(
        acceptance=(failed,), name=ATTACK, bundle=Path(ATTACK), parts=(Part(ATTACK, 1, 9.0, 9.0),)
    )

    page = bench_page([hostile, hostile], RATES, [[limit(ATTACK, 9, 1)], []], ATTACK, ATTACK)

    assert 'class="verdict bad"' in page
    assert '<b class="bad">FAIL</b>' in page
    expect_safe(page)


# verify


def compared(sqnr_db: float, rule: str = "SQNR ≥ 60 dB", **changes: Any) -> Check:
    fields: dict[str, Any] = {
        "level": "arrays",
        "program": "encoder",
        "what": "a.wav",
        "value": {"sqnr_db": sqnr_db},
        "rule": rule,
        "passed": True,
    }
    return Check(**(fields | changes))


def verified(*checks: Check) -> str:
    words = {"what": "word error rate", "value": {"wer": 0.01}}
    others = (
        compared(0, "WER at most 0.5%", level="words", **words),
        compared(0, "equal", level="tokens", value={"n_same": 9}),
        compared(0, "equal", level="isolation", value={"tokens": 9}),
    )
    report = Report(subject="tiny", checks=(*checks, *others))
    return verify_page(report, Reference((), 9), "next one")


@pytest.mark.parametrize("gate", [*GATES.values(), *REWRITTEN.values(), *LOWERED.values()])
def test_the_limit_of_every_gate_is_read_from_its_rule(gate: Gate) -> None:
    assert min_sqnr_of(gate.rule) == gate.min_sqnr_db
    assert min_sqnr_of("the same tokens from first to last") is None


def test_a_bar_shows_the_distance_to_the_limit() -> None:
    near = compared(45.7, "SQNR ≥ 27.1 dB", program="step")

    page = verified(compared(129.2), compared(70.0, what="b.wav"), near)

    encoder, step = (re.search(rf"<tr><td>{name}<td>.*", page) for name in ("encoder", "step"))
    assert encoder
    assert '<i style="width:50.0%"></i><b style="left:42.9%">' in encoder[0]
    for cell in ("70.0 dB", "60 dB", "+10.0 dB", "b.wav", "pass"):
        assert f">{cell}" in encoder[0]
    assert step
    assert '<i style="width:32.6%"></i><b style="left:19.4%">' in step[0]
    assert ">+18.6 dB" in step[0]
    assert "Nearest to its limit<dd>encoder, b.wav: SQNR 70 dB; SQNR ≥ 60 dB" in first_of(page)
    assert "Word error rate<dd>WER 1.00%; WER at most 0.5%" in first_of(page)


def test_a_comparison_of_words_without_a_shown_number_begins_with_its_rule() -> None:
    page = verified(
        compared(0, "at most 0.3%", level="words", what="short windows", value={"extra": 0})
    )

    assert "Short windows<dd>at most 0.3%" in first_of(page)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 5.0])
def test_a_value_below_its_limit_is_the_worst_of_its_program(value: float) -> None:
    failed = compared(value, passed=False, reason="SQNR is below 60 dB")

    page = verified(compared(70.0), failed)

    row = re.search(r"<tr><td>encoder<td>.*", page)
    assert row
    assert 'class="bar bad"' in row[0]
    assert '<b class="bad">-55.0 dB</b>' in row[0] or not math.isfinite(value)
    assert "FAIL" in row[0]


def test_layers_stand_beside_their_limit_and_the_first_bad_one_is_marked() -> None:
    layers = [LayerComparison(name=n, sqnr_db=db) for n, db in (("a", 60.0), (ATTACK, 12.0))]

    page = layers_page(layers)

    assert f'<b class="bad">✕ {text(ATTACK)}</b>' in page
    assert '<i style="width:8.6%"></i><b style="left:21.4%">' in page
    assert '<b class="bad">-18.0 dB</b>' in page
    assert ">+30.0 dB" in page
    assert "compare the weights, the scale and the zero point of" in first_of(page)
    expect_safe(page)


# compare


def value(name: str, error: float, before: float = 0.0, **changes: Any) -> ComparedValue:
    fields: dict[str, Any] = {
        "name": name,
        "other": name,
        "operator": "linear",
        "other_operator": "matmul",
        "module": f"blocks.{name}",
        "line": f"whisper/{name}.py:7",
        "error": error,
        "before": before,
    }
    return ComparedValue(**(fields | changes))


def programs(*values: ComparedValue, **changes: Any) -> ComparedPrograms:
    passed = Comparison(output="y", rule="SQNR ≥ 60 dB", reason="", sqnr_db=70.0)
    first, worst = divergence(values, ["float32"])
    fields: dict[str, Any] = {
        "a": "a.onnx",
        "b": "b.onnx",
        "values": values,
        "kept": (9, 8),
        "outputs": (passed,),
        "first": first,
        "worst": worst,
    }
    return ComparedPrograms(**(fields | changes))


FAILED = Comparison(output="y", rule="SQNR ≥ 60 dB", reason="SQNR 40 dB is below 60 dB")


def test_the_page_of_a_comparison_begins_with_the_first_layer_that_diverges() -> None:
    values = (value("a", 1e-7), value("b", 1e-3, 1e-7), value("c", 1e-2, 1e-3))

    page = compare_page(programs(*values, outputs=(FAILED,)), "whisperport compare a b --all")

    first = first_of(page)
    assert '"big">The programs diverge first at blocks.b (whisper/b.py:7).</p>' in first
    assert (
        "the error of b is 1.0e-03 (60 dB), that of what it is computed from at most 1.0e-07"
        in first
    )
    assert "The error grows most at blocks.c" in first
    assert "0 of 1 outputs are within the limits:<br>y: SQNR 40 dB is below 60 dB" in first
    assert "Compare the weights and the arguments of blocks.b (linear, matmul)" in first
    assert "<code>whisperport compare a b --all</code>" in first
    assert 'class="verdict bad"' in page


def test_the_first_layer_that_diverges_is_marked_in_the_picture_and_the_table() -> None:
    values = (value("a", 1e-7), value("b", 1e-3, 1e-7), value("c", 1e-2, 1e-3))

    page = compare_page(programs(*values, outputs=(FAILED,)))

    plot = page.partition('<div class="plot"')[2].partition("</div>")[0]
    assert '<path class="bad" d="M1.08,' in plot  # the second of three bars
    assert '<path class="mark" d="M2.08,' in plot
    assert re.search(r'<b class="bad" style=[^>]*>blocks.b: 1.0e-03 \(60 dB\)</b>', plot)
    assert "limit of the outputs: 60 dB" in page
    marked = re.findall(r'<td><b class="(\w+)">✕ ([\w.]+)</b>', page)
    assert marked == [("bad", "blocks.b"), ("mark", "blocks.c"), ("bad", "b"), ("mark", "c")]
    assert "<td>linear/matmul<td>whisper/b.py:7" in page


def test_a_divergence_that_no_output_shows_is_no_failure() -> None:
    page = compare_page(programs(value("a", 1e-7), value("b", 1e-4, 1e-7)))

    assert "blocks.b (whisper/b.py:7); all outputs are within the limits." in first_of(page)
    assert 'class="verdict mark"' in page


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (0.0, "The programs are equal: every matched value is identical."),
        (1e-7, "No layer diverges"),
    ],
)
def test_programs_that_do_not_diverge_say_so(error: float, sentence: str) -> None:
    page = compare_page(programs(value("a", error), value("b", error)))

    assert sentence in first_of(page)
    assert 'class="verdict good"' in page
    assert "✕" not in page


def test_an_output_that_fails_without_a_divergence_is_said() -> None:
    page = compare_page(programs(value("a", 1e-7), outputs=(FAILED,)))

    assert "No layer diverges, but only 0 of 1 outputs are within the limits." in first_of(page)
    assert 'class="verdict bad"' in page


def test_a_value_that_is_nan_is_drawn_and_named() -> None:
    page = compare_page(programs(value("a", 1e-7), value("b", math.inf, 1e-7)))

    assert "The programs diverge first at blocks.b" in first_of(page)
    assert 'class="n">NaN<td' in page


def test_nothing_in_a_comparison_is_markup() -> None:
    names = dict.fromkeys(("other", "operator", "other_operator", "module", "line"), ATTACK)
    hostile = value(ATTACK, 0.5, 1e-7, **names, modules=("x", ATTACK), between=(("A", ATTACK, ""),))
    failed = Comparison(output=ATTACK, rule=ATTACK, reason=ATTACK)

    page = compare_page(
        programs(hostile, a=ATTACK, b=ATTACK, outputs=(failed,), notes=(ATTACK,)), ATTACK
    )

    expect_safe(page)


def test_a_page_of_many_values_is_small() -> None:
    values = [value("v" * 60, 1e-3) for _ in range(20_000)]

    page = compare_page(programs(*values))

    assert len(page) < 3_000_000
    assert "17000 more are listed with <code>--all</code>" in page


# inspect


def node(name: str, ms: float, **changes: Any) -> NodeProfile:
    fields: dict[str, Any] = {
        "name": name,
        "operator": "MatMul",
        "where": "CPUExecutionProvider",
        "delegated": True,
        "ms": ms,
    }
    return NodeProfile(**(fields | changes))


def profile(*nodes: NodeProfile, **changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "program": "step",
        "runtime": "ONNX Runtime",
        "target": "CPUExecutionProvider",
        "subgraphs": 1,
        "nodes": by_time(nodes),
        "overhead_ms": 0.0,
        "run_ms": 100.0,
        "runs": 5,
        "on_cpu": True,
    }
    return Profile(**(fields | changes))


def on_cpu() -> Profile:
    return profile(
        node("linear_1", 10.0, module="blocks.0.attn"),
        node("linear_2", 14.0, module="blocks.1.attn"),
        node("node_linear_24", 76.0, module="vocabulary projection"),
    )


@pytest.mark.parametrize("profiles", [(on_cpu(),), (on_cpu(), on_cpu())])
def test_nodes_on_the_cpu_are_not_called_delegated(profiles: tuple[Profile, ...]) -> None:
    page = inspect_page(Inspected(profiles, ()), "")

    assert re.search(r'"big">All [36] nodes run on the CPU', page)
    assert "delegated" not in page
    assert "runs on the CPU (CPUExecutionProvider)" in page


def test_the_slowest_node_has_the_name_of_its_module() -> None:
    page = inspect_page(Inspected((on_cpu(),), ()), "")

    assert "All 3 nodes run on the CPU: 76.0% in the vocabulary projection (MatMul)." in first_of(
        page
    )
    assert "<code>node_linear_24</code> vocabulary projection, CPUExecutionProvider" in first_of(
        page
    )
    assert "<td>node_linear_24<br><span class=dim>vocabulary projection</span>" in page
    assert "<h3>blocks.0</h3>" in page
    assert '<div class="dim">vocabulary projection</div>' in page


def test_an_undelegated_node_is_named_by_its_module_too() -> None:
    mm = node("mm", 76.0, delegated=False, where="no delegate", module="vocabulary projection")
    found = profile(mm, node("a", 24.0, where="Npu 1"), target="Npu", on_cpu=False)

    page = inspect_page(Inspected((found,), ()), "")

    assert "not delegated: 76.0% in the vocabulary projection (MatMul)." in first_of(page)
    assert "delegated to Npu" in page


def test_nothing_in_a_profile_is_markup() -> None:
    hostile = node(ATTACK, 9.0, operator=ATTACK, where=ATTACK, module=f"blocks.0.{ATTACK}")

    page = inspect_page(Inspected((profile(hostile, program=ATTACK, target=ATTACK),), ()), ATTACK)

    expect_safe(page)


# judge


def judgement(*texts: str, spoken: str = "turn off the light", **changes: Any) -> Judgement:
    """Of an OpenVINO folder, whose app returned a text for each clip."""
    clips = tuple(Clip(f"{i}.wav", spoken, np.zeros(1600, np.float32)) for i in range(len(texts)))
    expected, actual = ([Emitted((), t, ()) for t in of] for of in ([spoken] * len(texts), texts))
    words = compare_words(clips, expected, actual, timed=False) if texts else None
    fields: dict[str, Any] = {
        "path": Path("model"),
        "layout": layout_of("openvino-genai"),
        "precision": "fp32",
        "precisions": ("fp32", "w8"),
        "problems": (),
        "checkpoint": "openai/whisper-tiny",
        "identity": Identity(equal=["a", "b"]),
        "runs": (AppRun(app="openvino-genai", device="CPU", words=words),),
        "clips": clips,
    }
    return Judgement(**fields | changes)


def test_the_page_of_right_files_says_what_was_compared() -> None:
    page = judge_page(judgement("turn off the light", "Turn off the light."))
    first = first_of(page)
    assert "Nothing is wrong: the weights are those of openai/whisper-tiny" in first
    assert "2 of 2 weights are there (2 equal to the bit)" in first
    assert "0 differences in 8 words; with 95%, the WER is at most 37.5% above" in first
    assert "not judged: w8" in first
    assert "no rule of an NPU is broken" in first
    assert "2 of 2 clips: no word differs." in page
    assert "<audio" not in page


def test_the_verdict_on_files_whose_weights_cannot_be_compared_says_so() -> None:
    check = Check(
        level="words",
        program="all",
        what="a clip",
        value={"errors": 0.0},
        rule="equal",
        passed=True,
    )
    of_app = replace(judgement("turn off").runs[0], checks=(check,))

    first = first_of(judge_page(judgement("turn off", identity=None, runs=(of_app,))))

    assert "Nothing is wrong: weights were not compared with openai/whisper-tiny" in first
    assert "every app that ran returned what the checkpoint emits" in first


def test_the_page_begins_with_what_is_wrong_and_what_to_do() -> None:
    problems = (
        Problem("WP733", "decoder.xml", "no positions"),
        Problem("WP705", "generation_config.json", "no heads", is_warning=True),
    )
    changed = ChangedWeight("decoder.ln.weight", "decoder.xml: ln", "1 of 384 values differ")
    wrong = judgement(identity=Identity(equal=["a"], changed=[changed]), problems=problems)
    first = first_of(judge_page(wrong, "whisperport convert"))
    assert "Wrong: decoder.ln.weight is not as in openai/whisper-tiny: 1 of 384 values dif" in first
    assert "WP733 (The positions of tokens" in first  # a form that an NPU needs is behind causes
    assert "1 of 384 values differ, in decoder.xml: ln" in first
    assert "WP733: decoder.xml: no positions<" in first  # what an NPU does
    assert "whisperport convert openai/whisper-tiny --for openvino-genai" in first
    # and of files that only lose something, with that
    lossy = first_of(judge_page(judgement("a", spoken="a", problems=problems[1:])))
    assert "Wrong: " not in lossy
    assert "Something is lost: WP705 (" in lossy
    assert "): generation_config.json: no heads. Nothing else is wrong: " in lossy


def test_the_verdict_says_why_an_app_failed_if_nothing_else_is_wrong() -> None:
    failed = AppRun(app="openvino-genai", reason="the port is missing", failed=True)
    right = judgement("turn off")
    page = judge_page(replace(right, runs=(failed,)))
    assert "Wrong: openvino-genai failed: the port is missing." in first_of(page)


def test_what_is_lost_is_in_the_verdict_if_nothing_else_says_why_words_differ() -> None:
    lost = (Problem("WP705", "generation_config.json", "no heads", is_warning=True),)
    texts = dict.fromkeys(("program", "what", "rule"), "")
    check = Check(level="words", value={}, passed=False, reason="a word differs", **texts)
    wrong = judgement("turn off", problems=lost)
    wrong = replace(wrong, runs=(replace(wrong.runs[0], checks=(check,)),))
    first = first_of(judge_page(wrong))
    assert "Wrong: WP705 (" in first
    assert "): generation_config.json: no heads; openvino-genai (CPU) returned something" in first


def test_the_verdict_on_many_weights_names_one() -> None:
    changed = [ChangedWeight(f"decoder.{i}", "a.onnx: b", "its scales are 1") for i in range(3)]
    page = judge_page(judgement(identity=Identity(equal=["a"], changed=changed)))
    expected = "3 weights are not as in openai/whisper-tiny: such as decoder.0, its scales are 1."
    assert expected in first_of(page)


def test_an_array_that_is_no_weight_is_named() -> None:
    extra = ChangedWeight("", "decoder.xml: lora.a", "it is no weight of the checkpoint")
    page = judge_page(judgement(identity=Identity(equal=["a"], changed=[extra])))
    assert "Wrong: decoder.xml: lora.a is not as in openai/whisper-tiny: it is no" in first_of(page)
    assert "<td>decoder.xml: lora.a<td>it is no weight of the checkpoint" in page


def test_words_that_are_lost_are_shown_with_their_audio() -> None:
    page = judge_page(judgement("turn off the light", "turn"))
    assert "early stop in 1 of 2 clips: 1.wav, after 1 of 4 words" in first_of(page)
    assert page.count("<audio") == 1
    assert "<ins>–</ins>" in page
    assert "1 of 2 clips: no word differs." in page


def test_a_loop_and_many_rules_do_not_make_the_page_large() -> None:
    many = tuple(Problem("WP733", "d" * 5000, "p" * 5000) for _ in range(3000))
    page = judge_page(judgement("no " * 100_000, problems=many))
    assert len(page) < 3_000_000
    assert "more are not shown" in page


def test_why_weights_were_not_compared_is_said_once() -> None:
    # given files whose weights cannot be read
    failed = AppRun(app=WEIGHTS, reason="cannot read `model.bin`", failed=True)
    page = first_of(judge_page(judgement(identity=None, checkpoint="small", runs=(failed,))))
    # then the page says why, once
    assert "not compared: cannot read" in page
    assert page.count("cannot read") == 1


def test_nothing_in_a_judgement_is_markup() -> None:
    hostile = judgement(
        ATTACK,
        spoken=f"{ATTACK} a",
        path=Path(ATTACK),
        checkpoint=ATTACK,
        problems=(Problem("WP733", ATTACK, ATTACK),),
        identity=Identity(changed=[ChangedWeight(ATTACK, ATTACK, ATTACK)]),
    )
    expect_safe(judge_page(hostile, ATTACK))
    failed = (AppRun(app=ATTACK, reason=ATTACK, failed=True),)
    expect_safe(judge_page(judgement(runs=failed), ATTACK))
