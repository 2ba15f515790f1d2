"""Flags of the compiler, the plan of a program, and the arrays of the device."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.errors import BundleError, UsageError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.vendors.mediatek.chips import CHIPS, GENIO350, GENIO720
from whisperport.targets.vendors.mediatek.device_io import DeviceIo, DeviceTensor
from whisperport.targets.vendors.mediatek.flags import CompileOptions, flags_of
from whisperport.targets.vendors.mediatek.printed_plan import (
    ExecutionPlan,
    notes_of,
    read_io,
    read_plan,
)
from whisperport.targets.vendors.mediatek.stages import _error, architectures

from . import fake_ncc_tflite as fake

# The flags of `ncc-tflite`: those of each board, those of each option, and misspelled ones.

DEFAULT = ("--relax-fp32", "--opt-accuracy", "--opt-footprint", "--fc-to-conv")


def flags_given(**options: object) -> tuple[str, ...]:
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
        assert flags_given(**{name: value}) != flags_given(), name


def test_aggressive_optimization_replaces_that_for_accuracy_and_is_a_note():
    assert "--opt-aggressive" in flags_given(opt_aggressive=True)
    assert "--opt-accuracy" not in flags_given(opt_aggressive=True)
    assert "--opt-accuracy" in flags_given(opt_aggressive=True, opt_accuracy=True)
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
        flags_given(flags=flags)


def test_flags_of_newer_sdks_are_passed_on():
    flags = ("--gno", "LTS", "--cast-fp32=fp16", "--mem-opt", "3", "--mdla-mlo-match-info")
    assert flags_given(flags=" ".join(flags))[-6:] == flags


@pytest.mark.parametrize("arch", ["?", "", "mdla3.0 --exec", "mdla3.0,", "-x"])
def test_an_architecture_that_is_no_name_is_rejected(arch):
    with pytest.raises(UsageError, match=r"genio720\.arch"):
        flags_given(arch=arch)


# What MediaTek's compiler prints, in the forms of scripts that read it, and as hostile text.

ENGINE = GENIO720.npu.plan_target

PLAN = """
ExecutionPlan
 ├ ExecutionStep 0
 │  └ Target: MDLA_5_3
 ├ ExecutionStep 1
 │  └ Target: EDMA_3_6
 └ ExecutionStep 2
    └ Target: MDLA_5_3
"""
IO = """
# of input tensors: 2
[0]: x
 ├ Type: kTfLiteFloat32
 └ Shape: {1,80,3000}
[1]: scale
 ├ Type: kTfLiteUInt8
 └ Shape: { 1, 1 }
# of output tensors: 1
[0]: features
 ├ Type: kTfLiteInt16
 └ Shape: {1,1500,384}
