"""Open whatever holds programs: `.pt2`, `.onnx`, `.tflite`, or a bundle. What it is, its bytes say."""

from pathlib import Path

from whisperport.bundle import MANIFEST, Bundle
from whisperport.errors import ProgramError
from whisperport.inspection.graph import Graph
from whisperport.inspection.read_onnx import read_onnx
from whisperport.inspection.read_pt2 import read_pt2
from whisperport.inspection.read_tflite import read_tflite
from whisperport.regular_file import other_kind

ZIP, TFLITE, EXECUTORCH, ONNX_IR_VERSION = b"PK\x03\x04", b"TFL3", b"ET", b"\x08"
HINT = "give a .pt2, .onnx or .tflite file, or a bundle"


def read_graphs(path: Path) -> list[Graph]:
    """The graph of each program in `path`; no weight is loaded.

    Raises:
        ProgramError: it is missing, damaged, or of none of the four kinds.
        BundleError: it is a bundle, and damaged.
        MissingPackageError: the reader of its format is not installed.
    """
    if path.is_dir():
        return _of_bundle(path)
    if kind := other_kind(path):
        raise ProgramError(f"{path} is not a program", why=f"it is {kind}, not a file", hint=HINT)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise ProgramError(
            f"there is no program at {path}", why=error.strerror or str(error), hint=HINT
        ) from error
    if head[4:6] == EXECUTORCH and head[6:8].isdigit():
        raise _compiled(path)
    if head.startswith(ZIP):
        return read_pt2(path)
    if head[4:8] == TFLITE:
        return read_tflite(path)
    if head.startswith(ONNX_IR_VERSION) or path.suffix == ".onnx":
        return [read_onnx(path)]
    raise ProgramError(
        f"{path.name} is no program that is read here",
        why="it is empty" if not head else f"it begins with {head[:8]!r}",
        hint=HINT,
    )


def _compiled(path: Path) -> ProgramError:
    return ProgramError(
        f"{path.name} is compiled already",
        why="it is an ExecuTorch program: what is delegated is decided",
        hint=f"whisperport inspect {path}",
    )


def _of_bundle(folder: Path) -> list[Graph]:
    """Its ONNX programs; those compiled for another target are not looked into."""
    if not (folder / MANIFEST).is_file():
        raise ProgramError(
            f"{folder} is a folder, and no bundle", why=f"it has no {MANIFEST}", hint=HINT
        )
    bundle = Bundle.open(folder)
    files = {
        entry.spec.name: bundle.path(file)
        for entry in bundle.manifest.programs
        for file in entry.files
        if file.endswith(".onnx")
    }
    if not files:
        raise ProgramError(
            f"the programs of {folder} are compiled already",
            why="none of them is ONNX",
            hint=f"whisperport inspect {folder}",
        )
    return [read_onnx(file) for file in files.values()]
