"""Lower programs to OpenVINO models, one .xml file each, with one file of weights for all.

OpenVINO writes a .bin file per model, so that `step` and each `prefill` would repeat the weights of the
decoder. Here equal weights of all programs are stored once: a model states the place of each constant in
the file of weights, and any number of models can be read with the same file.

`store_in_int8` stores the weights of matrix multiplications with one scale per output channel:

    before   x ── MatMul(w float32) ─────────────────────────────────► y
    after    x ── MatMul(Multiply(Convert(q int8), scale float32)) ──► y

OpenVINO reads this form as compressed weights: its CPU kernels do not expand them in memory. With AVX-512
VNNI they round the inputs to 8 bits too, in blocks (`runtime.py`), and multiply integers.

Source of the form: openvino, `MarkDequantization` and the CPU plugin's conversion of compressed
MatMuls; NNCF writes it too, but NNCF needs scipy and scikit-learn.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import LoweringError, needs
from whisperport.system.progress import begin_stage
from whisperport.targets.cpu.openvino.runtime import shared_core

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program
    from whisperport.model.trace.shared_bytes import SharedBytes

ALIGNMENT = 64  # bytes; a line of the cache of an x86 CPU
IN_FLOAT16 = {"fp16", "bf16"}  # precisions whose weights are stored in float16
NOT_COMPUTED = {"Constant", "Parameter", "Result"}


def lower_to_openvino(
    programs: Sequence["Program"],
    models: Sequence[Path],
    precisions: Sequence[str],
    weights: Path,
    target: str,
) -> list[int]:
    """Write programs to `.xml` files with one file of weights.

    Args:
        models: the `.xml` file of each program.
        precisions: of each program: "fp32", "fp16", "w8" or "bf16". In bf16, weights are stored in float16:
            OpenVINO converts them when it compiles the program.
        weights: the file to write; its folder is made if needed.
        target: name of the target, for messages.

    Returns:
        The number of nodes of each program.

    Raises:
        MissingPackageError: OpenVINO or the ONNX exporter is not installed.
        LoweringError: a program cannot be written as ONNX, or OpenVINO cannot convert it.
    """
    with needs(f"cannot lower for `{target}`: a package is not installed", extra="openvino-export"):
        import openvino

        from whisperport.model.trace.onnx_file import write_onnx_file
        from whisperport.model.trace.shared_bytes import SharedBytes
    weights.parent.mkdir(exist_ok=True)
    shared = SharedBytes(weights, ALIGNMENT)
    nodes = []
    for program, out, precision in zip(programs, models, precisions, strict=True):
        begin_stage(f"writing {program.name} for {target} in {precision}")
        with TemporaryDirectory(dir=weights.parent) as folder:
            onnx, own = Path(folder, "program.onnx"), Path(folder, "program.xml")
            write_onnx_file(program, onnx)
            try:
                model = shared_core().read_model(onnx)
                if precision == "w8":
                    store_in_int8(model)
                openvino.save_model(model, own, compress_to_fp16=precision in IN_FLOAT16)
            except RuntimeError as error:
                raise LoweringError(
                    f"OpenVINO could not convert `{program.name}`",
                    why=str(error).strip().split("\n")[-1][:200],
                    hint=f"`whisperport check PROGRAM.pt2 --target {target}` lists what is not supported",
                ) from error
            kinds = [node.get_type_name() for node in model.get_ops()]
            nodes.append(sum(kind not in NOT_COMPUTED for kind in kinds))
            del model  # it maps the weights of the temporary ONNX file
            share_weights(own, shared, out)
    return nodes


def share_weights(model: Path, shared: "SharedBytes", out: Path) -> None:
    """Write a model that OpenVINO saved, with its constants in a file that several models share.

    Args:
        model: the .xml file; its .bin file has the same name.
        out: the .xml file to write.
    """
    tree = ElementTree.parse(model)
    with model.with_suffix(".bin").open("rb") as file:
        for layer in tree.iter("layer"):
            data = layer.find("data")
            if layer.get("type") != "Const" or data is None:
                continue
            file.seek(int(data.attrib["offset"]))
            data.set("offset", str(shared.place(file.read(int(data.attrib["size"])))))
    tree.write(out, encoding="utf-8", xml_declaration=True)


SMALLEST = 4096  # elements; smaller weights cost little memory
LARGEST_INT8 = 127


def store_in_int8(model: Any) -> int:
    """Replace the constant weights of all matrix multiplications of an `openvino.Model`, in place.

    Returns:
        The number of weights that were replaced.
    """
    replaced = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        for port, transposed in ((0, "transpose_a"), (1, "transpose_b")):
            constant = node.input_value(port).get_node()
            if constant.get_type_name() != "Constant" or constant.data.size < SMALLEST:
                continue
            # The last axis but one is summed over in the second input, the last in the first input.
            summed = -2 + (port == 0) * 1
            if node.get_attributes()[transposed]:
                summed = -3 - summed
            node.input(port).replace_source_output(_in_int8(constant.data, summed))
            replaced += 1
    return replaced


def _in_int8(weights: NDArray[np.float32], summed: int) -> Any:
    """Return the output of the nodes that compute the weights from int8.

    Args:
        summed: axis of the weights that the multiplication sums over, -1 or -2.
    """
    from openvino import opset13

    scale = np.abs(weights).max(axis=summed, keepdims=True) / LARGEST_INT8
    scale[scale == 0] = 1
    quantized = np.rint(weights / scale).astype(np.int8)
    converted = opset13.convert(opset13.constant(quantized), "f32")
    return opset13.multiply(converted, opset13.constant(scale.astype(np.float32))).output(0)
