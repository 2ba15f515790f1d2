"""Compile programs with vendors' compilers: those of a bundle, or a lowered program in a file of its own.

If a vendor's SDK can run the quantized or compiled program on the CPU, one stage runs it, and its outputs
are compared with those of the lowered program.

    BUNDLE            unchanged until everything is compiled, then replaced
    FILE              unchanged; `STEM-TARGET` beside it gets the result when everything is compiled
    OUTPUT.compile    work folder, see `compiling.py`
"""

import os
from pathlib import Path

from whisperport.build.compile.bundle_source import BundleSource
from whisperport.build.compile.compiling import compile_groups, groups_of
from whisperport.build.compile.file_source import FileSource
from whisperport.build.compile.options import CompileOptions
from whisperport.build.compile.source import Compiled, Source
from whisperport.build.compile.work_folder import work_folder
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.system.outputs import is_inside, is_same
from whisperport.targets import TARGETS


def compile(
    path: str | os.PathLike[str],
    options: CompileOptions | None = None,
) -> Compiled:
    """Compile every program of a bundle whose target has a vendor's compiler, or one lowered program.

    Args:
        path: folder of a bundle, which is replaced when everything is compiled; or a file that `lower`
            wrote, or another third-party program of the format that the target's compiler reads.
        options: see `CompileOptions`. Default: None, all defaults.

    Returns:
        The compiled programs, and the folder that was written.

    Raises:
        BundleError: the bundle is damaged or cannot be replaced, or a compiled file does not fit it.
        UsageError: no program of the bundle needs a compiler, or an option or interpreter does not exist,
            or is for a bundle or a file only.
        AudioError: the audio files or inputs are missing, too few, or unsuitable for calibration.
        ProgramError: the file, or a sample of its inputs, is damaged or does not fit.
        MissingPackageError: an SDK is not installed. The work folder holds everything that the SDK needs.
        LoweringError: the compiler does not support this target or failed, or the model is too large.
        VerificationError: a program disagrees with its reference in the vendor's simulator, or in emulation
            on the CPU where there is no simulator. Nothing was written.
    """
    options = options or CompileOptions()
    source = _source(Path(path), options)
    out = source.out if source.out.name else source.out.resolve()  # `.` has no name
    work = options.work or out.with_name(f"{out.resolve().name}.compile")
    groups = groups_of(source, options, work)
    samples = any(group.needs_samples(source.dims) for group in groups)
    source.check(samples=samples)
    for group in groups:
        group.check_sdk()
    if is_same(work, source.out) or is_inside(work, source.out):
        raise UsageError(
            f"the work folder {work} cannot be inside {source.out}",
            why="the complete folder is written in one step",
            hint="omit `--work` to use a folder beside it",
        )
    with work_folder(work):
        source.quantize(work)
        return compile_groups(source, groups, options.allow_unverified)


def _source(path: Path, options: CompileOptions) -> Source:
    """Return a bundle, or a file if the user names its target."""
    if path.is_dir() or not (path.is_file() or options.target):
        options.check_only("calibration")
        return BundleSource(Bundle.open(path), options)
    if not options.target:
        names = ", ".join(target.spec.name for target in TARGETS if target.compiler)
        raise UsageError(
            f"{path} is one program, which can be compiled for several targets",
            why="`--target` is missing",
            hint=f"name one with `--target`: {names}",
        )
    options.check_only("inputs", "target", "precision", "out")
    return FileSource(path, options)
