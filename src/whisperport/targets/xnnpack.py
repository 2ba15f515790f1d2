"""XNNPACK through ExecuTorch: phones and boards with Arm or x86 CPUs; one .pte with a method a program."""

import gc
import os
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, final

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.placement import Placement
from whisperport.process import SPAWN, OwnProcess
from whisperport.progress import Progress
from whisperport.runner import Array, Runner
from whisperport.spec import Limit, ProgramSpec, Rejection, TargetSpec
from whisperport.targets.base import RunOptions, Target

if TYPE_CHECKING:  # boards have no torch
    from whisperport.inspection.delegation import Delegation
    from whisperport.programs.program import Program

FILE = "xnnpack/model.pte"
SCALAR_TYPES = {  # executorch/runtime/core/portable_type/scalar_type.h
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "bool": 11,
}

# Methods of one program share its memory, and all programs of a process share one thread pool. Its Python
# binding holds the interpreter's lock while a method runs, so no parallelism is lost.
# Source: executorch 1.5.1, runtime/__init__.py, Program.load_method.
_turn = Lock()

# What ExecuTorch's XNNPACK partitioner takes, as `whisperport check` names it: its own list, and those that
# torch writes with members of the list alone. Each was lowered by itself, with the result that is tested.
OPERATORS = frozenset(
    [
        "_native_batch_norm_legit_no_training",
        "abs",
        "add",
        "addmm",
        "avg_pool2d",
        "baddbmm",
        "bmm",
        "cat",
        "ceil",
        "clamp",
        "clone",
        "constant_pad_nd",
        "conv",
        "conv_transpose2d",
        "cos",
        "div",
        "einsum",
        "exp",
        "floor",
        "gelu",
        "glu",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "linear",
        "log",
        "matmul",
        "max_pool2d",
        "maximum",
        "mean",
        "minimum",
        "mm",
        "movedim",
        "mul",
        "neg",
        "pow",
        "prelu",
        "relu",
        "relu6",
        "reshape",
        "rsqrt",
        "rsub",
        "sigmoid",
        "silu",
        "sin",
        "slice",
        "softmax",
        "sqrt",
        "square",
        "stack",
        "sub",
        "tanh",
        "to",
        "transpose",
        "unsqueeze",
    ]
)
CONFIG = "executorch 1.5.1 backends/xnnpack/partition/config/"
TORCH = frozenset({"torch"})
FLOATS = frozenset({"float16", "float32"})
LIMITS = (
    Limit(
        rule="WP103",
        formats=TORCH,
        operators=frozenset({"scaled_dot_product_attention"}),
        value="a scalar product, expand, eq, full_like, logical_not, any and where",
        source="lowered with executorch 1.5.1: torch's decomposition of attention",
        rewrite="attention-by-softmax",
    ),
    Limit(
        rule="WP307",
        operators=frozenset({"to"}),
        source=CONFIG + "generic_node_configs.py, ToDimOrderCopyConfig",
    ),
    Limit(
        rule="WP203",
        value=FLOATS,
        source=CONFIG + "xnnpack_config.py, _check_node_has_valid_dtype",
    ),
    Limit(
        rule="WP209",
        source=CONFIG + "xnnpack_config.py, _check_inputs_are_valid_dtypes",
    ),
    Limit(
        rule="WP203",
        operators=frozenset({"gelu"}),
        value=frozenset({"float32"}),
        source=CONFIG + "generic_node_configs.py, GeluConfig",
    ),
    Limit(
        rule="WP205",
        value=frozenset({3, 4}),
        source=CONFIG + "gemm_configs.py, ConvolutionConfig",
    ),
    Limit(
        rule="WP301",
        operators=frozenset({"addmm", "conv", "linear", "matmul", "mm"}),
        source=CONFIG + "gemm_configs.py, GEMMConfig._get_weight_deps",
        rewrite="matmul-by-linear",
    ),
    Limit(
        rule="WP304",
        formats=TORCH,
        operators=frozenset({"matmul"}),
        source="lowered with executorch 1.5.1: torch's decomposition of matmul; no config for expand",
        rewrite="matmul-by-bmm",
    ),
    Limit(
        rule="WP302",
        operators=frozenset({"softmax", "unsqueeze"}),
        source=CONFIG + "generic_node_configs.py, SoftmaxConfig and UnsqueezeCopyConfig",
    ),
    Limit(
        rule="WP303",
        operators=frozenset({"mean"}),
        source=CONFIG + "generic_node_configs.py, MeanDimConfig",
    ),
    Limit(
        rule="WP305",
        operators=frozenset({"pow"}),
        value=("exponent", frozenset({"2"})),
        source=CONFIG + "generic_node_configs.py, PowConfig: the integer 2",
    ),
    Limit(
        rule="WP305",
        operators=frozenset({"add", "sub"}),
        value=("alpha", frozenset({"1", "1.0"})),
        source=CONFIG + "generic_node_configs.py, AddConfig and SubConfig",
    ),
    Limit(
        rule="WP305",
        operators=frozenset({"slice"}),
        value=("step", frozenset({"1"})),
        source=CONFIG + "generic_node_configs.py, SliceCopyConfig",
    ),
    Limit(
        rule="WP305",
        operators=frozenset({"div"}),
        value=("rounding_mode", frozenset()),
        source=CONFIG + "generic_node_configs.py, DivConfig: div.Tensor, and not div.Tensor_mode",
    ),
    Limit(
        rule="WP306",
        formats=TORCH,
        operators=frozenset({"add", "div", "mul", "rsub", "sub"}),
        source="lowered with executorch 1.5.1; " + CONFIG + "xnnpack_config.py: no int64",
    ),
    Limit(
        rule="WP308",
        operators=frozenset({"cat", "stack"}),
        source=CONFIG + "generic_node_configs.py, CatConfig",
    ),
    Limit(
        rule="WP309",
        operators=frozenset({"constant_pad_nd"}),
        source=CONFIG + "generic_node_configs.py, ConstantPadConfig",
    ),
    Limit(
        rule="WP501",
        operators=frozenset({"gelu"}),
        source="measured with executorch 1.5.1: 4.73e-4, the difference between the two forms",
        kind="warning",
    ),
)


