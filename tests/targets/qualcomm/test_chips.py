"""The chips as data, and what is rejected before anything is lowered."""

from dataclasses import fields

import pytest

from whisperport.errors import LoweringError, UsageError
from whisperport.exporting import ExportOptions, export
from whisperport.placing import PlacementRequest, place
from whisperport.targets import get_target
from whisperport.targets.qualcomm.chips import CHIPS, Chip

PROGRAMS = ("encoder", "cross_kv", "prefill_4", "prefill_64", "step", "align")


@pytest.fixture(params=CHIPS, ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Chip:
    return request.param


def test_every_value_has_a_source(chip):
    facts = {field.name for field in fields(chip)} - {"name", "sources"}

    assert set(chip.sources) == facts
    assert all(chip.sources.values())
    assert chip.architecture.source


def test_a_chip_has_a_number_and_a_generation_of_its_own(chip):
    same = [one for one in CHIPS if one.soc_model == chip.soc_model]

    assert same == [chip]
    assert chip.architecture.name == f"v{chip.architecture.number}"
    assert chip.vtcm_mib >= 2


def test_numbers_are_those_of_the_vendors_own_table(chip):
    schema = pytest.importorskip("executorch.backends.qualcomm.serialization.qc_schema")
    name = chip.name.upper()
    info = schema._soc_info_table[schema.QcomChipset[name]]

    assert (chip.soc_model, chip.architecture.number, chip.vtcm_mib) == (
        int(info.soc_model),
        int(info.htp_info.htp_arch),
        info.htp_info.vtcm_size_in_mb,
    )


def test_v68_in_float16_is_rejected_by_name_before_the_checkpoint_is_read(tmp_path):
    options = ExportOptions(precision="fp16")

    with pytest.raises(LoweringError, match=r"`qcm6490` does not support `encoder`") as refused:
        export(tmp_path / "no-checkpoint", "qcm6490", tmp_path / "out", options)

    assert "v68" in refused.value.why
    assert "fp16" in refused.value.what
    assert "--precision w8a16" in refused.value.hint


def test_v68_is_quantized_by_default_and_others_compute_in_float16():
    for name, precision in (("qcm6490", "w8a16"), ("sm8450", "fp16"), ("sm8650", "fp16")):
        placed = place(PlacementRequest(target=name), PROGRAMS)
        assert {one.precision for one in placed.placements.values()} == {precision}
        assert {one.target for one in placed.placements.values()} == {name}


def test_a_precision_that_no_chip_has_is_a_usage_error():
    with pytest.raises(UsageError, match="w8a8") as refused:
        place(PlacementRequest(target="sm8650", precision="w8a8"), PROGRAMS)

    assert "fp16, w8a16" in refused.value.hint


@pytest.mark.parametrize("on_npu", [("encoder",), ("encoder", "cross_kv"), PROGRAMS])
def test_the_encoder_alone_with_cross_kv_and_everything_are_placements(on_npu):
    request = PlacementRequest(target="onnxruntime", programs=dict.fromkeys(on_npu, "sm8650"))

    placed = place(request, PROGRAMS)

    found = {name for name, one in placed.placements.items() if one.target == "sm8650"}
    assert found == set(on_npu)


def test_emulation_has_the_precision_of_the_lowered_file():
    target = get_target("sm8650")

    assert target.emulated_precision("fp16") == "fp32"
    assert target.emulated_precision("w8a16") == "w8a16"
