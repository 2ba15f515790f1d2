"""AWS's compiler: what it reads, its stages, the check of compiled files, and its errors in words."""

import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast, final

from whisperport.errors import BundleError, UsageError
from whisperport.program.dims import Dims
from whisperport.program.spec import ProgramSpec
from whisperport.system.regular_file import other_kind
from whisperport.targets.compiled_file import printable, read_report
from whisperport.targets.compiler import (
    CalibrationNeed,
    CompilePlan,
    Compiler,
    CompileRequest,
    Explanation,
)
from whisperport.targets.toolchain import Failure, Stage
from whisperport.targets.vendors.aws_neuron import stages
from whisperport.targets.vendors.aws_neuron.codes import code_in, explained
from whisperport.targets.vendors.aws_neuron.flags import CompileOptions, arguments_of

DESCRIPTION, WEIGHTS, COMPILED = ".json", ".safetensors", ".pt"
SCRIPT = Path(__file__).with_name(stages.MODULES)

# The last versions of torch with torch-xla, on which `torch_neuronx.trace` is built. Source: chips.RELEASE,
# release-notes/components/pytorch.rst: "PyTorch 2.9 is the last version using PyTorch/XLA".
TORCH = ("2.9",)

MAX_CODE = 1 << 24  # bytes of one file of TorchScript code that are searched
MAX_ENTRIES = 100_000  # files in a compiled file

# Class of a stage's error -> what happened, as words that follow the compiler's title; and what to do.
_FAILURES: Mapping[str, Explanation] = {
    "OutOfMemoryError": (
        "ran out of memory",
        "use a machine with more memory: any machine can compile, and no device is needed; or use "
        "`--option aws-neuron.optlevel=1`",
    ),
    "MemoryError": (
        "ran out of memory",
        "use a machine with more memory: any machine can compile, and no device is needed",
    ),
    "CrashedError": (
        "crashed",
        "repeat the command with `--option aws-neuron.optlevel=1`; if it crashes again, report it to AWS "
        "with the log",
    ),
    "UnusedInputError": (
        "dropped an input of the program",
        "no output depends on this input, so that its values are ignored. A common cause is a decoder that "
        "receives the audio features and reads cross-attention K/V from a cache. whisperport's programs "
        "have no such input: report it with the log",
    ),
    "IgnoredArgumentError": (
        "ignored an argument of the tracer",
        "install a later torch-neuronx for torch 2.9: this version would compile another program",
    ),
    "ModuleMismatchError": (
        "was not started: the program has another form than the tracer needs",
        "export the bundle again; its description does not fit this version of whisperport",
    ),
    "ModuleError": (
        "was not started: the program's files are damaged or do not fit each other",
        "export the bundle again",
    ),
}


@final
class NeuronCompiler(Compiler):
    """`torch_neuronx.trace` with `neuronx-cc`, for the chip that an option names."""

    target = "aws-neuron"
    title = "AWS's torch-neuronx"
    toolchain: ClassVar[str] = "aws-neuron"
    sdk: ClassVar[str] = "torch_neuronx"
    source: ClassVar[str] = (
        "x86-64 Linux, AWS Neuron SDK 2.31 with torch-neuronx for torch 2.9; no device"
    )
    script: ClassVar[Path] = Path(stages.__file__)
    options: ClassVar[type[Any]] = CompileOptions
    suffix: ClassVar[str] = COMPILED
    failures: ClassVar[Mapping[str, Explanation]] = _FAILURES

    def settings(self) -> Mapping[str, Any]:
        return {"torch": list(TORCH)}

    def calibration(self, spec: ProgramSpec, dims: Dims, options: Any) -> CalibrationNeed | None:
        return None  # nothing is quantized

    def plan(self, request: CompileRequest) -> CompilePlan:
        name, chosen = request.spec.name, cast(CompileOptions, request.options)
        description, weights = (_only_file(request, suffix) for suffix in (DESCRIPTION, WEIGHTS))
        arguments = arguments_of(chosen)
        shutil.copyfile(SCRIPT, request.folder / SCRIPT.name)
        read = (stages.MODULES, description, weights)
        artifact = f"{name}{COMPILED}"
        return CompilePlan(
            stages=(
                Stage("check", read, (stages.IO,)),
                Stage("compile", (*read, stages.IO), (artifact, stages.BUILT)),
            ),
            artifact=artifact,
            settings={
                "description": description,
                "weights": weights,
                "artifact": artifact,
                "arguments": arguments,
                "chip": chosen.chip,
                "lnc": chosen.chosen_lnc(),
            },
        )

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        """Check that a file is TorchScript with a Neuron graph; nothing of it is run or unpickled.

        AWS does not publish the format of the graph, so that its contents are not checked.
        """
        check_traced(artifact)
        built = read_report(artifact.with_name(stages.BUILT))
        versions = built.get("versions")
        compiler = versions.get("neuronx-cc", "") if isinstance(versions, dict) else ""
        return {
            "compiler": printable(compiler),
            "compiled_for": printable(built.get("chip", "")),
            "lnc": built["lnc"] if built.get("lnc") in (1, 2) else 1,
        }

    def explain(self, failure: Failure) -> Explanation:
        known = explained(code_in(failure.message), failure.program)
        return known or super().explain(failure)


def check_traced(path: Path) -> None:
    """Check that a file is TorchScript that calls a compiled Neuron graph.

    Raises:
        BundleError: it is not.
    """
    kind = other_kind(path) or ("" if path.is_file() else "missing")
    why = f"the path is {kind}" if kind else ""
    try:
        if not why and not _calls_neuron(path):
            why = "it is TorchScript without a Neuron graph, so that the compiler did not write it"
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError, EOFError) as error:
        why = f"it is not a TorchScript file: {printable(error)}"
    if why:
        raise BundleError(
            f"{path.name} is not a file that {NeuronCompiler.title} compiled",
            why=why,
            hint="compile the bundle again with `whisperport compile`",
        )


def _calls_neuron(path: Path) -> bool:
    """Whether TorchScript code in a file uses an operator or a class of `neuron`.

    Source: chips.RELEASE, api-torch-neuronx-trace.rst: a "stateful `neuron::Model` component with an
    associated `neuron::forward*` operation".
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if len(entries) > MAX_ENTRIES:
            raise ValueError(f"it has {len(entries)} entries")
        for entry in entries:
            if "/code/" in entry.filename and entry.filename.endswith(".py"):
                with archive.open(entry) as file:
                    code = file.read(MAX_CODE)
                if b"neuron.Model" in code or b"ops.neuron." in code:
                    return True
    return False


def _only_file(request: CompileRequest, suffix: str) -> str:
    matching = [file for file in request.files if file.endswith(suffix)]
    if len(matching) != 1:
        raise UsageError(
            f"`{request.spec.name}` cannot be compiled for `aws-neuron`",
            why=f"the bundle lists {len(matching)} files {suffix} for it; expected one",
            hint="export the bundle again with `whisperport export CHECKPOINT --target aws-neuron`",
        )
    return matching[0]