@final
class Xnnpack(Target):
    """Has no options for running beyond `threads`."""

    spec = TargetSpec(
        name="xnnpack",
        summary="ExecuTorch with XNNPACK: phones and boards, Arm and x86 CPUs",
        operators=OPERATORS,
        max_rank=6,
        dtypes=frozenset({"float32", "float16", "int64", "int32", "bool"}),
        limits=LIMITS,
        suggested_rewrites={"layer_norm": "layer-norm-by-linear", "dropout": "drop-no-ops"},
        rewrites=(
            "drop-no-ops",
            "fold-constants",
            "matmul-by-linear",
            "attention-by-softmax",
            "matmul-by-bmm",
            "merge-permutes",
            "layer-norm-by-linear",
        ),
        lowered_suffix=".pte",
        extra="xnnpack",
        run_extra="xnnpack",
        runtime="executorch",
        sources={
            "operators": CONFIG + "__init__.py, and each lowered by itself",
            "domains": "executorch 1.5.1 backends/xnnpack/partition/config/__init__.py: all are aten's",
            "formats": "executorch 1.5.1 exir: to_edge_transform_and_lower takes an ExportedProgram",
            "static": "torch.export of dynamic shapes lowers; whisperport's runtime passes static ones",
            "max_rank": "google/XNNPACK include/xnnpack.h: XNN_MAX_TENSOR_DIMS is 6",
            "dtypes": "executorch 1.5.1 passes these to its portable kernels; XNNPACK itself: WP203",
        },
    )

    def check(self, program: "Program") -> list[Rejection]:
        from whisperport.targets.graph_check import rejections

        return rejections(program, self.spec)

    def lower(
        self, programs: Sequence["Program"], folder: Path, progress: Progress
    ) -> list[ProgramEntry]:
        from whisperport.inspection.quiet import quiet
        from whisperport.programs.node_history import shared_node_history

        edge, delegated = _lower_to_edge(programs, progress)
        progress("writing the ExecuTorch file")
        path = folder / FILE
        path.parent.mkdir()
        with quiet(), shared_node_history(), path.open("wb") as file:
            edge.to_executorch().write_to_file(file)
        delegation = _delegation(path)
        return [
            ProgramEntry(
                spec=program.spec,
                placement=Placement(self.spec.name),
                method=program.name,
                files=(FILE,),
                delegation={
                    "delegated": delegated[program.name],
                    **delegation[program.name].to_json(),
                },
            )
            for program in programs
        ]

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        from whisperport.inspection.quiet import quiet

        with quiet():
            runtime = _runtime(options.threads)
            programs = {}
            runners: dict[str, Runner] = {}
            for entry in entries:
                file = entry.files[0]
                if file not in programs:
                    programs[file] = _load_program(runtime, regular_file(folder, file))
                runners[entry.spec.name] = _XnnpackRunner(entry, programs[file])
        return runners


def _delegation(path: Path) -> "dict[str, Delegation]":
    """Of a file that is mapped, not read: most of it is weights."""
    from whisperport.inspection.delegation import read_delegation

    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        return read_delegation(mapped)


def _lower_to_edge(programs: Sequence["Program"], progress: Progress) -> tuple[Any, dict[str, int]]:
    """The lowered methods, and for each the number of nodes in its delegates.

    Programs are lowered one by one: ExecuTorch copies the weights of the program that it lowers, and
    the next copy is made when the last one is deleted.
    """
    from whisperport.inspection.quiet import quiet
    from whisperport.programs.node_history import shared_node_history

    try:
        with quiet():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.devtools.backend_debug import get_delegation_info
            from executorch.exir import (
                EdgeCompileConfig,
                EdgeProgramManager,
                to_edge_transform_and_lower,
            )
    except ImportError as error:
        raise _missing(error) from error
    config = EdgeCompileConfig()
    methods, delegated = {}, {}
    weights: dict[bytes, bytes] = {}
    try:
        for program in programs:
            progress(f"lowering {program.name} to XNNPACK")
            with quiet(), shared_node_history():
                edge = to_edge_transform_and_lower(
                    {program.name: program.exported},
                    partitioner=[XnnpackPartitioner()],
                    compile_config=config,
                ).exported_program(program.name)
            _share_weights(edge.graph_module, weights)
            methods[program.name] = edge
            delegated[program.name] = get_delegation_info(edge.graph_module).num_delegated_nodes
            gc.collect()  # graphs refer to themselves, and the copied weights are in graphs
        return EdgeProgramManager(methods, compile_config=config), delegated
    except Exception as error:  # ExecuTorch raises anything, from AssertionError to its own
        raise LoweringError(
            "ExecuTorch could not lower the programs for XNNPACK",
            why=str(error).strip().split("\n")[0],
        ) from error


