"""The target `xnnpack`: what it supports, and its lowering and loading."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.program.runner import Runner
from whisperport.program.spec import (
    Limit,
    Lowering,
    LoweringCost,
    Runs,
    Software,
    Support,
    TargetSpec,
)
from whisperport.targets.base import RunOptions, Target, without_simplify
from whisperport.targets.cpu.xnnpack.runtime import XnnpackRunner, load_program, start_runtime

if TYPE_CHECKING:
    from whisperport.model.trace.program import Program


# The operators that ExecuTorch's XNNPACK partitioner supports, by the names of `whisperport check`: the
# partitioner's own list, and operators that torch decomposes into members of that list. Each operator was
# lowered in a program of its own; tests/targets/cpu/test_xnnpack.py repeats it for some.
OPERATORS = frozenset(
    [
        *("_native_batch_norm_legit_no_training", "abs", "adaptive_avg_pool2d", "add", "addmm"),
        "avg_pool2d",
        *(
            "baddbmm",
            "batch_norm",
            "bmm",
            "cat",
            "ceil",
            "clamp",
            "clone",
            "constant_pad_nd",
            "conv",
        ),
        *(
            "conv_transpose1d",
            "conv_transpose2d",
            "cos",
            "div",
            "einsum",
            "exp",
            "floor",
            "gelu",
            "glu",
        ),
        *("hardswish", "hardtanh", "leaky_relu", "linear", "log", "matmul", "max_pool2d"),
        *("maximum", "mean", "minimum", "mm", "movedim", "mul", "neg", "pow", "prelu"),
        *(
            "pixel_shuffle",
            "pixel_unshuffle",
            "relu",
            "relu6",
            "reshape",
            "rsqrt",
            "rsub",
            "sigmoid",
            "silu",
            "sin",
            "slice",
        ),
        *("softmax", "sqrt", "square", "stack", "sub", "tanh", "to", "transpose"),
        *("unsqueeze", "upsample_bilinear2d"),
    ]
)
CONFIG = "executorch 1.5.1 backends/xnnpack/partition/config/"
TORCH = frozenset({"torch"})
FLOATS = frozenset({"float16", "float32"})
PARTS = frozenset({"alias", "chunk", "narrow", "select", "slice", "split", "unbind"})
LIMITS = (
    Limit(
        rule="WP103",
        formats=TORCH,
        operators=frozenset({"scaled_dot_product_attention"}),
        value="a scalar product, expand, eq, full_like, logical_not, any and where",
        source="lowered with executorch 1.5.1: torch's decomposition of attention",
        rewrite="attention-by-softmax",
        parts=(
            False,
            True,
            False,
            True,
        ),  # scale; scores and softmax; masked rows; the second matmul
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
        parts=(False, True),  # the copies; bmm
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
        operators=frozenset({"adaptive_avg_pool2d"}),
        value=("output_size", frozenset({"[1, 1]"})),
        source="lowered with executorch 1.5.1: torch decomposes it to a mean over the last two axes",
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
        rule="WP310",
        formats=TORCH,
        value=PARTS,
        parts=(True, False),  # the operator; the copy
        source="lowered with executorch 1.5.1: alias_copy, slice_scatter and select_scatter",
    ),
    Limit(
        rule="WP501",
        operators=frozenset({"gelu"}),
        source="measured with executorch 1.5.1: 4.73e-4, the difference between the two forms",
        kind="warning",
    ),
)


FILE = "xnnpack/model.pte"
FORWARD = "forward"


@final
class Xnnpack(Target):
    """ExecuTorch with XNNPACK. It has no options for running but the number of threads."""

    spec = TargetSpec(
        name="xnnpack",
        summary="ExecuTorch with XNNPACK: phones and boards, Arm and x86 CPUs",
        supports=Support(
            operators=OPERATORS,
            max_rank=6,
            dtypes=frozenset({"float32", "float16", "int64", "int32", "bool"}),
            limits=LIMITS,
            suggested_rewrites={"layer_norm": "layer-norm-by-linear", "dropout": "drop-no-ops"},
            static=False,
        ),
        lowering=Lowering(
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
            cost=LoweringCost(
                base_bytes=0.9e9,
                bundle_factor=2.9,
                program_factor=9.5,
                base_s=40,
                s_per_gb=200,
                temporary_factor=1,  # see weights_on_disk.py
            ),
        ),
        runs=Runs(timed_precisions=()),
        software=Software(
            extra="xnnpack",
            run_extra="xnnpack",
            runtime="executorch",
        ),
        sources={
            "operators": CONFIG + "__init__.py, and each lowered by itself",
            "domains": "executorch 1.5.1 backends/xnnpack/partition/config/__init__.py: all are aten's",
            "formats": "executorch 1.5.1 exir: to_edge_transform_and_lower gets an ExportedProgram",
            "static": "executorch 1.5.1 lowers programs of bounded dynamic shapes",
            "max_rank": "google/XNNPACK include/xnnpack.h: XNN_MAX_TENSOR_DIMS is 6",
            "dtypes": "executorch 1.5.1 passes these to its portable kernels; XNNPACK itself: WP203",
        },
    )

    def lower(self, programs: Sequence["Program"], folder: Path) -> list[ProgramEntry]:
        return self._lowered({program.name: program for program in programs}, folder)

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Lower one program; its method has the name that ExecuTorch's own tools expect."""
        without_simplify(self.spec.name, simplify=simplify)
        (entry,) = self._lowered({FORWARD: program}, path.parent)
        return entry, entry.facts.to_json()

    def _lowered(self, programs: Mapping[str, "Program"], folder: Path) -> list[ProgramEntry]:
        """Lower programs, by the name of the method, to one file."""
        from whisperport.targets.cpu.xnnpack.lowering import lower_to_pte

        delegation = lower_to_pte(programs, folder / FILE)
        return [
            ProgramEntry(
                spec=program.spec,
                placement=Placement(self.spec.name),
                method=method,
                files=(FILE,),
                facts=ProgramFacts.of(delegation[method]),
            )
            for method, program in programs.items()
        ]

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        from whisperport.model.inspection.quiet import quiet

        with quiet():
            runtime = start_runtime(options.cores)
            programs = {}
            runners: dict[str, Runner] = {}
            for entry in entries:
                file = entry.files[0]
                if file not in programs:
                    programs[file] = load_program(runtime, regular_file(folder, file))
                runners[entry.spec.name] = XnnpackRunner(entry, programs[file])
        return runners


TARGETS = (Xnnpack(),)
