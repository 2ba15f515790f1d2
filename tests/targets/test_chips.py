"""What the tables of all vendors' chips have in common, and placements on them."""

from dataclasses import fields
from typing import Any

import pytest

from whisperport.errors import UsageError
from whisperport.exporting.placing import PlacementRequest, place
from whisperport.targets import get_target
from whisperport.targets.ethos_u.chips import NPUS
from whisperport.targets.qualcomm.chips import CHIPS as SNAPDRAGONS
from whisperport.targets.rockchip.chips import CHIPS as ROCKCHIPS
from whisperport.verification import GATES

PROGRAMS = ("encoder", "cross_kv", "prefill_4", "prefill_64", "step", "align")
CHIPS = (*NPUS, *SNAPDRAGONS, *ROCKCHIPS)


@pytest.fixture(params=CHIPS, ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["rk3588", "sm8650", "ethos-u85"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_value_has_a_source(chip: Any) -> None:
    facts = {field.name for field in fields(chip)} - {"name", "sources"}

    assert set(chip.sources) == facts
    assert all(chip.sources.values())


def test_every_precision_can_be_verified(chip: Any) -> None:
    precisions = get_target(chip.name).spec.precisions

    assert precisions
    assert set(precisions) <= set(GATES)


def test_a_precision_that_a_chip_does_not_have_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="bf16") as refused:
        place(PlacementRequest(target=name, precision="bf16"), PROGRAMS)

    assert ", ".join(get_target(name).spec.precisions) in refused.value.hint


@pytest.mark.parametrize("on_npu", [("encoder",), ("encoder", "cross_kv"), PROGRAMS])
def test_the_encoder_alone_with_cross_kv_and_everything_are_placements(
    name: str, on_npu: tuple[str, ...]
) -> None:
    request = PlacementRequest(target="onnxruntime", programs=dict.fromkeys(on_npu, name))

    placed = place(request, PROGRAMS)

    found = {program for program, one in placed.placements.items() if one.target == name}
    assert found == set(on_npu)


@pytest.mark.parametrize(
    ("name", "precisions"),
    [
        ("rk3588", {"fp16": "fp32", "w8a8": "fp32", "w16a16": "fp32"}),  # `compile` quantizes
        ("sm8650", {"fp16": "fp32", "w8a16": "w8a16"}),  # `export` quantizes
    ],
)
def test_emulation_has_the_precision_of_the_lowered_file(
    name: str, precisions: dict[str, str]
) -> None:
    target = get_target(name)

    assert {one: target.emulated_precision(one) for one in target.spec.precisions} == precisions
