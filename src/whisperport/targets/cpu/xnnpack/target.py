"""The target `xnnpack`: what it supports, and its lowering and loading."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.program.runner import Runner
from whisperport.program.spec import Lowering, LoweringCost, Runs, Software, Support, TargetSpec
from whisperport.targets.base import RunOptions, Target, without_simplify
from whisperport.targets.cpu.xnnpack.limits import CONFIG, LIMITS, OPERATORS
from whisperport.targets.cpu.xnnpack.runtime import XnnpackRunner, load_program, start_runtime

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program

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
