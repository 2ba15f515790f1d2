"""The chips as data, and what is rejected before anything is lowered."""

import pytest

from whisperport.errors import LoweringError
from whisperport.exporting.export import ExportOptions, export
from whisperport.targets.rockchip.chips import CHIPS, Chip
from whisperport.targets.rockchip.compiler import QUANTIZED

PROGRAMS = ("encoder", "cross_kv", "prefill_4", "prefill_64", "step", "align")


@pytest.fixture(params=CHIPS, ids=lambda chip: chip.name)
def chip(request: pytest.FixtureRequest) -> Chip:
    return request.param


def test_every_precision_can_be_compiled(chip):
    assert chip.precisions[0] == "fp16"
    assert set(chip.precisions) == {"fp16", *QUANTIZED}


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
