"""Write programs as ONNX files that share one file of weights, in which each weight is stored once.

torch's exporter writes the weights of each graph to a separate file, so `step` and each `prefill` would
repeat the weights of the decoder. This module stores every initializer of 1 KiB or more in `weights.bin`,
and identifies equal ones by a hash of their content.
"""

import contextlib
import functools
import io
import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from whisperport.errors import LoweringError
from whisperport.model.trace.onnx_cache_length import free_cache_length
from whisperport.model.trace.onnx_eight_bits import TRANSLATIONS, store_in_8_bits
from whisperport.model.trace.onnx_opset import NEWEST, OLDEST, downgrade
from whisperport.model.trace.program import Program
from whisperport.model.trace.shared_bytes import SharedBytes

OPSET = NEWEST  # the newest opset that torch 2.13 writes without conversion; it has Gelu as one operator
ALIGNMENT = 4096  # bytes: ONNX Runtime maps external data in pages of this size
MIN_SHARED_BYTES = 1024  # smaller tensors are stored in the graph

log = logging.getLogger(__name__)


class SharedWeights:
    """A file of tensors, each stored once; ONNX graphs in the same folder refer to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = SharedBytes(path, ALIGNMENT)

    def store(self, array: NDArray[Any], dtype: ir.DataType, name: str) -> ir.ExternalTensor:
        """Store an array, unless the file contains the same bytes; return a reference to its data.

        Args:
            dtype: of the tensor in the graph.
            name: of the tensor in the graph.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return ir.ExternalTensor(
            self.path.name,
            self._bytes.place(data),
            len(data),
            dtype,
            shape=ir.Shape(list(array.shape)),
            name=name,
            base_dir=str(self.path.parent),
        )


def write_onnx(
    program: Program,
    path: Path,
    weights: SharedWeights,
    *,
    opset: int = OPSET,
    in_8_bits: bool = False,
    to_quantize: bool = False,
) -> int:
    """Write one program as an ONNX file.

    Args:
        path: in the folder of `weights`.
        weights: file for the program's weights.
        opset: 13 to 20.
        in_8_bits: whether to store the weights of matrix multiplications in 8 bits, for ONNX Runtime.
        to_quantize: whether the file is for a quantizer, which writes sizes of its own into the graph.

    Returns:
        The number of nodes.

    Raises:
        LoweringError: torch or the opset cannot express the program, or the written file is not valid.
    """
    model = to_onnx(program, opset)
    nodes = len(model.graph)
    _transpose_weights(model.graph)
    if in_8_bits:
        store_in_8_bits(model)
    if not to_quantize:
        free_cache_length(model.graph)
    share_weights(model.graph, weights)
    ir.save(model, path)
    check_onnx(path, program.name, opset)
    return nodes


def share_weights(graph: ir.Graph, weights: SharedWeights) -> None:
    """Move the initializers of a graph to a file of weights; the small ones stay."""
    for value in list(graph.initializers.values()):
        if value.const_value is not None and value.const_value.nbytes >= MIN_SHARED_BYTES:
            _share(graph, value, weights)


def _transpose_weights(graph: ir.Graph) -> None:
    """Store the weights of each Gemm as (K, N), so that programs share them with those of a MatMul."""
    for node in graph:
        weight = node.inputs[1] if node.op_type == "Gemm" else None
        turned = node.attributes.get("transB")
        if weight is None or weight.const_value is None or turned is None or turned.value != 1:
            continue
        assert weight.name
        name = f"{weight.name}_transposed"
        if name not in graph.initializers:
            array = weight.const_value.numpy().T
            graph.initializers[name] = ir.Value(
                name=name,
                shape=ir.Shape(list(array.shape)),
                type=weight.type,
                const_value=ir.tensor(array, name=name),
            )
        node.replace_input_with(1, graph.initializers[name])
        node.attributes["transB"] = ir.AttrInt64("transB", 0)
        if not weight.uses():
            graph.initializers.pop(weight.name)


def _share(graph: ir.Graph, value: ir.Value, weights: SharedWeights) -> None:
    """Move an initializer to the shared file; as float16 with a Cast if no value changes.

    Most checkpoints are published in float16, so their float32 values fit into float16 without a change.
    The runtime folds the Cast when it loads the graph, so the results do not change.
    """
    assert value.const_value is not None
    assert value.name
    array, dtype, name = value.const_value.numpy(), value.const_value.dtype, value.name
    half = _as_float16(array)
    if half is None:
        value.const_value = weights.store(array, dtype, name)
        return
    stored = ir.Value(
        name=f"{name}_half",
        shape=value.shape,
        type=ir.TensorType(ir.DataType.FLOAT16),
        const_value=weights.store(half, ir.DataType.FLOAT16, f"{name}_half"),
    )
    graph.initializers.pop(name)
    cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT.value})
    cast.outputs[0].name, cast.outputs[0].shape, cast.outputs[0].type = (
        name,
        value.shape,
        value.type,
    )
    ir.convenience.replace_all_uses_with(value, cast.outputs[0])
    graph.initializers[f"{name}_half"] = stored
    graph.insert_before(graph[0], cast)
    value.const_value = None  # onnxscript keeps the graph, see `Whisper.unload`


def _as_float16(array: NDArray[Any]) -> NDArray[np.float16] | None:
    """Convert an array to float16; return None if a value would change."""
    if array.dtype != np.float32:
        return None
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array) else None


