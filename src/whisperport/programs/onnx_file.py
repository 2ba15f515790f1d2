"""Write a program as one ONNX file that needs nothing of ours: for other people's compilers."""

import io
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from whisperport.errors import LoweringError, MissingPackageError
from whisperport.programs.onnx import OPSET, captured, check_onnx, max_rank, to_onnx
from whisperport.programs.program import Program

FOLDED = 100_000  # bytes of small constants that folding may add; a vocabulary has millions
LARGEST_FILE = 2_000_000_000  # bytes of weights; protobuf ends at 2 GiB, graph included


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFacts:
    """What was written, re-read from the file."""

    opset: int
    nodes: int
    max_rank: int  # the highest of any value or weight
    weight_bytes: int
    files: tuple[Path, ...]  # the graph, then its external data if there is any


def write_onnx_file(
    program: Program, path: Path, *, opset: int = OPSET, simplify: bool = False
) -> OnnxFacts:
    """Write `program` to `path`, weights inside; above 2 GB they go to `path` + `.data`.

    Args:
        simplify: fold and fuse with onnxslim. It makes Gemm of MatMul and Add, with more Reshape.

    Raises:
        MissingPackageError: onnxslim is asked for and not installed.
        LoweringError: as `to_onnx`, or the file that was written is not valid.
    """
    model = to_onnx(program, opset)
    _plain_reshapes(model)
    weights = _weight_bytes(model)
    if simplify:
        model = _simplified(model, program.name, weights)
        weights = _weight_bytes(model)
    data = f"{path.name}.data" if weights > LARGEST_FILE else None
    ir.save(model, path, external_data=data)
    written = check_onnx(path, program.name, opset)
    return OnnxFacts(
        opset=opset,
        nodes=len(written.graph.node),
        max_rank=max_rank(written),
        weight_bytes=weights,
        files=(path, path.with_name(data)) if data else (path,),
    )


def _plain_reshapes(model: ir.Model) -> None:
    """Drop `allowzero` where no size is 0: torch always writes it, and few other exporters ever do."""
    for node in model.graph:
        sizes = node.inputs[1].const_value if node.op_type == "Reshape" and node.inputs[1] else None
        if sizes is not None and 0 not in sizes.numpy():
            node.attributes.pop("allowzero", None)


def _weight_bytes(model: ir.Model) -> int:
    values = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in values if tensor is not None)


def _simplified(model: ir.Model, name: str, weights: int) -> ir.Model:
    """By onnxslim, if it keeps each weight once; another simplifier stores a tied table twice."""
    try:
        import onnxslim
    except ImportError as error:
        raise MissingPackageError(
            "cannot simplify: onnxslim is not installed",
            why=str(error),
            hint='pip install "whisperport[simplify]"',
        ) from error
    if weights > LARGEST_FILE:
        raise LoweringError(
            f"`{name}` is too large to simplify",
            why=f"its {weights / 1e9:.1f} GB of weights do not fit into one protobuf message",
            hint="leave out `--simplify`",
        )
    try:
        with captured(io.StringIO()):
            slimmed = onnxslim.slim(ir.to_proto(model))
        assert isinstance(slimmed, onnx.ModelProto)
        simplified = ir.from_proto(onnx.shape_inference.infer_shapes(slimmed, data_prop=True))
    except Exception as error:  # onnxslim raises anything
        raise LoweringError(
            f"onnxslim could not simplify `{name}`",
            why=str(error).strip().split("\n")[0],
            hint="leave out `--simplify`",
        ) from error
    grown = _weight_bytes(simplified) - weights
    if grown > weights // 100 + FOLDED:
        raise LoweringError(
            f"`{name}` grew by {grown / 1e6:.0f} MB when it was simplified",
            why="a weight is stored twice, most likely the vocabulary's",
            hint="leave out `--simplify`",
        )
    return simplified
