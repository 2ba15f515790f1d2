"""Drive Hailo's compiler over a work folder, explain its failures, and check what it made."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whisperport.atomic import write_atomic
from whisperport.errors import BundleError, LoweringError, MissingPackageError, WhisperportError
from whisperport.spec import ProgramSpec
from whisperport.targets.base import Say
from whisperport.targets.hailo import stages
from whisperport.targets.hailo.chips import Chip
from whisperport.targets.hailo.hef import ARCHITECTURES, Hef, read_hef
from whisperport.targets.hailo.layout import results_of, stream_shape

SCRIPT = "compile.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program to compile; its calibration files lie in the work folder already."""

    name: str
    onnx: Path
    script: str  # the model script's text
    calibration: str | Mapping[str, str]  # as `calibration.write_set` returned it


def check_compiler(chip: Chip) -> None:
    """Raises LoweringError if the compiler that is installed serves other chips; none is no error."""
    try:
        stages.check_version(chip.name, chip.compiler)
    except stages.WrongCompilerError as error:
        raise _wrong_compiler(chip, error) from error


def prepare(work: Path, chip: Chip, jobs: Sequence[Job]) -> None:
    """Put everything into the work folder that the compiler needs, and a script that runs it."""
    for job in jobs:
        folder = work / job.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(job.onnx, folder / f"{job.name}.onnx")
        write_atomic(folder / f"{job.name}.alls", job.script.encode("utf-8"))
    described = {
        "chip": chip.name,
        "compiler": chip.compiler,
        "programs": [{"name": job.name, "calibration": job.calibration} for job in jobs],
    }
    write_atomic(work / stages.JOB, json.dumps(described, indent=1).encode("utf-8"))
    write_atomic(work / SCRIPT, Path(stages.__file__).read_bytes())


def run(work: Path, chip: Chip, say: Say) -> None:
    """Do what is left of a prepared work folder.

    Raises:
        MissingPackageError: something is left, and the compiler is not installed.
        LoweringError: it is of another generation, or refused.
    """
    try:
        stages.run(work, say)
    except ImportError as error:
        raise MissingPackageError(
            f"not compiled yet: Hailo's Dataflow Compiler {_version(chip)} is not installed here",
            why=str(error),
            hint=f"everything it needs is in {work}: take that folder to a machine that has it (x86_64 "
            f"Linux, from Hailo's developer zone), run `python {SCRIPT}` there, bring the folder back, "
            "and give this command again",
        ) from error
    except stages.WrongCompilerError as error:
        raise _wrong_compiler(chip, error) from error
    except WhisperportError:
        raise
    except Exception as error:  # its classes are not public, and share no base but Exception
        raise _explained(chip, error) from error


def check_hef(path: Path, chip: Chip, spec: ProgramSpec) -> Hef:
    """Hold a HEF against the chip and the program that it is for.

    Raises:
        BundleError: it is damaged, for another chip, or has other inputs or outputs.
    """
    hef = read_hef(path)
    if hef.architecture not in chip.architectures:
        runs = ", ".join(ARCHITECTURES.get(a, str(a)) for a in sorted(chip.architectures))
        raise BundleError(
            f"{path.name} is for another chip than `{chip.name}`",
            why=f"it was compiled for {hef.chip}; `{chip.name}` runs HEFs for {runs}",
            hint="export and compile for the chip that you have",
        )
    (network, *others) = hef.networks or (None,)
    if network is None or others:
        raise BundleError(f"{path.name} holds {len(hef.networks)} networks; expected one")
    kept = results_of([stream.name for stream in network.outputs], len(spec.outputs))
    results = [stream for stream in network.outputs if stream.name in kept]
    for kind, streams, tensors in (
        ("inputs", network.inputs, spec.inputs),
        ("outputs", results, spec.outputs),
    ):
        # HailoRT 4 describes streams in an older way too, which the reader leaves out.
        found = sorted(stream.shape for stream in streams)
        expected = sorted(stream_shape(tensor.shape) for tensor in tensors)
        if streams and found != expected:
            raise BundleError(
                f"{path.name} does not compute `{spec.name}`",
                why=f"its {kind} are {found}, expected {expected} (height, width, channels)",
                hint="compile it from this bundle, or take the HEF of this window and checkpoint",
            )
    return hef


# What the compiler raises, by the names of its classes: they cannot be imported where it is not.
# Sources: community.hailo.ai, hailo-ai/hailo_model_zoo#98, ankandrew/fast-plate-ocr#44.
_NOT_PARSED = (
    "`whisperport check BUNDLE/{chip}/encoder.onnx --target {chip}` names what it does not take"
)
_FAILURES: Mapping[str, tuple[str, str]] = {
    "ParsingWithRecommendationException": ("cannot parse the whole graph", _NOT_PARSED),
    "UnsupportedModelError": ("does not take a node of the graph", _NOT_PARSED),
    "UnsupportedActivationLayerError": ("does not take an activation", _NOT_PARSED),
    "UnsupportedShuffleLayerError": ("does not take a reshape or transpose", _NOT_PARSED),
    "AllocatorScriptParserException": (
        "does not take a line of the model script",
        "leave `--sixteen-bit` at its default: published lists name layers of other graphs",
    ),
    "BackendAllocatorException": (
        "could not place the program on the chip",
        "export with a shorter `--window`; or `--compiler-optimization-level max`, which takes longer",
    ),
    "BadInputsShape": (
        "does not take the calibration set's shape",
        "remove the work folder, and give the recordings again",
    ),
    "MemoryError": (
        "ran out of memory",
        "use a machine with more, or `--no-finetune`, which needs less",
    ),
}


def _explained(chip: Chip, error: Exception) -> LoweringError:
    names = [kind.__name__ for kind in type(error).__mro__]
    known = next((_FAILURES[name] for name in names if name in _FAILURES), None)
    happened, hint = known or ("failed", "finished stages are kept: the same command goes on there")
    return LoweringError(
        f"Hailo's compiler {happened}",
        why=f"{type(error).__name__}: {_first_line(error)}",
        hint=hint.replace("{chip}", chip.name),
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "it gave no reason"


def _wrong_compiler(chip: Chip, error: Exception) -> LoweringError:
    return LoweringError(
        f"this Dataflow Compiler does not serve `{chip.name}`",
        why=str(error),
        hint=f"install Dataflow Compiler {_version(chip)}, in an environment of its own",
    )


def _version(chip: Chip) -> str:
    return f"{chip.compiler[0]}.x"