"""


def test_more_messages_than_fit_are_counted():
    plan = ExecutionPlan({ENGINE: 1}, tuple(f"OP{i}: why" for i in range(10)))
    notes = notes_of(plan, ENGINE, "Genio 720")
    assert len(notes) == 4
    assert notes[-1].startswith("7 further messages")


def test_inputs_and_outputs_are_read_with_type_and_shape():
    assert read_io(IO) == (
        ["float32[1, 80, 3000]", "uint8[1, 1]"],
        ["int16[1, 1500, 384]"],
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Type: kTfLiteFloat32\nShape: {1}",  # nothing says where outputs begin
        "Type: kTfLiteFloat32\n# of output tensors: 1\nType: kTfLiteInt8\nShape: {1}",
        IO.replace("{1,80,3000}", "{1,80," + "9" * 10_000 + "}"),
    ],
    ids=["empty", "no outputs", "no shape", "long"],
)
def test_inputs_and_outputs_in_another_form_are_not_guessed(text):
    inputs, _ = read_io(text)
    assert inputs == []


@settings(max_examples=60, deadline=None)
@given(
    st.text()
    | st.lists(st.sampled_from([*PLAN.split("\n"), *IO.split("\n"), "\x1b[2J"])).map("\n".join)
)
def test_any_text_is_read_without_an_error_and_printed_without_control_characters(text):
    plan = read_plan(text)
    read_io(text)
    architectures(text)
    notes = notes_of(plan, ENGINE, "Genio 720")
    assert all(note.isprintable() for note in notes)
    assert str(_error(1, text)).isprintable()
    assert all(target.isascii() for target in plan.targets)


def test_text_without_end_is_cut():
    plan = read_plan("OP[1]: ADD unsupported " * 200_000 + "\n" + "unsupported\n" * 200_000)
    assert len(plan.problems) <= 2
    assert all(len(problem) <= 300 for problem in plan.problems)


def test_architectures_are_the_lines_with_a_dash():
    text = (
        "Usage: --arch\nAvailable:\n - mdla5.3\n- edma3.6\r\n  -  vpu \n-- nothing\n- two words\n"
    )
    assert architectures(text) == ["mdla5.3", "edma3.6", "vpu"]
    assert architectures("ERROR: no list") == []


# The order, dtypes and quantization of a compiled program's inputs and outputs.

DATA = Path(__file__).parent / "data"
SPEC = ProgramSpec("step", (TensorSpec("x", (2, 3)),), (TensorSpec("y", (4,)),))


def described(**changes):
    x = {"name": "x", "shape": [1, 6], "dtype": "int8", "scale": 0.5, "zero_point": -3}
    y = {"name": "y", "shape": [4], "dtype": "float32", "scale": 0.0, "zero_point": 0}
    return {"inputs": [x | changes], "outputs": [y]}


def test_what_is_written_is_read_again():
    io = DeviceIo.from_json(described(), SPEC)

    assert DeviceIo.from_json(json.loads(json.dumps(io.to_json())), SPEC) == io
    assert [tensor.nbytes for tensor in (*io.inputs, *io.outputs)] == [6, 16]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "z"},
        {"shape": [5]},
        {"shape": [-2, -3]},
        {"shape": "six"},
        {"dtype": "float64"},
        {"dtype": "object"},
        {"dtype": "int8", "scale": 0},
        {"scale": float("nan")},
        {"scale": float("inf")},
        {"scale": -1},
        {"scale": None},
        {"zero_point": 128},
        {"zero_point": "x"},
        {"dtype": "float32", "scale": 0.5},
    ],
)
def test_a_wrong_description_is_refused(changes):
    with pytest.raises(BundleError, match="of `step` wrongly"):
        DeviceIo.from_json(described(**changes), SPEC)


@pytest.mark.parametrize("data", [None, [], {}, {"inputs": []}, {"inputs": [3], "outputs": []}])
def test_a_description_of_another_form_is_refused(data):
    with pytest.raises(BundleError, match="of `step` wrongly"):
        DeviceIo.from_json(data, SPEC)


@pytest.mark.parametrize(("dtype", "zero_point"), [("int8", -3), ("uint8", 128), ("int16", 0)])
def test_quantization_is_inverted_up_to_half_a_step(dtype, zero_point):
    tensor = DeviceTensor(name="x", shape=(200,), dtype=dtype, scale=0.1, zero_point=zero_point)
    values = np.random.default_rng(0).uniform(-5, 5, 200).astype(np.float32)

    integers = tensor.to_device(values, "step")
    back = tensor.from_device(integers, "float32")

    assert integers.dtype == dtype
    assert back.dtype == np.float32
    assert np.abs(back - values).max() <= 0.05 + 1e-6


def test_values_out_of_the_range_are_clipped_and_halves_are_rounded_away_from_zero():
    tensor = DeviceTensor(name="x", shape=(6,), dtype="int8", scale=1.0, zero_point=10)

    found = tensor.to_device(np.array([-1e30, -0.5, 0, 0.5, 1.4, 1e30], np.float32), "step")

    assert found.tolist() == [-128, 9, 10, 11, 11, 127]


def test_a_float16_input_of_the_device_is_converted():
    tensor = DeviceTensor(name="x", shape=(2,), dtype="float16")

    assert tensor.to_device(np.array([1, 2], np.float32), "step").dtype == np.float16
    assert tensor.from_device(np.array([1, 2], np.float16), "float32").dtype == np.float32


SMALL = ProgramSpec(
    "encoder",
    (TensorSpec("args_0", (3, 8)), TensorSpec("args_1", (3, 6))),
    (TensorSpec("output_0", (3, 4)), TensorSpec("output_1", (3, 4))),
)


def test_quantization_is_read_from_the_tflite():
    plain = DeviceIo.of_tflite(DATA / "small.tflite", SMALL)
    quantized = DeviceIo.of_tflite(DATA / "small_int8.tflite", SMALL)

    # then: a softmax is quantized with the scale 1/256 and the zero point -128, as TFLite defines
    assert plain == DeviceIo.of_spec(SMALL)
    assert {tensor.dtype for tensor in (*quantized.inputs, *quantized.outputs)} == {"int8"}
    assert quantized.outputs[1].scale == 1 / 256
    assert quantized.outputs[1].zero_point == -128
    assert sum(tensor.nbytes for tensor in quantized.inputs) == 24 + 18


def test_a_tflite_of_another_program_is_an_error():
    with pytest.raises(BundleError, match="of `step` wrongly"):
        DeviceIo.of_tflite(DATA / "small.tflite", SPEC)


def test_integers_of_64_bits_are_32_bits_on_the_device():
    spec = ProgramSpec("prefill_4", (TensorSpec("token", (2,), "int64"),), SPEC.outputs)

    (tensor,) = DeviceIo.of_spec(spec).inputs

    assert tensor.nbytes == 8
    assert tensor.to_device(np.array([3, -1]), "prefill_4").dtype == np.int32
    assert tensor.from_device(np.array([3], np.int32), "int64").dtype == np.int64
