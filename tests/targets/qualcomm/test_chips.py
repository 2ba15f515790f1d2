"""The chips as data, and what is rejected before anything is lowered."""

import pytest

from whisperport.errors import LoweringError
from whisperport.exporting.export import ExportOptions, export
from whisperport.exporting.placing import PlacementRequest, place
from whisperport.targets.qualcomm.chips import CHIPS, Chip

PROGRAMS = ("encoder", "cross_kv", "prefill_4", "prefill_64", "step", "align")


@pytest.fixture(params=CHIPS, ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Chip:
    return request.param


def test_a_chip_has_a_number_and_a_generation_of_its_own(chip):
    same = [one for one in CHIPS if one.soc_model == chip.soc_model]

    assert same == [chip]
    assert chip.architecture.name == f"v{chip.architecture.number}"
    assert chip.vtcm_mib >= 2
    assert chip.architecture.source


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
