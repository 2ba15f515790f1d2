"""Inspect a compiled program; one of unknown origin runs in a child process with limits."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.bundle import MANIFEST, Bundle
from whisperport.bundle.origin import is_trusted
from whisperport.errors import ProgramError
from whisperport.limited import Limits, StoppedError, run_limited
from whisperport.progress import Progress
from whisperport.runtime.trial import BASE_BYTES, BYTES_PER_S, MEMORY_FACTOR
from whisperport.targets import get_target

if TYPE_CHECKING:  # boards have no inspection
    from whisperport.inspection.lowered import Inspected

BASE_S = 20.0
RUN_S = 1.5  # for each run of a small program


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """How a program is run to be measured."""

    repeat: int = 5  # runs, after one that does not count
    threads: int | None = None  # None: as the runtime chooses
    options: Mapping[str, str] = field(default_factory=dict)  # the runtime's own
    inputs: Path | None = None  # an .npz with arrays by name; None: random
    programs: tuple[str, ...] = ()  # programs of a bundle, or methods of a .pte; empty: all
    trust: bool = False  # run it in this process, without limits


def inspect(
    path: Path, options: InspectOptions | None = None, *, progress: Progress = lambda _: None
) -> "Inspected":
    """Run a compiled program, or all of a file or bundle, and say which nodes ran where.

    Raises:
        ProgramError: it is missing, damaged, of an unknown format, cannot be run, or exceeded a limit.
        BundleError: it is a bundle, and damaged.
        MissingPackageError: the runtime of its format is not installed.
        UsageError: no such option of the runtime.
    """
    options = options or InspectOptions()
    if options.trust or _is_own_bundle(path):
        return _inspect(path, options, progress)
    limits = _limits_of(path, options.repeat)
    arguments = asdict(options) | {"path": os.fspath(path), "options": dict(options.options)}
    unlimited = (
        f"it ran with at most {limits}; if you trust its source, `--trust` runs it without limits"
    )
    arguments["inputs"] = None if options.inputs is None else os.fspath(options.inputs)
    try:
        found = run_limited("whisperport.inspecting:inspect_in_child", arguments, limits, progress)
    except StoppedError as error:
        raise ProgramError(
            f"{path.name} cannot be inspected",
            why=str(error),
            hint=unlimited,
        ) from error
    except ProgramError as error:
        if "alloc" in error.why.lower():  # the kernel refused memory to the runtime
            error.hint = unlimited
        raise
    return _from_json(found)


def inspect_in_child(
    *, progress: Progress, path: str, inputs: str | None, programs: Sequence[str], **options: Any
) -> dict[str, Any]:
    """The job of the child: the result as JSON."""
    chosen = InspectOptions(
        inputs=None if inputs is None else Path(inputs), programs=tuple(programs), **options
    )
    return asdict(_inspect(Path(path), chosen, progress))


def _inspect(path: Path, options: InspectOptions, progress: Progress) -> "Inspected":
    from whisperport.inspection.check import rejections
    from whisperport.inspection.inputs import read_inputs
    from whisperport.inspection.lowered import inspect_lowered
    from whisperport.inspection.profile import ProfileOptions

    how = ProfileOptions(
        repeat=options.repeat,
        threads=options.threads,
        options=options.options,
        inputs=None if options.inputs is None else read_inputs(options.inputs),
        programs=options.programs,
    )
    reasons = partial(rejections, spec=get_target("xnnpack").spec)
    return inspect_lowered(path, how, reasons, progress=progress)


def _is_own_bundle(path: Path) -> bool:
    return (path / MANIFEST).is_file() and is_trusted(Bundle.open(path))


def _limits_of(path: Path, repeat: int) -> Limits:
    """They grow with the size of the files, and the time with the number of runs."""
    size = sum(file.stat().st_size for file in _files_of(path) if file.is_file())
    seconds = BASE_S + (repeat + 1) * (RUN_S + size / BYTES_PER_S)
    return Limits(BASE_BYTES + MEMORY_FACTOR * size, seconds)


def _files_of(path: Path) -> Sequence[Path]:
    """Those of a bundle; or a file, and its weights beside it: `model.onnx` has `model.onnx.data`."""
    try:
        if path.is_dir():
            return list(path.rglob("*"))
        return [
            file for file in path.absolute().parent.iterdir() if file.name.startswith(path.stem)
        ]
    except OSError:
        return []


def _from_json(found: dict[str, Any]) -> "Inspected":
    from whisperport.inspection.lowered import Inspected
    from whisperport.inspection.profile import NodeProfile, Profile

    profiles = []
    for profile in found["profiles"]:
        nodes = tuple(NodeProfile(**node) for node in profile["nodes"])
        profiles.append(Profile(**{**profile, "nodes": nodes, "notes": tuple(profile["notes"])}))
    return Inspected(tuple(profiles), tuple(found["skipped"]))
