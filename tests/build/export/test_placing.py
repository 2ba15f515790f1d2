"""Which target, precision and options each program gets."""

import pytest

from whisperport.build.export.placing import Placed, PlacementRequest, place
from whisperport.errors import UsageError
from whisperport.program.placement import Placement

NAMES = ("encoder", "cross_kv", "prefill_4", "step", "align")
CPU, CHIP = "onnxruntime", "hailo8l"


def placed(target: str = CHIP, **asked: object) -> Placed:
    return place(PlacementRequest(target=target, **asked), NAMES)  # type: ignore[arg-type]


def test_every_program_goes_to_the_target() -> None:
    found = placed(CPU)

    assert found.placements == {name: Placement(CPU, "fp32", {}) for name in NAMES}
    assert list(found.targets) == [CPU]


def test_programs_that_a_target_does_not_run_go_to_its_fallback_target() -> None:
    found = placed()

    assert found.placements["encoder"] == Placement(CHIP, "w8a8", {})
    assert {found.placements[name].target for name in NAMES[1:]} == {CPU}


def test_a_program_placed_by_name_goes_there() -> None:
    found = placed(programs={"align": "xnnpack", "encoder": CPU})

    assert [found.placements[name].target for name in ("encoder", "align", "step")] == [
        CPU,
        "xnnpack",
        CPU,
    ]
    assert CHIP not in found.targets


def test_options_configure_each_target_by_name_the_fallback_target_included() -> None:
    found = placed(options={f"{CHIP}.sequence-length": "24", f"{CPU}.opset": "14"})

    assert found.placements["encoder"].options == {"sequence-length": "24"}
    assert found.placements["step"].options == {"opset": "14"}
    assert found.target_of("step").options.opset == 14  # type: ignore[attr-defined]
    assert found.target_of("encoder").options.sequence_length == 24  # type: ignore[attr-defined]


def test_a_precision_holds_for_the_target_and_not_for_its_fallback_target() -> None:
    found = placed(precision="w8a8")

    assert found.placements["encoder"].precision == "w8a8"
    assert found.placements["step"].precision == "fp32"


def test_a_precision_can_be_given_for_one_program() -> None:
    found = placed(CPU, precisions={"step": "fp32"})

    assert found.placements["step"].precision == "fp32"


@pytest.mark.parametrize(
    ("asked", "words", "hint"),
    [
        ({"target": "toaster"}, "no target `toaster`", CPU),
        ({"programs": {"step": "toaster"}}, "no target `toaster`", CPU),
        ({"programs": {"stepp": CPU}}, "no program `stepp`", "programs are encoder, cross_kv"),
        ({"precision": "int4"}, "cannot run `encoder` in the precision `int4`", f"`{CHIP}`: w8a8"),
        ({"precisions": {"step": "bf16"}}, "cannot run `step` in the precision", f"`{CPU}`: fp32"),
        ({"precisions": {"stepp": "fp32"}}, "no program `stepp`", "programs are encoder"),
        ({"options": {"opset": "13"}}, "no option `opset` for this command", f"{CPU}.opset"),
        ({"options": {f"{CPU}.opsett": "13"}}, "no option `opsett`", f"{CPU}.opset"),
        ({"options": {f"{CPU}.opset": "12"}}, f"`{CPU}.opset` cannot be `12`", "13 to 20"),
        (
            {"options": {"xnnpack.opset": "13"}},
            "no option `xnnpack.opset` for this command",
            f"{CHIP}.sequence-length",
        ),
    ],
)
def test_what_is_unknown_or_out_of_range_is_rejected_with_what_is_valid(
    asked: dict[str, object], words: str, hint: str
) -> None:
    with pytest.raises(UsageError) as rejected:
        placed(**{"target": CHIP, **asked})  # type: ignore[arg-type]

    assert words in rejected.value.what
    assert hint in rejected.value.hint


def test_a_program_on_request_is_placed_only_if_it_is_named() -> None:
    def programs(**asked: object) -> list[str]:
        request = PlacementRequest(target=CPU, **asked)  # type: ignore[arg-type]
        return list(place(request, NAMES, ["projection"]).placements)

    assert programs() == list(NAMES)
    assert programs(programs={"projection": "xnnpack"}) == [*NAMES, "projection"]
    assert programs(precisions={"projection": "fp32"}) == [*NAMES, "projection"]
    with pytest.raises(UsageError) as caught:
        programs(programs={"projektion": "xnnpack"})
    assert "align, projection" in caught.value.hint
