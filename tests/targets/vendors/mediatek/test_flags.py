"""The flags of `ncc-tflite`: those of each board, those of each option, and misspelled ones."""

from dataclasses import fields

import pytest

from whisperport.errors import UsageError
from whisperport.targets.vendors.mediatek.chips import CHIPS, GENIO350, GENIO720
from whisperport.targets.vendors.mediatek.flags import CompileOptions, flags_of

from . import fake_ncc_tflite as fake

DEFAULT = ("--relax-fp32", "--opt-accuracy", "--opt-footprint", "--fc-to-conv")


def given(**options: object) -> tuple[str, ...]:
    return flags_of(CompileOptions(**options), GENIO720).flags  # type: ignore[arg-type]


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_board_has_the_flags_of_its_npu(chip):
    flags = flags_of(CompileOptions(), chip).flags
    assert flags[0] == f"--arch={chip.npu.arch}"
    assert flags[-4:] == DEFAULT
    assert [flag for flag in flags if "l1-size" in flag] == (
        [f"--l1-size-kb={chip.npu.l1_kb}"] if chip.npu.l1_kb else []
    )
    assert (f"--num-mdla={chip.npu.cores}" in flags) == (chip is not GENIO350)
    for flag in flags:  # the fake has the flags of the documented help
        assert flag.partition("=")[0] in {*fake.WITH_VALUE, *fake.WITHOUT_VALUE}


def test_every_option_changes_the_flags():
    changes = {
        **dict.fromkeys(("relax_fp32", "opt_accuracy", "opt_footprint", "fc_to_conv"), False),
        **dict.fromkeys(("opt_aggressive", "opt_bandwidth", "reshape_to_4d"), True),
        **dict.fromkeys(("disallow_bridge", "suppress_output"), True),
        "arch": "mdla3.0",
        "opt": 1,
        "l1_size_kb": 512,
        "num_mdla": 2,
        "flags": "--mlo",
    }
    assert set(changes) == {field.name for field in fields(CompileOptions)}
    for name, value in changes.items():
        assert given(**{name: value}) != given(), name


def test_aggressive_optimization_replaces_that_for_accuracy_and_is_a_note():
    assert "--opt-aggressive" in given(opt_aggressive=True)
    assert "--opt-accuracy" not in given(opt_aggressive=True)
    assert "--opt-accuracy" in given(opt_aggressive=True, opt_accuracy=True)
    (note,) = flags_of(CompileOptions(opt_aggressive=True), GENIO720).notes
    assert "may lose accuracy" in note


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--relax-fp32", "has an option of its own"),
        ("--arch=mdla3.0", "has an option of its own"),
        ("-O2", "has an option of its own"),
        ("-d out.dla", "is not for the user"),
        ("--exec", "is not for the user"),
        ("--check-target-only", "is not for the user"),
        ("model.tflite", "is not a flag"),
        ('--gno "LTS', "cannot be read"),
    ],
)
def test_flags_that_whisperport_gives_itself_are_rejected(flags, message):
    with pytest.raises(UsageError, match=message):
        given(flags=flags)


def test_flags_of_newer_sdks_are_passed_on():
    flags = ("--gno", "LTS", "--cast-fp32=fp16", "--mem-opt", "3", "--mdla-mlo-match-info")
    assert given(flags=" ".join(flags))[-6:] == flags


@pytest.mark.parametrize("arch", ["?", "", "mdla3.0 --exec", "mdla3.0,", "-x"])
def test_an_architecture_that_is_no_name_is_rejected(arch):
    with pytest.raises(UsageError, match=r"genio720\.arch"):
        given(arch=arch)
