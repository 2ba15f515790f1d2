"""Inspect compiled programs. A program of unknown origin runs in a child process with limits."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from whisperport.errors import ProgramError
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.bundle.origin import is_trusted
from whisperport.program.json_records import from_json
from whisperport.program.strict_json import Field
from whisperport.runtime.engine.trial import BASE_BYTES, BYTES_PER_S, MEMORY_FACTOR
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.option import MAX_REPEAT, Option
from whisperport.targets import PROFILERS, get_target

if TYPE_CHECKING:  # needed for annotations only
    from whisperport.model.inspection.lowered import Inspected

BASE_S = 20.0  # time limit in seconds, without the runs
RUN_S = 1.5  # further seconds for each run, plus a part that grows with the size of the files


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """Options of `inspect`.

    Args:
        threads: CPU threads of the runtime, 1 to 1024. Default: None, the runtime chooses.
        options: options of the runtime, name -> value. Default: none.
        trust: run the program in this process, without limits on memory and time. Default: False.
    """

    repeat: Annotated[
        int,
        Option(
            "Number of measured runs, after one warm-up run; each time shown is the median",
            1,
            MAX_REPEAT,
        ),
    ] = 5
    threads: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    inputs: Annotated[
        Path | None,
        Option(
            "Inputs of the program, as one array per input name; for a bundle, with one --program",
            metavar="FILE.npz",
            exists=True,
            default="random values; random integers from 0 to 99",
        ),
    ] = None
    programs: Annotated[
        tuple[str, ...],
        Option(
            "Program of a bundle, or method of a .pte file, to measure; may be repeated",
            metavar="NAME",
            default="all",
            flag="--program",
            repeat=True,
        ),
    ] = ()
    trust: bool = False


def inspect(path: Path, options: InspectOptions | None = None) -> "Inspected":
    """Run a compiled program, or all programs of a file or bundle, and list where each node ran.

    Args:
        path: a compiled program's file, or a bundle.
        options: see `InspectOptions`. Default: None, all defaults.

    Returns:
        A profile of every program, and the names of the programs whose format cannot be measured.

    Raises:
        ProgramError: the program is missing, damaged, of an unknown format, cannot be run, or exceeded a
            limit.
        BundleError: the bundle is damaged.
        MissingPackageError: the runtime of the program's format is not installed.
        UsageError: the runtime has no such option, or a number is out of range.
    """
    options = options or InspectOptions()
    if options.trust or ((path / MANIFEST).is_file() and is_trusted(Bundle.open(path))):
        return _inspect(path, options)
    limits = _limits_of(path, options.repeat)
    arguments = asdict(options) | {"path": os.fspath(path), "options": dict(options.options)}
    unlimited = (
        f"it ran with at most {limits}; if you trust its source, `--trust` removes the limits"
    )
    arguments["inputs"] = None if options.inputs is None else os.fspath(options.inputs)
    try:
        result = run_limited("whisperport.build.inspect:inspect_in_child", arguments, limits)
    except StoppedError as error:
        raise ProgramError(
            f"{path.name} cannot be inspected",
            why=str(error),
            hint=unlimited,
        ) from error
    except ProgramError as error:
        if "alloc" in error.why.lower():  # an allocation of the runtime failed because of the limit
            error.hint = unlimited
        raise
    from whisperport.model.inspection.lowered import Inspected

    return from_json(Inspected, Field(result, "", "the answer of the child process"))


def inspect_in_child(
    *, path: str, inputs: str | None, programs: Sequence[str], **options: Any
) -> dict[str, Any]:
    """Run `inspect` in the child process, and return the result as JSON."""
    chosen = InspectOptions(
        inputs=None if inputs is None else Path(inputs), programs=tuple(programs), **options
    )
    return asdict(_inspect(Path(path), chosen))


def _inspect(path: Path, options: InspectOptions) -> "Inspected":
    from whisperport.model.inspection.inputs import read_inputs
    from whisperport.model.inspection.lowered import inspect_lowered
    from whisperport.model.inspection.rejections import rejections
    from whisperport.program.profiling import ProfileOptions

    profile_options = ProfileOptions(
        repeat=options.repeat,
        threads=options.threads,
        options=options.options,
        inputs=None if options.inputs is None else read_inputs(options.inputs),
        programs=options.programs,
    )
    reasons = partial(rejections, spec=get_target("xnnpack").spec)
    return inspect_lowered(path, profile_options, reasons, PROFILERS)


def _limits_of(path: Path, repeat: int) -> Limits:
    """Return limits that grow with the size of the files; the time also grows with the number of runs."""
    size = size_of(path)
    seconds = BASE_S + (repeat + 1) * (RUN_S + size / BYTES_PER_S)
    return Limits(BASE_BYTES + MEMORY_FACTOR * size, seconds)


def size_of(path: Path) -> int:
    """Return the bytes of a folder, or of a file and its weights: `model.onnx` and `model.onnx.data`."""
    try:
        if path.is_dir():
            files = list(path.rglob("*"))
        else:
            beside = path.absolute().parent.iterdir()
            files = [file for file in beside if file.name.startswith(path.stem)]
    except OSError:
        return 0
    return sum(file.stat().st_size for file in files if file.is_file())
