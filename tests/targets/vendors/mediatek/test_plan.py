"""What MediaTek's compiler prints, in the forms of scripts that read it, and as hostile text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.targets.vendors.mediatek.chips import GENIO720
from whisperport.targets.vendors.mediatek.plan import (
    ExecutionPlan,
    notes_of,
    read_io,
    read_plan,
)
from whisperport.targets.vendors.mediatek.stages import _error, architectures

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
