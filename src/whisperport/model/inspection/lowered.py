"""Run and measure a compiled program: a `.pte`, `.onnx` or `.tflite` file, a target's own, or a bundle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from whisperport.errors import ProgramError
from whisperport.model.inspection.profile_onnx import profile_onnx
from whisperport.model.inspection.profile_pte import Reasons, profile_pte
from whisperport.model.inspection.profile_tflite import profile_tflite
from whisperport.model.inspection.tflite_signatures import copy_of_program, read_signatures
from whisperport.program.bundle import MANIFEST, Bundle, ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.profiling import Profile, ProfileOptions, Profiler, readable_formats
from whisperport.system.progress import begin_stage
from whisperport.system.regular_file import other_kind

HEAD_BYTES = 512  # of a file, which tell its format
EXECUTORCH, TFLITE, ONNX_IR_VERSION, ZIP = b"ET", b"TFL3", b"\x08", b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the vendor's compiler planned to run a program; nothing was measured.

    Attributes:
        program: name of the program.
        engines: engine of the device -> number of parts of the program that it runs.
        notes: what the compiler printed about parts that do not run on the accelerator.
    """

    program: str
    engines: dict[str, int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspected:
    """The profiles of all programs in a file or bundle."""

    profiles: tuple[Profile, ...]
    skipped: tuple[str, ...]  # names of a bundle's programs whose format cannot be measured
    plans: tuple[
        Plan, ...
    ] = ()  # of programs that cannot be measured, as their compiler planned them


def inspect_lowered(
    path: Path,
    options: ProfileOptions,
    reasons: Reasons,
    profilers: Sequence[Profiler] = (),
) -> Inspected:
    """Run the compiled programs of a file or bundle, and report where each node ran and how long it took.

    Args:
        path: a .pte, .onnx or .tflite file, a file that one of `profilers` recognizes, or a bundle.
        reasons: returns why XNNPACK rejects nodes of a graph; used for the undelegated nodes of a .pte.
        profilers: of the targets that have a format of their own.

    Raises:
        ProgramError: the file is missing, damaged, of another format, or cannot be run.
        BundleError: the bundle is damaged.
        MissingPackageError: the runtime of the file's format is not installed.
    """
    if path.is_dir():
        return _inspect_bundle(path, options, reasons, profilers)
    begin_stage(f"running {path.name}")
    head = _head(path, profilers)
    if head[4:6] == EXECUTORCH and head[6:8].isdigit():
        return Inspected(tuple(profile_pte(path, options, reasons)), ())
    if options.programs:
        raise ProgramError(
            f"`--program` does not apply to {path.name}",
            why="the file contains one program; only a bundle or a .pte can contain several",
            hint="remove --program",
        )
    return Inspected((_profile_file(path, head, options, profilers),), ())


def _hint(profilers: Sequence[Profiler]) -> str:
    return f"give a {readable_formats(profilers)} file, or a bundle"


def _head(path: Path, profilers: Sequence[Profiler]) -> bytes:
    if kind := other_kind(path):
        raise ProgramError(
            f"{path} is not a program", why=f"the path is {kind}, not a file", hint=_hint(profilers)
        )
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise ProgramError(
            f"cannot read a program from {path}",
            why=error.strerror or str(error),
            hint=_hint(profilers),
        ) from error


def _profile_file(
    path: Path, head: bytes, options: ProfileOptions, profilers: Sequence[Profiler]
) -> Profile:
    """Run and measure a file that contains one program; `head` is its first bytes."""
    if head[4:8] == TFLITE:
        return profile_tflite(path, options)
    own = next((profiler for profiler in profilers if profiler.recognizes(head)), None)
    if own is not None:
        return own.profile([path], options)
    if head.startswith(ONNX_IR_VERSION) or path.suffix == ".onnx":
        return profile_onnx(path, options)
    if head.startswith(ZIP):
        raise ProgramError(
            f"{path.name} is not a compiled program",
            why="the file is a zip archive, such as torch.export.save writes",
            hint=f"check an exported program with: whisperport check {path} --target xnnpack",
        )
    raise ProgramError(
        f"{path.name} is not a compiled program of a known format",
        why="the file is empty" if not head else f"the file begins with {head[:8]!r}",
        hint=_hint(profilers),
    )


def _inspect_bundle(
    folder: Path,
    options: ProfileOptions,
    reasons: Reasons,
    profilers: Sequence[Profiler],
) -> Inspected:
    if not (folder / MANIFEST).is_file():
        raise ProgramError(
            f"the folder {folder} is not a bundle",
            why=f"it has no {MANIFEST}",
            hint=_hint(profilers),
        )
    bundle = Bundle.open(folder)
    selection = [bundle.manifest.program(name) for name in options.programs]
    profiles: list[Profile] = []
    skipped: list[str] = []
    plans: list[Plan] = []
    for entries in _by_file(selection or bundle.manifest.programs):
        file = bundle.path(entries[0].files[0])
        names = [entry.spec.name for entry in entries]
        compiled = [plan for plan in map(_plan, entries) if plan]
        # What a vendor's compiler made runs on the device, whatever its suffix.
        if compiled:
            skipped += names
            plans += compiled
            continue
        begin_stage(f"running {', '.join(names)}")
        if file.suffix == ".pte":
            profiles += _profile_methods(file, entries, options, reasons)
        elif file.suffix == ".onnx":
            OnnxGraph.of(bundle.folder, entries[0]).read()  # checks the paths of its external data
            profile = profile_onnx(file, replace(options, programs=()))
            profiles.append(replace(profile, program=names[0]))
        elif file.suffix == ".tflite":
            profiles += _profile_signatures(file, entries, options)
        elif own := _own_profiler(entries[0], profilers):
            files = [bundle.path(name) for name in entries[0].files]
            profile = own.profile(files, replace(options, programs=()))
            profiles.append(replace(profile, program=names[0]))
        else:
            skipped += names
    return Inspected(tuple(profiles), tuple(skipped), tuple(plans))


def _own_profiler(entry: ProgramEntry, profilers: Sequence[Profiler]) -> Profiler | None:
    """Return the profiler of the format that a program's files have; None: there is none."""
    for profiler in profilers:
        if entry.files[0].endswith(profiler.suffix) and len(entry.files) == profiler.files:
            return profiler
    return None


def _plan(entry: ProgramEntry) -> Plan | None:
    """Return the plan that a compiler left in a program's facts; None: there is none."""
    facts = entry.facts
    return Plan(entry.spec.name, dict(facts.plan), facts.notes) if facts.plan else None


def _by_file(entries: Sequence[ProgramEntry]) -> Iterator[list[ProgramEntry]]:
    """Group programs by their file, because reading a file takes longer than running a program."""
    groups: dict[str, list[ProgramEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.files[0], []).append(entry)
    yield from groups.values()


def _profile_methods(
    file: Path, entries: Sequence[ProgramEntry], options: ProfileOptions, reasons: Reasons
) -> list[Profile]:
    methods = {entry.method: entry for entry in entries}
    names = {
        method: tuple(tensor.name for tensor in entry.spec.inputs)
        for method, entry in methods.items()
    }
    profiles = profile_pte(file, replace(options, programs=tuple(methods)), reasons, names)
    by_method = {
        profile.program: profile for profile in profiles
    }  # the file may have another order
    return [replace(by_method[name], program=entry.spec.name) for name, entry in methods.items()]


def _profile_signatures(
    file: Path, entries: Sequence[ProgramEntry], options: ProfileOptions
) -> Iterator[Profile]:
    """Measure programs of one .tflite file. All but the first are measured in a temporary copy."""
    signatures = read_signatures(file)
    options = replace(options, programs=())
    for entry in entries:
        name = entry.spec.name
        subgraph = signatures[entry.method].subgraph if entry.method in signatures else 0
        if len(signatures) == 1 or subgraph == 0:
            yield replace(profile_tflite(file, options), program=name)
            continue
        with TemporaryDirectory() as folder:
            copy = Path(folder, f"{name}.tflite")
            copy_of_program(file, subgraph, copy)
            yield replace(profile_tflite(copy, options), program=name)
