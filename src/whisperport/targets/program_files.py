"""The files of a program for a target with a vendor's compiler: the lowered one, and the compiled one."""

from collections.abc import Sequence
from pathlib import Path

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.errors import BundleError
from whisperport.program.spec import TargetSpec


def compiled_files(
    spec: TargetSpec, folder: Path, entries: Sequence[ProgramEntry], suffix: str
) -> dict[str, Path]:
    """Return name of a program -> the file that the vendor's compiler made of it.

    Raises:
        BundleError: a program is not compiled yet, or its file is not a regular file of the bundle.
    """
    return {
        one.spec.name: regular_file(folder, _compiled_file(spec, one, suffix)) for one in entries
    }


def lowered_file(spec: TargetSpec, entry: ProgramEntry) -> str:
    """Return the file of a program that the CPU can emulate, relative to the bundle.

    Raises:
        BundleError: the bundle contains no such file.
    """
    suffix = spec.lowered_suffix
    found = _with_suffix(entry, suffix)
    if found is not None:
        return found
    raise BundleError(
        f"cannot emulate `{entry.spec.name}` of `{spec.name}` on the CPU",
        why=f"the bundle contains {', '.join(entry.files)}, and no {suffix} file",
        hint=f"export it again with `whisperport export CHECKPOINT --target {spec.name} --out BUNDLE`",
    )


def _compiled_file(spec: TargetSpec, entry: ProgramEntry, suffix: str) -> str:
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


def _with_suffix(entry: ProgramEntry, suffix: str) -> str | None:
    return next((file for file in entry.files if file.endswith(suffix)), None)
