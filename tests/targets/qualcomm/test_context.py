"""Compiled files are input of unknown origin: what is read of them, and what is rejected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.qualcomm.chips import CHIPS
from whisperport.targets.qualcomm.compiler import check_chip
from whisperport.targets.qualcomm.context import COMPATIBILITY, check_context, read_context

from ...extent import core_or_all

SPEC = ProgramSpec("step", (TensorSpec("x", (1, 8)),), (TensorSpec("y", (1, 4)),))


def compiled(**changed: Any) -> ModelProto:
    """Return what ONNX Runtime writes for a small program, with changed attributes of its node."""
    attributes = {
        "main_context": 1,
        "embed_mode": 1,
        "ep_cache_context": b"context binary",
        "ep_sdk_version": "v2.51.0.260929181845",
        "source": "QNNExecutionProvider",
        **changed,
    }
    given = {name: value for name, value in attributes.items() if value is not None}
    node = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", **given)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
    )
    model = helper.make_model(graph)
    model.metadata_props.add(key=COMPATIBILITY, value="v2:6:2.51.0:5.51.0:75:57:0:0")
    return model


def written(folder: Path, model: ModelProto) -> Path:
    path = folder / "step.qnn"
    path.write_bytes(model.SerializeToString())
    return path


def test_a_compiled_file_states_its_chip_compiler_inputs_and_outputs(tmp_path):
    context = check_context(written(tmp_path, compiled()), SPEC)

    assert (context.soc_model, context.architecture) == (57, 75)
    assert context.compiler == "2.51.0"
    assert context.context_bytes == len(b"context binary")
    assert (context.inputs, context.outputs) == (SPEC.inputs, SPEC.outputs)


def second_node(model: ModelProto) -> None:
    model.graph.node.add(op_type="Identity", input=["x"], output=["z"])


def with_weights(model: ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0]))


def other_operator(model: ModelProto) -> None:
    model.graph.node[0].op_type = "Loop"


def other_domain(model: ModelProto) -> None:
    model.graph.node[0].domain = "custom"


def with_function(model: ModelProto) -> None:
    model.functions.add(name="f")


def repeated_attribute(model: ModelProto) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute("embed_mode", 0))


def free_input(model: ModelProto) -> None:
    model.graph.node[0].input[0] = "elsewhere"


def dynamic(model: ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"


@pytest.mark.parametrize(
    "change",
    [
        second_node,
        with_weights,
        other_operator,
        other_domain,
        with_function,
        repeated_attribute,
        free_input,
        dynamic,
    ],
)
def test_a_file_with_anything_else_in_it_is_rejected(
    tmp_path: Path, change: Callable[[ModelProto], None]
) -> None:
    model = compiled()
    change(model)

    with pytest.raises(BundleError, match=r"step\.qnn is not a compiled file") as refused:
        read_context(written(tmp_path, model))

    assert "whisperport compile" in refused.value.hint


@pytest.mark.parametrize("embed_mode", [None, 0, 2])
def test_a_file_that_names_another_file_is_rejected(tmp_path, embed_mode):
    model = compiled(embed_mode=embed_mode, ep_cache_context=b"../../etc/passwd")

    with pytest.raises(BundleError, match="is not a compiled file") as refused:
        read_context(written(tmp_path, model))

    assert refused.value.why == "the context binary is not inside this file"


def test_a_file_without_a_context_is_rejected(tmp_path):
    for empty in (None, b""):
        with pytest.raises(BundleError) as refused:
            read_context(written(tmp_path, compiled(ep_cache_context=empty)))
        assert refused.value.why == "it has no context binary"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            ProgramSpec("step", (TensorSpec("x", (1, 9)),), SPEC.outputs),
            "inputs have no 'x' [1, 9]",
        ),
        (ProgramSpec("step", (), SPEC.outputs), "inputs have 'x' [1, 8] float32 too"),
        (ProgramSpec("step", SPEC.inputs, ()), "outputs have 'y' [1, 4] float32 too"),
        (
            ProgramSpec("step", SPEC.inputs, (TensorSpec("y", (1, 4), "float16"),)),
            "outputs have no 'y' [1, 4] float16",
        ),
    ],
)
def test_a_file_of_another_program_is_rejected(tmp_path, spec, words):
    with pytest.raises(BundleError, match="does not compute `step`") as refused:
        check_context(written(tmp_path, compiled()), spec)

    assert words in refused.value.why


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    for path in (tmp_path / "none.qnn", tmp_path):
        with pytest.raises(BundleError, match="is not a compiled file"):
            read_context(path)


def test_a_chip_that_the_file_does_not_state_is_not_compared(tmp_path):
    for value in ("", "v3:new format", "v2:6:2.51.0:5.51.0:75:57x"):
        model = compiled()
        model.metadata_props[0].value = value
        context = read_context(written(tmp_path, model))
        assert (context.soc_model, context.architecture) == (None, None)
        for chip in CHIPS:
            check_chip(context, chip, tmp_path / "step.qnn")


def test_a_chip_that_the_file_states_is_compared(tmp_path):
    path = written(tmp_path, compiled())
    context = read_context(path)

    for chip in CHIPS:
        if chip.name == "sm8650":
            check_chip(context, chip, path)
            continue
        with pytest.raises(BundleError, match=f"for another chip than `{chip.name}`"):
            check_chip(context, chip, path)


@settings(max_examples=core_or_all(100, 3000))
@given(data=st.data())
def test_changed_bytes_are_an_error_or_a_description(tmp_path_factory, data):
    content = bytearray(compiled().SerializeToString())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "changed.qnn"
    path.write_bytes(content)

    try:
        context = read_context(path)
    except BundleError:
        return
    assert context.context_bytes > 0
    assert len({tensor.name for tensor in context.inputs}) == len(context.inputs)
