"""What a board cannot run is rejected by name before a checkpoint is read or a program is lowered."""

from pathlib import Path

import pytest

from whisperport.errors import LoweringError
from whisperport.exporting.export import ExportOptions, export
from whisperport.exporting.placing import PlacementRequest, place
from whisperport.trace.variants import program_names

MISSING = "/no/such/checkpoint"  # reading it would fail with another error


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("genio1200", ExportOptions(), ("transformer", "MDLA 2.0", "Genio 1200", "encoder")),
        ("genio1200", ExportOptions(precision="w8a16"), ("16-bit", "w8a16", "16x8", "MT8395")),
        ("genio350", ExportOptions(), ("no MDLA", "MT8365", "Genio 350")),
        (
            "onnxruntime",
            ExportOptions(placement={"step": "genio1200"}),
            ("`step`", "attention", "MDLA 2.0"),
        ),
        (
            "onnxruntime",
            ExportOptions(placement={"cross_kv": "genio1200"}, precisions={"cross_kv": "w8a16"}),
            ("`cross_kv`", "w8a16", "16x8"),
        ),
    ],
)
def test_it_is_named_with_the_reason_and_another_way_before_anything_is_read(
    target: str, options: ExportOptions, words: tuple[str, ...], tmp_path: Path
) -> None:
    # when
    with pytest.raises(LoweringError) as rejected:
        export(MISSING, target, tmp_path / "bundle", options)

    # then
    assert all(word in str(rejected.value) for word in words), str(rejected.value)
    assert "--target litert" in rejected.value.hint
    assert list(tmp_path.iterdir()) == []


def test_linears_alone_can_be_placed_where_attention_cannot() -> None:
    # when
    found = place(
        PlacementRequest(target="onnxruntime", programs={"cross_kv": "genio1200"}), program_names()
    )

    # then
    assert found.placements["cross_kv"].target == "genio1200"
    assert found.placements["cross_kv"].precision == "fp16"


@pytest.mark.parametrize("target", ["genio510", "genio520", "genio700", "genio720"])
@pytest.mark.parametrize("precision", ["", "fp16", "w8a16", "w8a8"])
def test_boards_with_a_later_npu_accept_every_program_in_every_precision(
    target: str, precision: str
) -> None:
    # given: every program on the NPU, the decoder included
    request = PlacementRequest(
        target=target, programs=dict.fromkeys(program_names(), target), precision=precision
    )

    # when
    found = place(request, program_names())

    # then
    assert {one.target for one in found.placements.values()} == {target}
    assert {one.precision for one in found.placements.values()} == {precision or "fp16"}


def test_by_default_the_encoder_and_the_cross_kv_are_on_the_npu_and_the_decoder_on_the_cpu() -> (
    None
):
    found = place(PlacementRequest(target="genio720"), program_names())

    on_the_npu = {name for name, one in found.placements.items() if one.target == "genio720"}
    assert on_the_npu == {"encoder", "cross_kv"}
    assert len({one.target for one in found.placements.values()}) == 2