def _share_weights(module: Any, known: dict[bytes, bytes]) -> None:
    """Replace the serialized weights of a method's delegates by equal ones that another method has.

    Args:
        known: SHA-256 -> weights of all methods so far, extended by those of this one.
    """
    from executorch.exir.lowered_backend_module import get_lowered_submodules

    for _, lowered, _ in get_lowered_submodules(module):
        if (stored := lowered.named_data_store_output) is not None:
            stored.buffers[:] = [
                known.setdefault(sha256(data).digest(), data) for data in stored.buffers
            ]


class _XnnpackRunner(Runner):
    def __init__(self, entry: ProgramEntry, program: Any) -> None:
        super().__init__(entry.spec, _turn)
        self._method = _load_method(program, entry.method, entry.spec)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        from torch import from_numpy

        outputs = self._method.execute([from_numpy(array) for array in inputs])
        return [output.numpy() for output in outputs]


def _runtime(threads: int | None) -> Any:
    try:
        from executorch.extension.pybindings import portable_lib
        from executorch.runtime import Runtime
    except ImportError as error:
        raise _missing(error) from error
    _first_load().check("ExecuTorch", hint=SPAWN)
    # Must come before any method is loaded: later it changes the pool and not the methods' use of it.
    with _turn:
        portable_lib._unsafe_reset_threadpool(threads or os.cpu_count() or 1)
    return Runtime.get()


@cache
def _first_load() -> OwnProcess:
    """The process that first loaded a program. In its forks every run may wait permanently."""
    return OwnProcess()


def _load_program(runtime: Any, path: Path) -> Any:
    """ExecuTorch prints the identifier of a file it refuses, and aborts where that is no text."""
    try:
        with path.open("rb") as file:
            identifier = file.read(8)[4:]  # b"ET12": executorch/schema/program.fbs
        if not (identifier.startswith(b"ET") and identifier[2:].isdigit()):
            raise ValueError("it is not an ExecuTorch program")
        return runtime.load_program(path)
    except (RuntimeError, OSError, ValueError) as error:
        raise _unreadable(path.name, error) from error


def _load_method(program: Any, method: str, spec: ProgramSpec) -> Any:
    if method not in program.method_names:
        raise BundleError(f"the ExecuTorch file has no method `{method}`, which the manifest lists")
    try:
        loaded = program.load_method(method)
    except (RuntimeError, ValueError) as error:
        raise _unreadable(f"method `{method}`", error) from error
    _check_signature(loaded.metadata, spec)
    return loaded


def _check_signature(method: Any, spec: ProgramSpec) -> None:
    """Compare a loaded method's metadata with the manifest."""
    inputs = [(t, method.input_tensor_meta) for t in spec.inputs]
    outputs = [(t, method.output_tensor_meta) for t in spec.outputs]
    counts = (method.num_inputs(), method.num_outputs())
    if counts != (len(inputs), len(outputs)):
        raise _mismatch(
            method.name(),
            f"it has {counts[0]} inputs and {counts[1]} outputs; "
            f"expected {len(inputs)} and {len(outputs)}",
        )
    for side in (inputs, outputs):
        for i, (tensor, info) in enumerate(side):
            try:
                shape, dtype = tuple(info(i).sizes()), info(i).dtype()
            except (RuntimeError, IndexError) as error:  # it is no tensor
                raise _mismatch(method.name(), f"{tensor.name!r}: {error}") from error
            if shape != tensor.shape or SCALAR_TYPES.get(tensor.dtype) != dtype:
                raise _mismatch(
                    method.name(),
                    f"{tensor.name!r} is {shape} of type {dtype}; "
                    f"expected {tensor.shape} {tensor.dtype}",
                )


def _mismatch(method: str, why: str) -> BundleError:
    return BundleError(
        f"method `{method}` has another signature than the manifest lists",
        why=why,
        hint="export the bundle again",
    )


def _unreadable(what: str, error: Exception) -> BundleError:
    return BundleError(
        f"ExecuTorch cannot load {what}",
        why=str(error).strip().split("\n")[0],
        hint="export the bundle again with this version of executorch",
    )


def _missing(error: ImportError) -> MissingPackageError:
    return MissingPackageError(
        "cannot use `xnnpack`: ExecuTorch is not installed",
        why=str(error),
        hint='pip install "whisperport[xnnpack]"',
    )
