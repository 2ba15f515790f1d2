"""Estimates of memory and least times, against values computed by hand and against the real programs."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.chips import predicted

from whisperport.build.plan import DECODE, PlanOptions, plan, plan_of
from whisperport.build.predicted_times import PARTS, predict, student_t, work
from whisperport.build.work import (
    cross_kv_weights,
    decoder_weights,
    encoder_operations,
    encoder_weights,
    state_numbers,
    token_numbers,
    token_operations,
)
from whisperport.errors import UsageError
from whisperport.model.inspection.cost import MATMULS, NodeCost, cost_of
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.dims import published_dims
from whisperport.targets import TARGETS, Target, get_target
from whisperport.targets.base import PublishedTimes

from ..micro import TURBO

ROOT = Path(__file__).parents[2]
(TARGET,) = [target for target in TARGETS if target.machines]
MACHINES = {machine.name: machine for machine in TARGET.machines}


def planned(precision: str = "fp32", **options):
    return plan_of(TURBO, TARGET, precision, DECODE, PlanOptions(**options))


def on(machine: str, precision: str = "fp32", **options):
    (found,) = [one for one in planned(precision, **options).machines if one.machine == machine]
    return found


def test_operations_of_turbo_are_those_computed_by_hand():
    # stem: 2·3000·1280·384 + 2·1500·1280·3840; a layer: 8·1500·1280² + 4·1500²·1280 + 4·1500·1280·5120
    stem, layer = 2_949_120_000 + 14_745_600_000, 19_660_800_000 + 11_520_000_000 + 39_321_600_000
    cross = (
        4 * 9_830_400_000
    )  # 39.3 GFLOP, which a decoder without resident K/V repeats for each token
    assert encoder_operations(TURBO) == stem + 32 * layer + cross == 2_313_093_120_000
    # a layer: 12·1280² + 4·1280·5120 + 4·1280·1949; the vocabulary: 2·51866·1280
    assert token_operations(TURBO) == 4 * (19_660_800 + 26_214_400 + 9_978_880) + 132_776_960


def test_the_estimate_counts_what_the_cost_model_counts_in_the_programs(tiny_checkpoint: Any):
    dims, costs = tiny_checkpoint.dims, {}
    parts = Parts(build_model(tiny_checkpoint), [(0, 0)])
    for program in whisper_programs(parts, ("encoder", "cross_kv", "step")):
        costs[program.name] = cost_of(read_exported(program.name, program.exported))
    products = {name: sum(map(_product, cost.nodes)) for name, cost in costs.items()}
    stored = {name: cost.stored_bytes // 4 for name, cost in costs.items()}
    assert products["encoder"] + products["cross_kv"] == encoder_operations(dims)
    assert products["step"] == token_operations(dims)
    assert stored["encoder"] + stored["cross_kv"] == encoder_weights(dims)
    assert stored["cross_kv"] == cross_kv_weights(dims)
    assert stored["step"] == decoder_weights(dims)


def _product(cost: NodeCost) -> int:
    """Operations of a matrix multiplication or convolution, without those that add its bias."""
    if cost.node.op not in (*MATMULS, "conv"):
        return 0
    return cost.flops - (len(cost.node.tensors) > 2) * (cost.node.output.size or 0)


def test_state_of_turbo_in_float32_has_61_mb_of_cross_attention_kv():
    self_kv, cross_kv = 2 * 4 * 448 * 1280, 2 * 4 * 1500 * 1280
    assert 4 * cross_kv == 61_440_000
    assert state_numbers(TURBO) == self_kv + cross_kv == 19_947_520
    # A token reads the cross-attention K/V once, and reads and writes the self-attention cache.
    assert token_numbers(TURBO) == decoder_weights(TURBO) + cross_kv + 2 * self_kv


def test_least_times_of_turbo_are_those_computed_by_hand():
    one = on("inf2.xlarge")
    # 2.313 TFLOP at 47.5 / 2 TFLOPS; (158.22 M + 24.53 M numbers) · 4 bytes at 820 / 2 GB/s
    assert one.encoder_s == pytest.approx(0.0974, rel=1e-3)
    assert one.encoder_limit == "compute"
    assert one.token_s == pytest.approx(1.783e-3, rel=1e-3)
    assert one.token_limit == "memory"
    half = on("inf2.xlarge", "bf16")
    assert half.encoder_s == pytest.approx(one.encoder_s / 4, rel=1e-3)
    assert half.token_s == pytest.approx(one.token_s / 2, rel=1e-3)


def test_memory_of_turbo_is_that_computed_by_hand():
    one = on("inf2.xlarge")
    # 4 layers of 6·1280² + 2·1280·5120, biases and norms 12·1280 + 5120; the last norm; 51866·1280
    assert decoder_weights(TURBO) == 4 * (22_937_600 + 20_480) + 2_560 + 66_388_480
    assert one.weights_bytes == 4 * (
        encoder_weights(TURBO)
        + cross_kv_weights(TURBO)
        + 3 * decoder_weights(TURBO)
        + decoder_weights(TURBO, program="align")
    )
    assert one.state_bytes == 4 * 4 * 19_947_520
    assert one.memory_bytes == 16 * 2**30
    assert one.fits
    assert (one.cores, one.models) == (2, 2)


def test_the_largest_batch_fits_and_one_more_does_not():
    largest = on("inf2.xlarge").largest_batch
    assert largest > 1
    assert on("inf2.xlarge", batch=largest).fits
    more = on("inf2.xlarge", batch=largest + 1)
    assert not more.fits
    assert more.largest_batch == largest


def test_a_batch_reads_the_weights_once_and_the_state_of_every_text():
    one, eight = on("inf2.xlarge"), on("inf2.xlarge", batch=8)
    state = token_numbers(TURBO) - decoder_weights(TURBO)
    assert eight.token_s - one.token_s == pytest.approx(7 * 4 * state / 410e9)
    assert eight.token_s < 8 * one.token_s
    assert eight.encoder_s == one.encoder_s


@pytest.mark.parametrize(("cores", "padded"), [(1, 0), (2, 0), (4, 0), (8, 4), (16, 12), (20, 0)])
def test_cores_that_do_not_divide_the_heads_compute_padding(cores, padded):
    made = planned(tensor_parallel=cores)
    assert made.padded_heads == padded
    assert made.degrees == (1, 2, 4, 5, 10, 20)
    assert (cores in made.degrees) == (padded == 0)
    assert all(one.cores >= cores for one in made.machines)


def test_more_cores_share_attention_and_feed_forward_but_not_the_vocabulary():
    assert state_numbers(TURBO, 4) == state_numbers(TURBO) // 4
    shared, vocabulary = decoder_weights(TURBO, 4), 51866 * 1280
    assert shared - vocabulary == pytest.approx((decoder_weights(TURBO) - vocabulary) / 4, rel=0.01)
    assert token_operations(TURBO, 8) > token_operations(TURBO, 20)
    assert state_numbers(TURBO, 8) == state_numbers(TURBO) * 3 // 20  # ⌈20 / 8⌉ heads


def test_a_model_that_does_not_fit_any_machine_is_a_failed_plan():
    wide = replace(TURBO, n_audio_layer=512, n_text_layer=512)
    made = plan_of(wide, TARGET, "fp32", DECODE, PlanOptions())
    assert not made
    assert {one.largest_batch for one in made.machines} == {0}
    assert planned()


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_every_machine_has_plausible_figures_with_a_source(machine):
    assert machine.cores >= 1
    assert 10 * 2**30 < machine.memory_bytes < 50 * 2**30
    assert 0 < machine.reserved_bytes < 2**30
    assert 0.3e12 < machine.bandwidth < 1.3e12
    assert machine.flops["bf16"] > 3 * machine.flops["fp32"] > 0
    assert machine.source


def test_a_bundle_is_planned_with_its_own_programs(exported: Any):
    made = plan(exported("onnxruntime").folder, PlanOptions(target=TARGET.spec.name))
    assert made.target == TARGET.spec.name
    assert made
    data = json.loads(json.dumps(made.to_json()))
    assert data["estimate"] is True
    assert len(data["machines"]) == len(MACHINES)


def test_a_target_without_known_machines_or_a_wrong_precision_is_an_error(exported: Any):
    with pytest.raises(UsageError, match="no estimate for the target `onnxruntime`") as raised:
        plan(exported("onnxruntime").folder, PlanOptions(target="onnxruntime"))
    assert TARGET.spec.name in raised.value.hint
    with pytest.raises(UsageError, match="for the bundle's target `onnxruntime`"):
        plan(exported("onnxruntime").folder)
    with pytest.raises(UsageError, match="there is no target `nothing`"):
        plan(exported("onnxruntime").folder, PlanOptions(target="nothing"))
    options = PlanOptions(target=TARGET.spec.name, precision="fp16")
    with pytest.raises(UsageError, match="precision `fp16`") as raised:
        plan(exported("onnxruntime").folder, options)
    assert "fp32, bf16" in raised.value.hint
    for wrong in ({"batch": 0}, {"tensor_parallel": 0}, {"batch": 10**9}):
        with pytest.raises(UsageError, match="expected 1 to"):
            PlanOptions(**wrong)


def test_a_published_name_is_planned_without_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whisperport.model.checkpoint.load_checkpoint", lambda *_: 1 / 0)

    assert published_dims("turbo") == TURBO
    assert published_dims("turbo.en") is None
    assert plan("turbo", PlanOptions(target="aws-neuron")).heads == (20, 20)
    assert plan("tiny.en", PlanOptions(target="aws-neuron")).heads == (6, 6)


# Times that are predicted from published ones


def with_times(monkeypatch: pytest.MonkeyPatch, *tables: PublishedTimes) -> Target:
    """A target of its own class, so that no other target has times of its machines."""

    class Chip(type(TARGET)):  # type: ignore[misc]
        pass

    target = Chip.__new__(Chip)
    target.__dict__.update(vars(TARGET))
    target.machines, target.published = (), tables
    assert predict(target, TURBO, "fp16") == () or len(tables) > 1
    return target


def measured(machine: str, ms_per_work: float, c: float, **options: Any) -> PublishedTimes:
    """Times of a machine whose speed and c are these, of four models; tiny and turbo are fitted."""
    models = ("tiny", "base", "small", "large-v3-turbo")
    sizes = {name: published_dims(name) for name in models}
    times = {
        part: {
            name: ms_per_work * np.dot(work(part, dims, "fp16"), (1, c))
            for name, dims in sizes.items()
        }
        for part in PARTS
    }
    fitted = ("tiny", "large-v3-turbo")
    return PublishedTimes(
        machine=machine,
        precision="fp16",
        source="here",
        encoder_ms=times["encoder"],
        token_ms=times["token"],
        **{"fitted": fitted, "software": "1", "context": 448, **options},
    )


def test_times_that_follow_the_law_are_predicted_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given two machines of different speed, on which an attention score costs as much as 500 operations
    slow, fast = measured("slow", 3e-9, 500), measured("fast", 1e-9, 500)
    other = measured("fast", 9e-9, 500, fitted=(), software="2")  # nothing follows from it
    target = with_times(monkeypatch, slow, fast, other)
    # when a model is planned that is between those that were fitted
    predicted = predict(target, published_dims("small"), "fp16")
    # then each machine has the time that it would have, which is the published one
    assert [(one.machine, one.part) for one in predicted] == [
        (machine, part) for machine in ("slow", "fast") for part in PARTS
    ]
    for one in predicted:
        assert one.software == "1"
        assert one.seconds == pytest.approx(one.published_s, rel=0.01)
        assert one.interval_s == pytest.approx((one.seconds, one.seconds), rel=0.02)
        assert not one.extrapolated
    # and a larger one has none, and is called extrapolated
    larger = predict(target, published_dims("large-v3"), "fp16")
    assert [one.extrapolated for one in larger] == [True] * 4  # its encoder has K/V of more layers
    # and so has one that is smaller than the smallest
    smaller = replace(published_dims("tiny"), n_audio_layer=1, n_text_layer=1)
    assert [one.extrapolated for one in predict(target, smaller, "fp16")] == [True] * 4
    assert predict(target, published_dims("small"), "fp32") == ()


def test_each_version_of_the_software_has_a_prediction_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a compiler whose next version makes everything four times as slow
    old, new = measured("chip", 1e-9, 500), measured("chip", 4e-9, 500, software="2")
    predicted = predict(with_times(monkeypatch, old, new), published_dims("small"), "fp16")
    assert [one.software for one in predicted] == ["1", "1", "2", "2"]
    for first, second in zip(predicted[:2], predicted[2:], strict=True):
        assert second.seconds == pytest.approx(4 * first.seconds, rel=0.01)


def test_what_one_model_gives_has_no_interval() -> None:
    for one in plan("tiny", PlanOptions(target="qcm6490")).predicted:
        assert one.interval_s is None
        assert one.extrapolated  # small was published


def test_quantiles_are_those_of_students_t() -> None:
    # Abramowitz and Stegun, table 26.10: 0.9 on one side
    for freedom, right in ((5, 1.476), (10, 1.372), (30, 1.310)):
        assert student_t(0.9, freedom) == pytest.approx(right, abs=6e-4)


def test_one_machine_with_one_model_predicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = measured("chip", 1e-9, 500, fitted=("tiny",))
    target = with_times(monkeypatch, one)
    assert predict(target, published_dims("small"), "fp16") == ()


def test_the_page_has_what_the_benchmark_prints_and_its_intervals_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # given the published times that predictions do not follow from
    found = predicted.rows()
    # then there are enough, and 80% of the intervals hold them
    held = [low <= published <= high for *_, published, _, low, high in found]
    assert len(held) >= 20
    assert sum(held) >= 0.8 * len(held)
    # and the page has the table
    predicted.main()
    printed = capsys.readouterr().out.strip()
    assert printed in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


def test_a_checkpoint_without_a_target_is_planned_for_all_that_are_known() -> None:
    planned = plan("small")
    names = {one.target for one in planned.predicted}
    assert names == {target.spec.name for target in TARGETS if target.published}
    assert planned.machines == ()
    assert planned
    # one text was measured, and no target but that with machines has this precision
    assert plan("small", PlanOptions(batch=2)).predicted == ()
    assert plan("small", PlanOptions(batch=2)).target == TARGET.spec.name
    assert plan("small", PlanOptions(precision="bf16")).predicted == ()
    # what was not measured for a target is an error that says what was
    with pytest.raises(UsageError, match="with these options") as raised:
        plan("small", PlanOptions(target="sm8650", batch=2))
    assert "fp16, w8a16" in raised.value.why


def test_what_was_measured_with_a_shorter_cache_is_shown_beside_what_is_predicted() -> None:
    # given small, whose times were published with a cache of 200 rows
    (encoder, token) = plan("small", PlanOptions(target="sm8650")).predicted
    assert (encoder.published_s, token.published_s) == (0.084552, 0.009816)
    # when the cache has 448, then a token takes longer than with 200, and an encoder as long
    shorter = replace(published_dims("small"), n_text_ctx=200)
    (same, fewer) = predict(get_target("sm8650"), shorter, "fp16")
    assert same == encoder
    assert fewer.seconds < token.seconds
    assert fewer.published_s == token.published_s


@pytest.mark.parametrize("precision", ["fp16", "w8a16"])
def test_a_bundle_is_planned_for_the_targets_and_precisions_of_its_programs(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a bundle whose encoder is on one target, and whose decoder is on another
    placed = {
        "encoder": SimpleNamespace(target="sm8550", precision=precision),
        "step": SimpleNamespace(target="onnxruntime", precision="fp32"),
    }
    module = importlib.import_module("whisperport.build.plan")
    monkeypatch.setattr(module, "_read", lambda _: (TURBO, DECODE, placed, ()))
    # when it is planned, then only what a known target runs has a time, in the precision that it has
    predicted = plan("bundle").predicted
    assert {(one.target, one.part) for one in predicted} == {("sm8550", "encoder")}
    assert {one.precision for one in predicted} == {precision}
    # and no time for a part of which another target runs a program
    placed["cross_kv"] = placed["step"]
    with pytest.raises(UsageError, match="no estimate"):
        plan("bundle")
