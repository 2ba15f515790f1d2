"""Compiled files of every vendor for a small program, as their compilers write them, without a program."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto, helper

from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.targets.vendors.qualcomm.context import COMPATIBILITY

from .vendors.hailo.hef_file import hef_bytes
from .vendors.rockchip.rknn_bytes import description, rknn_bytes

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
    given = {name: value for name, value in attributes.items() if value is not None}
    names = [[tensor.name for tensor in side] for side in (spec.inputs, spec.outputs)]
    sides = [
        [helper.make_tensor_value_info(one.name, TensorProto.FLOAT, one.shape) for one in side]
        for side in (spec.inputs, spec.outputs)
    ]
    node = helper.make_node("EPContext", *names, domain="com.microsoft", **given)
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
