"""The chips as data, and what is rejected before anything is lowered."""

from dataclasses import fields

import pytest

from whisperport.errors import LoweringError, UsageError
from whisperport.exporting import ExportOptions, export
from whisperport.placing import PlacementRequest, place
from whisperport.targets import get_target
from whisperport.targets.rockchip.chips import CHIPS, Chip
from whisperport.targets.rockchip.compiler import QUANTIZED
from whisperport.verification import GATES

PROGRAMS = ("encoder", "cross_kv", "prefill_4", "prefill_64", "step", "align")


@pytest.fixture(params=CHIPS, ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Chip:
    return request.param


def test_every_value_has_a_source(chip):
    facts = {field.name for field in fields(chip)} - {"name", "sources"}

    assert set(chip.sources) == facts
    assert all(chip.sources.values())


def test_every_precision_can_be_compiled_and_verified(chip):
    assert chip.precisions[0] == "fp16"
    assert set(chip.precisions) == {"fp16", *QUANTIZED}
    assert set(chip.precisions) <= set(GATES)


@pytest.mark.parametrize(
    ("name", "reason"), [("rk3588", "rejects it for this chip"), ("rk3562", "munmap_chunk")]
)
def test_eight_bit_weights_with_16_bit_activations_are_rejected_before_the_checkpoint_is_read(
    tmp_path, name, reason
):
    options = ExportOptions(precision="w8a16")

    with pytest.raises(LoweringError, match=f"`{name}` does not support `encoder`") as refused:
        export(tmp_path / "no-checkpoint", name, tmp_path / "out", options)

    assert reason in refused.value.why
    assert "fp16, w8a8, w16a16" in refused.value.hint


def test_a_precision_that_no_chip_has_is_a_usage_error():
    with pytest.raises(UsageError, match="bf16") as refused:
        place(PlacementRequest(target="rk3588", precision="bf16"), PROGRAMS)

    assert "fp16, w8a8, w16a16" in refused.value.hint


@pytest.mark.parametrize("on_npu", [("encoder",), ("encoder", "cross_kv"), PROGRAMS])
def test_the_encoder_alone_with_cross_kv_and_everything_are_placements(on_npu):
    request = PlacementRequest(target="onnxruntime", programs=dict.fromkeys(on_npu, "rk3588"))

    placed = place(request, PROGRAMS)

    found = {name for name, one in placed.placements.items() if one.target == "rk3588"}
    assert found == set(on_npu)


def test_emulation_is_in_the_precision_of_the_lowered_file():
    target = get_target("rk3588")

    assert {target.emulated_precision(one) for one in target.spec.precisions} == {"fp32"}