def to_onnx(program: Program, opset: int = OPSET) -> ir.Model:
    """Convert a program to an ONNX graph with the names of its signature.

    Args:
        opset: 13 to 20. torch writes opset 20; older opsets are converted from it.

    Raises:
        LoweringError: torch cannot express the program in ONNX, or the opset does not have an operator.
    """
    if not OLDEST <= opset <= NEWEST:
        raise LoweringError(
            f"`{program.name}` cannot be written as ONNX opset {opset}",
            why=f"supported opsets are {OLDEST} to {NEWEST}",
            hint=f"choose an opset from {OLDEST} to {NEWEST}",
        )
    model = _convert(program)
    if opset != NEWEST:
        downgrade(model, opset, program.name)
    _rename(model, program)
    _strip(model)
    return model


def _convert(program: Program) -> ir.Model:
    output = io.StringIO()
    with torch.no_grad(), captured(output), _functions_parsed_once():
        try:
            exported = torch.onnx.export(
                program.exported,
                (),
                dynamo=True,
                opset_version=NEWEST,
                verbose=False,
                custom_translation_table=dict(TRANSLATIONS),
            )
        except Exception as error:  # torch wraps any failure of its passes in its own class
            raise LoweringError(
                f"`{program.name}` cannot be written as ONNX opset {NEWEST}",
                why=_first_line(_root(error)),
                hint=output.getvalue().strip().split("\n")[-1],
            ) from error
        finally:
            log.debug("torch.onnx on `%s`:\n%s", program.name, output.getvalue())
    assert exported is not None
    return exported.model


_cached = functools.cache(functools.cache)  # in every block the same cache of a function


@contextlib.contextmanager
def _functions_parsed_once() -> Iterator[None]:
    """Within the block, torch gets its ONNX functions from the first call, and does not parse them again.

    `torch.onnx.export` parses the source of 497 functions in each call: 5 of the 25 CPU seconds in which
    the embedded model is exported (torch 2.13.0, onnxscript 0.7.2). No public function avoids it. Versions
    of torch without these functions do what they always do.
    """
    places = _parsing_functions()
    originals = [getattr(module, name) for module, name in places]
    try:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, _cached(original))
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def _parsing_functions() -> list[tuple[Any, str]]:
    """Return where torch finds the list of ONNX functions, and the signature of one."""
    try:
        from onnxscript._framework_apis import torch_2_11
        from torch.onnx._internal.exporter import _schemas
    except ImportError:
        return []
    places = [(torch_2_11, "get_torchlib_ops"), (_schemas, "op_signature_from_function")]
    return [(module, name) for module, name in places if hasattr(module, name)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _root(error: BaseException) -> BaseException:
    """Return the first cause: torch's own message only says that the export failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextlib.contextmanager
def captured(output: io.StringIO) -> Iterator[None]:
    """Redirect what the exporter prints to `output`."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield
    finally:
        logger.setLevel(level)


def _rename(model: ir.Model, program: Program) -> None:
    """Give inputs and outputs the names of the program's signature; other values get other names."""
    graph = model.graph
    sides = (graph.inputs, program.spec.inputs), (graph.outputs, program.spec.outputs)
    reserved = {spec.name for _, specs in sides for spec in specs}
    results = [value for node in graph for value in node.outputs]
    names = reserved | {str(value.name) for value in results} | set(graph.initializers)
    for value in results:
        if value.name in reserved:
            value.name = next(n for i in count() if (n := f"{value.name}_{i}") not in names)
            names.add(value.name)
    for values, specs in sides:
        assert len(values) == len(specs), f"`{program.name}`: the exporter changed the signature"
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name


def _strip(model: ir.Model) -> None:
    """Remove the exporter's metadata: stack traces with paths of this machine, 80 % of a small file."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def check_onnx(path: Path, name: str, opset: int) -> onnx.ModelProto:
    """Check a written ONNX file, and return its model without external data.

    The check includes the opset, because exporters can write another opset than requested.

    Raises:
        LoweringError: the file is not valid ONNX, has another opset, or has a dynamic shape.
    """
    try:
        onnx.checker.check_model(os.fspath(path), full_check=True)
    except onnx.checker.ValidationError as error:
        raise LoweringError(
            f"the ONNX file of `{name}` is not valid",
            why=_first_line(error),
            hint="this is a defect of whisperport; please report it with the program",
        ) from error
    model = onnx.load(os.fspath(path), load_external_data=False)
    written = {entry.domain: entry.version for entry in model.opset_import}.get("")
    if written != opset:
        raise LoweringError(
            f"`{name}` was written with ONNX opset {written}",
            why=f"the requested opset is {opset}",
            hint="this is a defect of whisperport; please report it with the program",
        )
    dynamic = [v.name for v in _values(model) if not all(d.HasField("dim_value") for d in _dims(v))]
    if dynamic:
        raise LoweringError(
            f"`{name}` has a dynamic shape in ONNX, at `{dynamic[0]}`",
            why="accelerators support static shapes only",
            hint="export the program again without `dynamic_shapes`",
        )
    return model


def max_rank(model: onnx.ModelProto) -> int:
    """Return the highest rank of all values and weights."""
    ranks = [len(_dims(value)) for value in _values(model)]
    return max(ranks + [len(tensor.dims) for tensor in model.graph.initializer])


def _dims(value: onnx.ValueInfoProto) -> Any:
    return value.type.tensor_type.shape.dim


def _values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    return [*model.graph.input, *model.graph.output, *model.graph.value_info]
