"""The vendor's compiler, rknn-toolkit2: calibration set, stage, and check of compiled files."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast, final

from whisperport.errors import BundleError, UsageError
from whisperport.program.dims import Dims
from whisperport.program.program_kind import ENCODER
from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiled_file import RECOMPILE, printable_texts, read_report
from whisperport.targets.compiler import (
    CalibrationNeed,
    CompilePlan,
    Compiler,
    CompileRequest,
    Explanation,
)
from whisperport.targets.onnx.ruined import Ruined, ruined
from whisperport.targets.target_options import Option, check_ranges, clips_option
from whisperport.targets.toolchain import Stage
from whisperport.targets.vendors.rockchip import stages
from whisperport.targets.vendors.rockchip.chips import FLOAT, W8A8, W16A16, Chip
from whisperport.targets.vendors.rockchip.rknn_file import FLOAT_TYPE, check_rknn

LOWERED, COMPILED = ".onnx", ".rknn"
KEPT = (".model", ".data", ".cfg")  # of the compiler's own graph, quantized
BUILT = "built.json"
OLDEST = (2, 5)  # of rknn-toolkit2; no older version was tried

# Precision -> the compiler's `quantized_dtype`, and the type of tensors that a compiled file then states.
QUANTIZED: Mapping[str, tuple[str, str]] = {
    W8A8: ("w8a8", "int8"),
    W16A16: ("w16a16i_dfp", "int16"),
}

# Class of a stage's error -> what happened, as words that follow the compiler's title; and what to do.
_FAILURES: Mapping[str, Explanation] = {
    "RejectedError": (
        "rejected the program",
        "place it on the CPU: export with `--placement {program}=onnxruntime`, or choose another precision",
    ),
}


MISCOMPILING_RULE = "convert_exmatmul_to_mul"
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options for compiling.

    Raises:
        UsageError: a number is out of its range, or a rule's name has other characters.
    """

    emulate: Annotated[
        int,
        clips_option("the vendor's simulator"),
    ] = 6  # all clips of a default reference: words decide about a quantized encoder
    disable_rules: Annotated[
        str,
        Option(
            "Graph rules of the compiler that are turned off, separated by commas; `none` leaves all of "
            f"them on. {MISCOMPILING_RULE} computes wrong logits and wrong keys in `step`"
        ),
    ] = MISCOMPILING_RULE
    optimization: Annotated[
        Literal[0, 1, 2, 3],
        Option(
            "The compiler's optimization_level: 3 allows all rules, 0 none of the optional ones"
        ),
    ] = 3
    hybrid: Annotated[
        bool,
        Option(
            "Compute in float16 what one 8-bit scale ruins in an encoder in w8a8, as the calibration "
            "samples show (the compiler's hybrid quantization)"
        ),
    ] = True
    keep: Annotated[
        bool,
        Option(
            "Write files .model, .data and .cfg beside a program in w8a8: with them, the simulator starts "
            "without calibration samples"
        ),
    ] = False
    samples: Annotated[
        int,
        Option(
            "Number of calibration samples of each quantized program; the vendor recommends 20 to 100",
            low=1,
            high=1000,
        ),
    ] = 32

    def __post_init__(self) -> None:
        check_ranges(self)
        if not re.fullmatch(r"\w+(,\w+)*", self.disable_rules, re.ASCII):
            raise UsageError(
                f"the option `disable-rules` cannot be `{self.disable_rules[:40]}`",
                hint="expected names of rules with commas between them, or `none`",
            )

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules to turn off."""
        return () if self.disable_rules == NONE else tuple(self.disable_rules.split(","))


@final
class RknnCompiler(Compiler):
    """The compiler for one chip."""

    toolchain: ClassVar[str] = "rockchip"
    sdk: ClassVar[str] = "rknn"
    source: ClassVar[str] = (
        "x86-64 Linux, Python 3.11: pip install rknn-toolkit2 in an environment of its own; its licence "
        "allows the development of applications for the vendor's chips"
    )
    script: ClassVar[Path] = Path(stages.__file__)
    options: ClassVar[type[Any]] = CompileOptions
    suffix: ClassVar[str] = COMPILED
    runs: ClassVar[Literal["simulated"]] = "simulated"
    failures: ClassVar[Mapping[str, Explanation]] = _FAILURES

    def __init__(self, chip: Chip, precision: str = FLOAT) -> None:
        self.required = {"sdk": "rknn-toolkit2", "oldest": list(OLDEST)}
        self._chip, self._precision, self.target = chip, precision, chip.name
        self.title = f"rknn-toolkit2 {OLDEST[0]}.{OLDEST[1]}"

    def in_precision(self, precision: str) -> Self:
        return type(self)(self._chip, precision)

    def calibration(self, spec: ProgramSpec, dims: Dims, options: Any) -> CalibrationNeed | None:
        if self._precision == FLOAT:
            return None
        return CalibrationNeed(
            samples=cast(CompileOptions, options).samples,
            names=tuple(tensor.name for tensor in spec.inputs),
            fewer_hint=f"`--option {self._chip.name}.samples=N` needs fewer",
        )

    def plan(self, request: CompileRequest) -> CompilePlan:
        name, chosen = request.spec.name, cast(CompileOptions, request.options)
        model, artifact = f"{name}{LOWERED}", f"{name}{COMPILED}"
        inputs, outputs = self.emulated(request)
        sensitive = self._ruined(request)
        keep = [f"{name}{suffix}" for suffix in KEPT if chosen.keep and self._precision == W8A8]
        reads = (*request.files, *request.arrays, *inputs.values())
        return CompilePlan(
            stages=(Stage("compile", reads, (artifact, BUILT, *keep, *outputs.values())),),
            artifact=artifact,
            settings={
                "model": model,
                "artifact": artifact,
                "optimization": chosen.optimization,
                "disable_rules": list(chosen.rules),
                "quantized_dtype": QUANTIZED[self._precision][0] if request.arrays else "",
                "calibration": list(request.arrays),
                "in_float": sensitive.names if sensitive else (),
                "keep": keep,
                "simulated_inputs": inputs,
                "simulated_outputs": list(outputs.values()),
            },
            keep=tuple(keep),
            notes=sensitive.notes(FLOAT_TYPE) if sensitive else (),
        )

    def _ruined(self, request: CompileRequest) -> Ruined | None:
        """Return what 8 bits ruin in an encoder; None: that is not examined."""
        hybrid = cast(CompileOptions, request.options).hybrid
        if not hybrid or self._precision != W8A8 or request.spec.kind.name != ENCODER:
            return None
        names = (tensor.name for tensor in request.spec.inputs)
        arrays = zip(names, request.arrays, strict=True)
        return ruined(
            request.folder / f"{request.spec.name}{LOWERED}",
            {name: request.folder / file for name, file in arrays},
        )

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        compiled = check_rknn(artifact, self._chip.name, spec)
        expected = FLOAT_TYPE if self._precision == FLOAT else QUANTIZED[self._precision][1]
        if (compiled.types - {FLOAT_TYPE} or {FLOAT_TYPE}) != {expected}:  # hybrid: both
            raise BundleError(
                f"{artifact.name} was not compiled in the precision {self._precision}",
                why=f"its tensors are {', '.join(sorted(compiled.types))[:80]}; expected {expected}",
                hint=RECOMPILE,
            )
        built = read_report(artifact.with_name(BUILT))
        return {
            "compiler": compiled.compiler,
            "compiled_for": self._chip.name,
            "program_bytes": compiled.program_bytes,
            "disabled_rules": printable_texts(built.get("disabled_rules")),
            "notes": _notes(printable_texts(built.get("errors"))),
        }


def _notes(errors: list[str]) -> list[str]:
    """Return what the user should know of the build: errors that the compiler printed and ignored."""
    return [
        f"the compiler printed {error!r} and continued ({count} times); its effect on a chip is not known"
        for error, count in Counter(errors).items()
    ]
