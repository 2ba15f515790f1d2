"""Compiled files are input of unknown origin: what is read of them, and what is rejected."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets import get_target
from whisperport.targets.rockchip.rknn_file import check_rknn, read_rknn

from ...extent import core_or_all
from .rknn_bytes import SPEC, description, rknn_bytes


def written(folder: Path, content: bytes) -> Path:
    path = folder / "step.rknn"
    path.write_bytes(content)
    return path


def test_a_compiled_file_states_its_chip_compiler_inputs_and_outputs(tmp_path):
    found = check_rknn(written(tmp_path, rknn_bytes()), "rk3588", SPEC)

    assert (found.chips, found.compiler) == (("rk3588",), "2.5.0")
    assert [(one.name, one.shape, one.type) for one in (*found.inputs, *found.outputs)] == [
        ("x", (1, 1, 8), "float16"),
        ("mask", (1, 1, 5), "float16"),
        ("logits", (1, 70), "float16"),
    ]
    assert found.program_bytes == len(b"X\0\0\0RKNN" + b"program!" * 8)


def test_the_order_is_that_of_the_program_and_not_of_the_list(tmp_path):
    described = description()
    described["graph"].reverse()

    found = read_rknn(written(tmp_path, rknn_bytes(described)))

    assert [one.name for one in found.inputs] == ["x", "mask"]


def changed(**fields: Any) -> dict[str, Any]:
    return {**description(), **fields}


GRAPH = description()["graph"]
TENSORS = description()["norm_tensor"]


@pytest.mark.parametrize(
    "described",
    [
        [],
        "text",
        {},
        changed(graph=[]) | {"graph": None},
        changed(graph=[{"left": "input"}]),
        changed(graph=[{**GRAPH[0], "right_tensor_id": 3}]),
        changed(graph=[{**GRAPH[0], "right_tensor_id": -1}]),
        changed(graph=[{**GRAPH[0], "right_tensor_id": True}]),
        changed(graph=[{**GRAPH[0], "left_tensor_id": 1}]),
        changed(graph=[GRAPH[0], GRAPH[0]]),
        changed(norm_tensor=[]),
        changed(norm_tensor=[{**TENSORS[0], "size": [0]}, *TENSORS[1:]]),
        changed(norm_tensor=[{**TENSORS[0], "size": [2**40]}, *TENSORS[1:]]),
        changed(norm_tensor=[{**TENSORS[0], "size": [1] * 17}, *TENSORS[1:]]),
        changed(norm_tensor=[{**TENSORS[0], "dtype": "int8"}, *TENSORS[1:]]),
        changed(norm_tensor=[{**TENSORS[0], "url": 5}, *TENSORS[1:]]),
        changed(target_platform="rk3588"),
        changed(version=None),
    ],
    ids=str,
)
def test_a_description_of_another_form_is_rejected(tmp_path, described):
    with pytest.raises(BundleError, match=r"step\.rknn is not a compiled file") as refused:
        read_rknn(written(tmp_path, rknn_bytes(described)))

    assert refused.value.why
    assert "whisperport compile" in refused.value.hint


WHOLE = rknn_bytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"RKNN",
        b"\x08\x01" + WHOLE[2:],  # another format
        WHOLE[:100],
        WHOLE[:-1],
        WHOLE + b"!",
        WHOLE[:16] + b"\xff" * 8 + WHOLE[24:],
        WHOLE[:16] + bytes(8) + WHOLE[24:],
        WHOLE.replace(b'"graph"', b'"gra\xffh"'),
        WHOLE.replace(b'"step"', b'"step'),
    ],
    ids=["empty", "magic", "onnx", "half", "cut", "longer", "huge", "no program", "utf-8", "same"],
)
def test_a_damaged_file_is_rejected(tmp_path, content):
    path = written(tmp_path, content)
    if content == WHOLE:
        assert read_rknn(path)
        return
    with pytest.raises(BundleError, match="is not a compiled file"):
        read_rknn(path)


def test_a_length_that_points_behind_the_file_reads_nothing(tmp_path):
    text = json.dumps(description()).encode()
    lying = WHOLE[: -len(text) - 8] + (2**62).to_bytes(8, "little") + text

    with pytest.raises(BundleError, match="is not a compiled file") as refused:
        read_rknn(written(tmp_path, lying))

    assert "length of its description" in refused.value.why


def test_a_missing_file_and_a_pipe_are_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe.rknn")

    with pytest.raises(BundleError, match="is not a compiled file"):
        read_rknn(tmp_path / "missing.rknn")
    with pytest.raises(BundleError, match="is not a compiled file") as refused:
        read_rknn(tmp_path / "pipe.rknn")
    assert "a pipe" in refused.value.why


@settings(max_examples=core_or_all(150, 5000))
@given(st.data())
def test_any_change_of_a_file_is_read_or_rejected(tmp_path_factory, data):
    changed = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
        if not changed:
            break
    path = tmp_path_factory.getbasetemp() / "fuzzed.rknn"
    path.write_bytes(changed)

    with suppress(BundleError):  # any other exception is a failure
        check_rknn(path, "rk3588", SPEC)


# What belongs to another program -------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        ProgramSpec("step", SPEC.inputs[::-1], SPEC.outputs),
        ProgramSpec("step", SPEC.inputs[:1], SPEC.outputs),
        ProgramSpec("step", SPEC.inputs, (TensorSpec("logits", (1, 71)),)),
    ],
    ids=["other order", "fewer inputs", "other shape"],
)
def test_a_file_of_another_program_is_rejected(tmp_path, other):
    with pytest.raises(BundleError, match=r"step\.rknn does not compute `step`") as refused:
        check_rknn(written(tmp_path, rknn_bytes()), "rk3588", other)

    assert "expected" in refused.value.why


def test_a_file_for_another_chip_is_rejected(tmp_path):
    with pytest.raises(BundleError, match="for another chip than `rk3576`") as refused:
        check_rknn(written(tmp_path, rknn_bytes()), "rk3576", SPEC)

    assert "compiled for rk3588" in refused.value.why


@pytest.mark.parametrize(
    ("precision", "type"), [("fp16", "int8"), ("w8a8", "int16"), ("w16a16", "")]
)
def test_a_file_in_another_precision_is_rejected(tmp_path, precision, type):
    compiler = get_target("rk3588").compiler.in_precision(precision)
    path = written(tmp_path, rknn_bytes(description(type=type)))

    with pytest.raises(BundleError, match=f"was not compiled in the precision {precision}"):
        compiler.check(path, SPEC)
