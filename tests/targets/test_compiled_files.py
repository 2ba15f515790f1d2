"""Compiled files are input of unknown origin: what is read of them, and what is rejected."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets import get_target
from whisperport.targets.vendors.qualcomm.context import COMPATIBILITY
from whisperport.targets.vendors.rockchip.rknn_file import read_rknn

from ..extent import core_or_all
from .vendors.hailo.hef_file import hef_bytes
from .vendors.rockchip.rknn_bytes import description, rknn_bytes

# Compiled files of every vendor for a small program, as their compilers write them, without a program.

SPEC = ProgramSpec(
    "step",
    (TensorSpec("x", (1, 1, 8)), TensorSpec("mask", (1, 1, 5))),
    (TensorSpec("logits", (1, 70)),),
)
FEATURES = ProgramSpec(
    "encoder", (TensorSpec("mel", (1, 8, 1, 20)),), (TensorSpec("features", (1, 10, 16)),)
)


def rknn(folder: Path, spec: ProgramSpec = SPEC) -> Path:
    return _written(folder / f"{spec.name}.rknn", rknn_bytes(description(spec)))


def qnn(folder: Path, spec: ProgramSpec = SPEC) -> Path:
    return _written(folder / f"{spec.name}.qnn", context_model(spec).SerializeToString())


def pte(folder: Path, spec: ProgramSpec = SPEC, accelerator: str = "ethos-u85-256") -> Path:
    sides = {
        side: [f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors]
        for side, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs))
    }
    conversions = [f"quantized_decomposed::{name}quantize_per_tensor.out" for name in ("", "de")]
    built = {"accelerator": accelerator, "undelegated": conversions, **sides}
    (folder / "built.json").write_text(json.dumps(built))
    return _written(folder / f"{spec.name}.pte", b"\x20\0\0\0ET12" + bytes(8))


def hef(folder: Path, spec: ProgramSpec = FEATURES) -> Path:
    inputs = {f"net/{tensor.name}": _height_width_channels(tensor) for tensor in spec.inputs}
    outputs = {f"net/{tensor.name}": _height_width_channels(tensor) for tensor in spec.outputs}
    return _written(folder / f"{spec.name}.hef", hef_bytes(1, inputs, outputs))


def context_model(spec: ProgramSpec = SPEC, **changed: Any) -> ModelProto:
    """Return what ONNX Runtime writes for a program, with changed attributes of its node; None: without."""
    attributes = {
        "main_context": 1,
        "embed_mode": 1,
        "ep_cache_context": b"context binary",
        "ep_sdk_version": "v2.51.0.260929181845",
        "source": "QNNExecutionProvider",
        **changed,
    }
    stated = {name: value for name, value in attributes.items() if value is not None}
    names = [[tensor.name for tensor in side] for side in (spec.inputs, spec.outputs)]
    sides = [
        [
            helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.shape)
            for tensor in side
        ]
        for side in (spec.inputs, spec.outputs)
    ]
    node = helper.make_node("EPContext", *names, domain="com.microsoft", **stated)
    model = helper.make_model(helper.make_graph([node], "g", *sides))
    model.metadata_props.add(key=COMPATIBILITY, value="v2:6:2.51.0:5.51.0:75:57:0:0")
    return model


def _height_width_channels(tensor: TensorSpec) -> tuple[int, int, int]:
    shape = tensor.shape
    return (shape[2], shape[3], shape[1]) if len(shape) == 4 else (1, shape[1], shape[2])


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Target -> what writes a compiled file for it, and the program that it is of.
COMPILED: dict[str, tuple[Callable[..., Path], ProgramSpec]] = {
    "rk3588": (rknn, SPEC),
    "sm8650": (qnn, SPEC),
    "ethos-u85": (pte, SPEC),
    "hailo8": (hef, FEATURES),
}
# Target -> another of the same vendor, for which its files are not.
OTHERS = {"rk3588": "rk3576", "sm8650": "sm8550", "ethos-u85": "ethos-u55", "hailo8": "hailo10h"}


# What is read of them, and what is rejected.

FACTS: dict[str, dict[str, Any]] = {
    "rk3588": {"compiler": "2.5.0", "compiled_for": "rk3588", "program_bytes": 72},
    "sm8650": {"compiler": "2.51.0", "compiled_for": "sm8650, HTP v75", "context_bytes": 14},
    "ethos-u85": {
        "compiled_for": "ethos-u85-256",
        "plan": {"NPU subgraphs": 1, "CPU conversions": 2},
        "notes": [],
    },
    "hailo8": {"compiler": "3.31.0", "compiled_for": "Hailo-8"},
}


@pytest.fixture(params=COMPILED)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(target: str, path: Path, spec: ProgramSpec | None = None) -> dict[str, Any]:
    compiler = get_target(target).compiler
    assert compiler is not None
    return dict(compiler.check(path, spec or COMPILED[target][1]))


def test_a_compiled_file_states_its_compiler_and_its_chip(target: str, tmp_path: Path) -> None:
    make, spec = COMPILED[target]

    facts = check(target, make(tmp_path))

    assert {name: facts[name] for name in FACTS[target]} == FACTS[target]
    json.dumps(facts)
    assert spec.name in {path.stem for path in tmp_path.iterdir()}


def test_a_file_for_another_chip_is_rejected(target: str, tmp_path: Path) -> None:
    path = COMPILED[target][0](tmp_path)

    with pytest.raises(BundleError, match=f"for another chip than `{OTHERS[target]}`") as other:
        check(OTHERS[target], path, COMPILED[target][1])

    assert "compiled for" in other.value.why
    assert "compile" in other.value.hint


@pytest.mark.parametrize(
    ("side", "change"),
    [
        ("inputs", "shape"),
        ("inputs", "fewer"),
        ("inputs", "more"),
        ("outputs", "shape"),
        ("outputs", "more"),
    ],
)
def test_a_file_of_another_program_is_rejected(
    target: str, side: str, change: str, tmp_path: Path
) -> None:
    make, spec = COMPILED[target]
    tensors = getattr(spec, side)
    larger = replace(tensors[-1], shape=(*tensors[-1].shape[:-1], 99))
    changed = {
        "shape": (*tensors[:-1], larger),
        "fewer": tensors[:-1],
        "more": (*tensors, TensorSpec("further", (1, 1, 3))),
    }[change]

    with pytest.raises(BundleError, match=f"does not compute `{spec.name}`") as other:
        check(target, make(tmp_path), replace(spec, **{side: changed}))

    assert side in other.value.why
    assert "expected" in other.value.why


def test_a_missing_file_a_folder_and_a_pipe_are_rejected(target: str, tmp_path: Path) -> None:
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)

    for path in (tmp_path / "missing", folder, pipe):
        with pytest.raises(BundleError):
            check(target, path)


@pytest.mark.parametrize("content", [b"", b"RKNN", b"\x08\x01" * 40, b"\xff" * 100, bytes(100)])
def test_a_file_of_another_format_is_rejected(target: str, content: bytes, tmp_path: Path) -> None:
    path = COMPILED[target][0](tmp_path)
    path.write_bytes(content)

    with pytest.raises(BundleError) as rejected:
        check(target, path)

    assert rejected.value.hint


@pytest.mark.parametrize("make", [rknn, hef])
def test_every_file_that_is_cut_off_is_rejected(make: Any, tmp_path: Path) -> None:
    name = "rk3588" if make is rknn else "hailo8"
    path = make(tmp_path)
    whole = path.read_bytes()

    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(BundleError):
            check(name, path)
    path.write_bytes(whole + b"!")
    with pytest.raises(BundleError):
        check(name, path)


@settings(max_examples=core_or_all(400, 20_000))
@given(data=st.data())
def test_any_change_of_a_file_is_read_or_rejected(data: st.DataObject, tmp_path_factory) -> None:
    name = data.draw(st.sampled_from(list(COMPILED)))
    folder = tmp_path_factory.getbasetemp() / "changed"
    folder.mkdir(exist_ok=True)
    path = COMPILED[name][0](folder)
    if name == "ethos-u85":
        path = folder / "built.json"  # the description is beside the file
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    path.write_bytes(content)

    with suppress(BundleError):  # any other exception is a failure
        check(name, folder / f"{COMPILED[name][1].name}{get_target(name).compiler.suffix}")


# Descriptions in JSON ------------------------------------------------------------------------------


def changed(**fields: Any) -> dict[str, Any]:
    return {**description(SPEC), **fields}


GRAPH, TENSORS = description(SPEC)["graph"], description(SPEC)["norm_tensor"]
BROKEN: list[Any] = [
    [],
    "text",
    {},
    changed(graph=None),
    changed(graph=[{"left": "input"}]),
    changed(graph=[{**GRAPH[0], "right_tensor_id": 3}]),
    changed(graph=[{**GRAPH[0], "left_tensor_id": float("inf")}]),
    changed(graph=[GRAPH[0], GRAPH[0]]),
    changed(norm_tensor=[]),
    changed(norm_tensor=[{**TENSORS[0], "size": [0]}, *TENSORS[1:]]),
    changed(norm_tensor=[{**TENSORS[0], "size": 5}, *TENSORS[1:]]),
    changed(norm_tensor=[{**TENSORS[0], "dtype": "int8"}, *TENSORS[1:]]),
    changed(norm_tensor=[{**TENSORS[0], "url": 5}, *TENSORS[1:]]),
    changed(target_platform="none"),
    changed(target_platform=7),
]


@pytest.mark.parametrize("described", BROKEN, ids=str)
def test_a_description_of_another_form_is_rejected(described: Any, tmp_path: Path) -> None:
    path = rknn(tmp_path)
    path.write_bytes(rknn_bytes(described))

    with pytest.raises(BundleError) as rejected:
        check("rk3588", path)

    assert rejected.value.why
    assert "whisperport compile" in rejected.value.hint


@pytest.mark.parametrize("member", [{"size": [1.0, 1, 8]}, {"url": float("inf")}], ids=str)
def test_a_name_is_a_text_and_a_shape_whole_numbers(member: dict[str, Any], tmp_path: Path) -> None:
    path = rknn(tmp_path)
    path.write_bytes(rknn_bytes(changed(norm_tensor=[{**TENSORS[0], **member}, *TENSORS[1:]])))

    with pytest.raises(BundleError) as rejected:
        read_rknn(path)

    assert "whole numbers" in rejected.value.why


def test_the_order_is_that_of_the_program_and_not_of_the_list(tmp_path: Path) -> None:
    path = rknn(tmp_path)
    path.write_bytes(rknn_bytes(changed(graph=GRAPH[::-1])))

    check("rk3588", path)


@pytest.mark.parametrize("place", ["program", "description"])
def test_a_length_that_points_behind_the_file_reads_nothing(place: str, tmp_path: Path) -> None:
    path = rknn(tmp_path)
    whole = path.read_bytes()
    at = 16 if place == "program" else len(whole) - len(json.dumps(description(SPEC))) - 8
    path.write_bytes(whole[:at] + (2**62).to_bytes(8, "little") + whole[at + 8 :])

    with pytest.raises(BundleError, match="is not a compiled file"):
        check("rk3588", path)


@pytest.mark.parametrize(
    ("precision", "type"), [("fp16", "int8"), ("w8a8", "int16"), ("w16a16", "")]
)
def test_a_file_in_another_precision_is_rejected(precision: str, type: str, tmp_path: Path) -> None:
    path = rknn(tmp_path)
    path.write_bytes(rknn_bytes(description(SPEC, type=type)))

    with pytest.raises(BundleError, match=f"was not compiled in the precision {precision}"):
        get_target("rk3588").compiler.in_precision(precision).check(path, SPEC)


# Files that could name other files -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("node", {"op_type": "Identity", "input": ["x"], "output": ["z"]}),
        ("initializer", {"name": "w"}),
        ("functions", {"name": "f"}),
        ("training_info", {}),
    ],
)
def test_a_context_with_anything_else_in_it_is_rejected(
    part: str, value: dict[str, Any], tmp_path: Path
) -> None:
    model, path = context_model(), qnn(tmp_path)
    holder = model.graph if hasattr(model.graph, part) else model
    getattr(holder, part).add(**value)
    path.write_bytes(model.SerializeToString())

    with pytest.raises(BundleError, match=r"step\.qnn is not a compiled file"):
        check("sm8650", path)


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"embed_mode": None, "ep_cache_context": b"../../etc/passwd"}, "not inside this file"),
        ({"embed_mode": 0, "ep_cache_context": b"../../etc/passwd"}, "not inside this file"),
        ({"embed_mode": 2}, "not inside this file"),
        ({"ep_cache_context": None}, "it has no context binary"),
        ({"ep_cache_context": b""}, "it has no context binary"),
    ],
)
def test_a_file_that_names_another_file_or_has_no_context_is_rejected(
    attributes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = qnn(tmp_path)
    path.write_bytes(context_model(**attributes).SerializeToString())

    with pytest.raises(BundleError, match="is not a compiled file") as rejected:
        check("sm8650", path)

    assert why in rejected.value.why


@pytest.mark.parametrize("field", ["op_type", "domain", "repeated"])
def test_another_node_is_rejected(field: str, tmp_path: Path) -> None:
    model, path = context_model(), qnn(tmp_path)
    node = model.graph.node[0]
    if field == "repeated":
        node.attribute.add(name="embed_mode", i=0)
    else:
        setattr(node, field, "Loop")
    path.write_bytes(model.SerializeToString())

    with pytest.raises(BundleError, match="is not a compiled file"):
        check("sm8650", path)


@pytest.mark.parametrize("value", ["", "v3:new format", "v2:6:2.51.0:5.51.0:75:57x"])
def test_a_chip_that_the_file_does_not_state_is_not_compared(value: str, tmp_path: Path) -> None:
    model, path = context_model(), qnn(tmp_path)
    model.metadata_props[0].value = value
    path.write_bytes(model.SerializeToString())

    for name in ("sm8650", "qcm6490"):
        assert check(name, path, SPEC)["compiler"] == "2.51.0"


# Versions of one format ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(4))
def test_every_version_of_a_hef_is_read_and_a_newer_one_named(version: int, tmp_path: Path) -> None:
    path = hef(tmp_path)
    shapes = {"net/mel": (1, 20, 8)}, {"net/features": (1, 10, 16)}
    path.write_bytes(hef_bytes(1, *shapes, version=version))

    assert check("hailo8", path)["compiler"] == "3.31.0"

    content = bytearray(path.read_bytes())
    content[7] = 4
    path.write_bytes(content)
    with pytest.raises(BundleError, match="is a HEF of version 4"):
        check("hailo8", path)


def test_a_pad_that_feeds_another_operator_is_no_output(tmp_path: Path) -> None:
    from whisperport.targets.vendors.hailo.hef import _message_class, read_hef

    message = _message_class()()
    group = message.network_groups.add()
    group.ops.add().output_pads.add(index=1, name="inner")
    group.ops.add().input_pads.add(index=2, name="also inner")
    group.pad_edges.add(src=1, dst=2)
    path = tmp_path / "encoder.hef"
    path.write_bytes(hef_bytes(1, {}, {}, description=message.SerializeToString()))

    (network,) = read_hef(path).networks

    assert (network.inputs, network.outputs) == ((), ())
