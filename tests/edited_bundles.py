"""Bundles that nobody exported: copies of the embedded model's bundle with another program or manifest."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from whisperport.program.bundle import MANIFEST, Bundle, FileEntry, Manifest
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.bundle.manifest import _checksum
from whisperport.program.spec import ProgramSpec

from .embedded import default_bundle

STEP = "onnxruntime/step.onnx"


def foreign_bundle(
    folder: Path, name: str = "somebody's", step: onnx.ModelProto | None = None
) -> Bundle:
    """Write a bundle with another name, and so another checksum, to `folder`; all its hashes are right.

    Args:
        step: ONNX model that replaces the program `step`.
    """
    shutil.copytree(default_bundle(), folder, dirs_exist_ok=True)
    if step is not None:
        onnx.save(step, folder / STEP)
    manifest = Bundle.open(default_bundle()).manifest
    file = folder / STEP
    files = {**manifest.files, STEP: FileEntry(file_sha256(file), file.stat().st_size)}
    made = replace(manifest, name=name, files=files)
    (folder / MANIFEST).write_bytes(made.to_bytes())
    assert Manifest.from_bytes(made.to_bytes()) == made
    return Bundle.open(folder)


def step_spec() -> ProgramSpec:
    return Bundle.open(default_bundle()).manifest.program("step").spec


def endless_step() -> onnx.ModelProto:
    """A `step` that computes the first output by a loop whose condition is always true."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["condition"], ["goes_on"]),
            helper.make_node("Add", ["value", "value"], ["more"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("condition", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]),
        ],
    )
    loop = helper.make_node("Loop", ["", "true", "one"], ["looped"], body=body)
    return _step([loop], scale="looped")


def constant_of(bytes_: int) -> onnx.ModelProto:
    """A `step` of a few bytes that asks for a constant of `bytes_` bytes, all its own elements."""
    shape = helper.make_tensor("shape", TensorProto.INT64, [1], [bytes_ // 4])
    nodes = [
        helper.make_node("Constant", [], ["count"], value=shape),
        helper.make_node("ConstantOfShape", ["count"], ["filled"]),
        helper.make_node("ReduceSum", ["filled"], ["sum"], keepdims=0),
    ]
    return _step(nodes, scale="sum")


def growing_at_run_time(bytes_: int, pieces: int) -> onnx.ModelProto:
    """A `step` that fills `bytes_` bytes in pieces when it runs: each depends on an input."""
    count = helper.make_tensor("count_value", TensorProto.INT64, [1], [bytes_ // 4 // pieces])
    nodes = [
        helper.make_node("Constant", [], ["count"], value=count),
        helper.make_node("ReduceSum", ["x"], ["start"], keepdims=0),
    ]
    for piece in range(pieces):
        zero = f"zero_{piece}"
        nodes.append(
            helper.make_node("Constant", [], [zero], value_float=float(piece)),
        )
        nodes.append(helper.make_node("Add", ["start", zero], [f"seed_{piece}"]))
        nodes.append(helper.make_node("Expand", [f"seed_{piece}", "count"], [f"piece_{piece}"]))
    whole = helper.make_node(
        "Concat", [f"piece_{piece}" for piece in range(pieces)], ["whole"], axis=0
    )
    return _step(
        [*nodes, whole, helper.make_node("ReduceSum", ["whole"], ["sum"], keepdims=0)], scale="sum"
    )


def _step(nodes: list[onnx.NodeProto], *, scale: str) -> onnx.ModelProto:
    """A model with the signature of `step`, every output of which is zeros times the value `scale`."""
    spec = step_spec()
    constants = [
        helper.make_tensor("true", TensorProto.BOOL, [], [True]),
        helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]),
    ]
    given = [
        helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.shape)
        for tensor in spec.inputs
    ]
    made = [
        helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.shape)
        for tensor in spec.outputs
    ]
    ends = []
    for place, tensor in enumerate(spec.outputs):
        shape = helper.make_tensor(
            f"shape_{place}_value", TensorProto.INT64, [len(tensor.shape)], tensor.shape
        )
        ends += [
            helper.make_node("Constant", [], [f"shape_{place}"], value=shape),
            helper.make_node("ConstantOfShape", [f"shape_{place}"], [f"zeros_{place}"]),
            helper.make_node("Mul", [f"zeros_{place}", scale], [tensor.name]),
        ]
    graph = helper.make_graph([*nodes, *ends], "step", given, made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


# Edited, and hashed again, so that the checksums are right.


def copy_of_shipped(folder: Path) -> Path:
    """A copy of the embedded model's bundle."""
    return Path(shutil.copytree(default_bundle(), folder))


def read(folder: Path) -> dict[str, Any]:
    """The manifest's fields, without the checksum."""
    document: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    del document["checksum"]
    return document


def write(folder: Path, document: dict[str, Any]) -> None:
    """Write the manifest with a checksum that fits."""
    raw = json.dumps({**document, "checksum": _checksum(document)})
    (folder / MANIFEST).write_text(raw, encoding="utf-8")


def rehash(folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Change the manifest, and list every file with the size and hash that it has now."""
    document = read(folder)
    change(document)
    for relative, entry in document["files"].items():
        contents = (folder / relative).read_bytes()
        entry |= {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    write(folder, document)


def program(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The manifest's entry of one program."""
    found: dict[str, Any] = next(p for p in document["programs"] if p["spec"]["name"] == name)
    return found
