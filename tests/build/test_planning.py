"""Estimates of memory and least times, against values computed by hand and against the real programs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from whisperport.build.plan import (
    DECODE,
    PlanOptions,
    cross_kv_weights,
    decoder_weights,
    encoder_operations,
    encoder_weights,
    plan,
    plan_of,
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
from whisperport.targets import TARGETS

from ..micro import TURBO

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
