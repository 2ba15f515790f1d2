"""Open what was compiled, and measure it: `.pte`, `.onnx`, OpenVINO's `.xml`, `.tflite`, or a bundle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from whisperport.bundle import MANIFEST, Bundle, ProgramEntry
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import ProgramError
from whisperport.inspection.profile import Profile, ProfileOptions
from whisperport.inspection.profile_onnx import profile_onnx
from whisperport.inspection.profile_openvino import profile_openvino
from whisperport.inspection.profile_pte import Reasons, profile_pte
from whisperport.inspection.profile_tflite import profile_tflite
from whisperport.progress import Progress
from whisperport.regular_file import other_kind

EXECUTORCH, TFLITE, ONNX_IR_VERSION, ZIP = b"ET", b"TFL3", b"\x08", b"PK\x03\x04"
HINT = "give a .pte, .onnx, OpenVINO .xml or .tflite file, or a bundle"


@dataclass(frozen=True, slots=True)
class Inspected:
    """What was measured, and what could not be."""

    profiles: tuple[Profile, ...]
    skipped: tuple[str, ...]  # programs of a bundle whose format none here measures


def inspect_lowered(
    path: Path, options: ProfileOptions, reasons: Reasons, *, progress: Progress = lambda _: None
) -> Inspected:
    """Run a compiled program, or all of a file or bundle, and say which nodes ran where.

    Args:
        reasons: what XNNPACK would reject of a graph, for the nodes that a .pte leaves outside.

    Raises:
        ProgramError: it is missing, damaged, of none of these formats, or cannot be run.
        BundleError: it is a bundle, and damaged.
        MissingPackageError: the runtime of its format is not installed.
    """
    if path.is_dir():
        return _of_bundle(path, options, reasons, progress)
    progress(f"running {path.name}")
    head = _head(path)
    if head[4:6] == EXECUTORCH and head[6:8].isdigit():
        return Inspected(tuple(profile_pte(path, options, reasons)), ())
    if options.programs:
        raise ProgramError(
            f"of {path.name} one program is run",
            why="only a bundle and a .pte have several to choose from",
            hint="leave out --program",
        )
    return Inspected((_one(path, head, options),), ())


def _head(path: Path) -> bytes:
    if kind := other_kind(path):
        raise ProgramError(f"{path} is not a program", why=f"it is {kind}, not a file", hint=HINT)
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise ProgramError(
            f"there is no program at {path}", why=error.strerror or str(error), hint=HINT
        ) from error


def _one(path: Path, head: bytes, options: ProfileOptions) -> Profile:
    """A file of one program."""
    if head[4:8] == TFLITE:
        return profile_tflite(path, options)
    if head.lstrip().startswith((b"<?xml", b"<net")):
        return profile_openvino(path, options)
    if head.startswith(ONNX_IR_VERSION) or path.suffix == ".onnx":
        return profile_onnx(path, options)
    if head.startswith(ZIP):
        raise ProgramError(
            f"{path.name} is not compiled yet",
            why="it is an archive, such as torch.export.save writes",
            hint=f"whisperport check {path} --target xnnpack",
        )
    raise ProgramError(
        f"{path.name} is no compiled program that is read here",
        why="it is empty" if not head else f"it begins with {head[:8]!r}",
        hint=HINT,
    )


def _of_bundle(
    folder: Path, options: ProfileOptions, reasons: Reasons, progress: Progress
) -> Inspected:
    if not (folder / MANIFEST).is_file():
        raise ProgramError(
            f"{folder} is a folder, and no bundle", why=f"it has no {MANIFEST}", hint=HINT
        )
    bundle = Bundle.open(folder)
    wanted = [bundle.manifest.program(name) for name in options.programs]
    profiles: list[Profile] = []
    skipped: list[str] = []
    for entries in _by_file(wanted or bundle.manifest.programs):
        file = bundle.path(entries[0].files[0])
        names = [entry.spec.name for entry in entries]
        progress(f"running {', '.join(names)}")
        if file.suffix == ".pte":
            profiles += _methods(file, entries, options, reasons)
        elif file.suffix == ".onnx":
            OnnxGraph.of(bundle.folder, entries[0]).read()  # checks which files it refers to
            one = profile_onnx(file, replace(options, programs=()))
            profiles.append(replace(one, program=names[0]))
        else:
            skipped += names
    return Inspected(tuple(profiles), tuple(skipped))


def _by_file(entries: Sequence[ProgramEntry]) -> Iterator[list[ProgramEntry]]:
    """Programs of one file together: reading it takes longer than running it."""
    groups: dict[str, list[ProgramEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.files[0], []).append(entry)
    yield from groups.values()


def _methods(
    file: Path, entries: Sequence[ProgramEntry], options: ProfileOptions, reasons: Reasons
) -> list[Profile]:
    methods = {entry.method: entry for entry in entries}
    names = {
        method: tuple(tensor.name for tensor in entry.spec.inputs)
        for method, entry in methods.items()
    }
    found = profile_pte(file, replace(options, programs=tuple(methods)), reasons, names)
    by_method = {one.program: one for one in found}  # the file has an order of its own
    return [replace(by_method[name], program=entry.spec.name) for name, entry in methods.items()]
