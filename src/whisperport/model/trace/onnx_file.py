"""Write a program as one self-contained ONNX file, for third-party compilers."""

import io
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from whisperport.errors import LoweringError, needs
from whisperport.model.trace.onnx import OPSET, captured, check_onnx, max_rank, to_onnx
from whisperport.model.trace.program import Program

MAX_FOLDED_BYTES = (
    100_000  # that simplifying may add as constants; a vocabulary's weight has millions
)
MAX_WEIGHT_BYTES = 2_000_000_000  # in one file; protobuf's limit is 2 GiB with the graph


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFileInfo:
    """Properties of a written ONNX file, read from the file."""

    opset: int
    nodes: int
    max_rank: int  # highest rank of all values and weights
    weight_bytes: int
    files: tuple[Path, ...]  # the graph, then its external data if there is any


def write_onnx_file(
    program: Program, path: Path, *, opset: int = OPSET, simplify: bool = False
) -> OnnxFileInfo:
    """Write `program` to `path` with its weights; weights above 2 GB are written to `path` + `.data`.

    Args:
        opset: 13 to 20.
        simplify: fold and fuse nodes with onnxslim, which replaces MatMul and Add by Gemm plus Reshapes.

    Raises:
        MissingPackageError: `simplify` is set and onnxslim is not installed.
        LoweringError: torch or the opset cannot express the program, onnxslim fails, or the written file
            is not valid.
    """
    model = to_onnx(program, opset)
    _plain_reshapes(model)
    weights = _weight_bytes(model)
    if simplify:
        model = _simplified(model, program.name, weights)
        weights = _weight_bytes(model)
    data = f"{path.name}.data" if weights > MAX_WEIGHT_BYTES else None
    ir.save(model, path, external_data=data)
    written = check_onnx(path, program.name, opset)
    return OnnxFileInfo(
        opset=opset,
        nodes=len(written.graph.node),
        max_rank=max_rank(written),
        weight_bytes=weights,
        files=(path, path.with_name(data)) if data else (path,),
    )


def _plain_reshapes(model: ir.Model) -> None:
    """Remove `allowzero` from reshapes without a size of 0; few exporters other than torch write it."""
    for node in model.graph:
        sizes = node.inputs[1].const_value if node.op_type == "Reshape" and node.inputs[1] else None
        if sizes is not None and 0 not in sizes.numpy():
            node.attributes.pop("allowzero", None)


def _weight_bytes(model: ir.Model) -> int:
    values = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in values if tensor is not None)


def _simplified(model: ir.Model, name: str, weights: int) -> ir.Model:
    """Simplify a model with onnxslim, and check that no weight is stored twice."""
    with needs("cannot simplify the ONNX graph: onnxslim is not installed", extra="simplify"):
        import onnxslim
    if weights > MAX_WEIGHT_BYTES:
        raise LoweringError(
            f"`{name}` is too large to simplify",
            why=f"its weights have {weights / 1e9:.1f} GB; one protobuf message has at most 2 GB",
            hint="remove `--simplify`",
        )
    try:
        with captured(io.StringIO()):
            slimmed = onnxslim.slim(ir.to_proto(model))
        assert isinstance(slimmed, onnx.ModelProto)
        simplified = ir.from_proto(onnx.shape_inference.infer_shapes(slimmed, data_prop=True))
    except Exception as error:  # onnxslim raises any class
        raise LoweringError(
            f"onnxslim could not simplify `{name}`",
            why=str(error).strip().split("\n")[0],
            hint="remove `--simplify`",
        ) from error
    grown = _weight_bytes(simplified) - weights
    if grown > weights // 100 + MAX_FOLDED_BYTES:
        raise LoweringError(
            f"onnxslim made `{name}` larger by {grown / 1e6:.0f} MB",
            why="a weight is stored twice, probably that of the vocabulary",
            hint="remove `--simplify`",
        )
    return simplified
