"""Read the graphs of a file, of any format that is known by its content, or of a bundle."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from whisperport.errors import ProgramError
from whisperport.model.inspection.graph import Graph
from whisperport.model.inspection.read_onnx import read_onnx
from whisperport.model.inspection.read_pt2 import read_pt2
from whisperport.model.inspection.read_tflite import read_tflite
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.profiling import Profiler, readable_formats
from whisperport.program.sizes import NO_SIZES, not_fixable
from whisperport.system.regular_file import other_kind

ZIP, TFLITE, EXECUTORCH, ONNX_IR_VERSION = b"PK\x03\x04", b"TFL3", b"ET", b"\x08"
HEAD_BYTES = 8  # of a file, which tell its format
MOST_ELEMENTS = 2**63 - 1  # of a tensor; no runtime counts further


def read_graphs(
    path: Path, sizes: Mapping[str, int] = NO_SIZES, profilers: Sequence[Profiler] = ()
) -> list[Graph]:
    """Read the graph of each program in a file or bundle, without weights.

    Args:
        path: a .pt2, .onnx or .tflite file, a file that one of `profilers` recognizes, or a bundle.
        sizes: numbers for the dynamic sizes of a .pt2 file, as it names them.
        profilers: of the targets that have a format of their own.

    Raises:
        ProgramError: the file is missing, damaged, or of another format; or sizes are given for one without
            dynamic sizes that this function can fix.
        BundleError: the bundle is damaged.
        MissingPackageError: the reader of the file's format is not installed.
    """
    graphs = _graphs(path, sizes, profilers)
    for node in (node for graph in graphs for node in graph.nodes):
        for value in (*node.tensors, *node.outputs):
            if (value.size or 0) > MOST_ELEMENTS:
                raise ProgramError(
                    f"{path.name} is damaged",
                    why=f"the shape that it states of the tensor {value.name[:40]!r} has more elements "
                    "than 63 bits can count",
                    hint="write the file again",
                )
    return graphs


def _graphs(path: Path, sizes: Mapping[str, int], profilers: Sequence[Profiler]) -> list[Graph]:
    hint = f"give a {readable_formats(profilers, '.pt2')} file, or a bundle"
    if path.is_dir():
        if sizes:
            raise not_fixable(path.name)
        return _of_bundle(path, hint, profilers)
    if kind := other_kind(path):
        raise ProgramError(
            f"{path} is not a program", why=f"the path is {kind}, not a file", hint=hint
        )
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise ProgramError(
            f"cannot read a program from {path}", why=error.strerror or str(error), hint=hint
        ) from error
    if head[4:6] == EXECUTORCH and head[6:8].isdigit():
        raise _compiled(path)
    if head.startswith(ZIP):
        return read_pt2(path, sizes)
    if sizes:
        raise not_fixable(path.name)
    if head[4:8] == TFLITE:
        return read_tflite(path)
    if own := next((profiler for profiler in profilers if profiler.recognizes(head)), None):
        return [own.read_graph(path)]
    if head.startswith(ONNX_IR_VERSION) or path.suffix == ".onnx":
        return [read_onnx(path)]
    raise ProgramError(
        f"{path.name} is not a program of a known format",
        why="the file is empty" if not head else f"the file begins with {head[:8]!r}",
        hint=hint,
    )


def _compiled(path: Path) -> ProgramError:
    return ProgramError(
        f"{path.name} is already compiled",
        why="the file is an ExecuTorch program, whose delegation is fixed",
        hint=f"run and measure it with: whisperport inspect {path}",
    )


def _of_bundle(folder: Path, hint: str, profilers: Sequence[Profiler]) -> list[Graph]:
    """Read the programs of a bundle whose format is known; those in other formats are ignored."""
    if not (folder / MANIFEST).is_file():
        raise ProgramError(
            f"the folder {folder} is not a bundle", why=f"it has no {MANIFEST}", hint=hint
        )
    bundle = Bundle.open(folder)
    own = {profiler.suffix: profiler for profiler in profilers}
    files = dict.fromkeys(
        bundle.path(file)
        for entry in bundle.manifest.programs
        for file in entry.files
        if file.endswith((".onnx", ".tflite", *own))
    )
    if not files:
        raise ProgramError(
            f"the programs of {folder} are already compiled",
            why="none of them is an ONNX or TFLite file",
            hint=f"run and measure them with: whisperport inspect {folder}",
        )
    graphs: list[Graph] = []
    for file in files:
        if file.suffix == ".tflite":
            graphs += read_tflite(file)
        else:
            graphs.append(
                read_onnx(file) if file.suffix == ".onnx" else own[file.suffix].read_graph(file)
            )
    return graphs
