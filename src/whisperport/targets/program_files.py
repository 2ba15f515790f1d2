"""The files of a program for a target with a vendor's compiler: the lowered one, and the compiled one."""

from collections.abc import Sequence
from pathlib import Path

from whisperport.bundle import ProgramEntry
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import BundleError
from whisperport.runner import Runner
from whisperport.spec import TargetSpec
from whisperport.targets.onnx_runner import OnnxRunner


def compiled_file(spec: TargetSpec, entry: ProgramEntry, suffix: str) -> str:
    """Return the file that the vendor's compiler made of a program, relative to the bundle.

    Raises:
        BundleError: the program is not compiled yet.
    """
    found = _with_suffix(entry, suffix)
    if found is not None:
        return found
    emulate = " ".join(
        f"--run-option {spec.name}.{name}={value}" for name, value in spec.emulation.items()
    )
    raise BundleError(
        f"`{entry.spec.name}` is not compiled for `{spec.name}` yet",
        why=f"the bundle contains {', '.join(entry.files)} for the vendor's compiler, and no {suffix} file",
        hint=f"compile it with `whisperport compile BUNDLE`, or emulate it on the CPU with `{emulate}`",
    )


def lowered_file(spec: TargetSpec, entry: ProgramEntry, suffix: str) -> str:
    """Return the file of a program that the CPU can emulate, relative to the bundle.

    Raises:
        BundleError: the bundle contains no such file.
    """
    found = _with_suffix(entry, suffix)
    if found is not None:
        return found
    raise BundleError(
        f"cannot emulate `{entry.spec.name}` of `{spec.name}` on the CPU",
        why=f"the bundle contains {', '.join(entry.files)}, and no {suffix} file",
        hint=f"export it again with `whisperport export CHECKPOINT --target {spec.name} --out BUNDLE`",
    )


def emulated_onnx(
    spec: TargetSpec, folder: Path, entries: Sequence[ProgramEntry], threads: int | None
) -> dict[str, Runner]:
    """Return runners on the CPU of programs whose lowered files are ONNX files.

    Raises:
        BundleError: the bundle contains no such file of a program, or a file is damaged.
    """
    return {
        entry.spec.name: OnnxRunner(
            entry.spec, OnnxGraph.of(folder, entry, lowered_file(spec, entry, ".onnx")), threads
        )
        for entry in entries
    }


def _with_suffix(entry: ProgramEntry, suffix: str) -> str | None:
    return next((file for file in entry.files if file.endswith(suffix)), None)
