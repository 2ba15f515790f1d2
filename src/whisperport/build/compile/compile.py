"""Compile programs with vendors' compilers: those of a bundle, or a lowered program in a file of its own.

If a vendor's SDK can run the quantized or compiled program on the CPU, one stage runs it, and its outputs
are compared with those of the lowered program.

    BUNDLE            unchanged until everything is compiled, then replaced
    FILE              unchanged; `STEM-TARGET` beside it gets the result when everything is compiled
    OUTPUT.compile    work folder, see `compiling.py`
"""

import os
from pathlib import Path

from whisperport.build.compile.compile_bundle import compile_bundle
from whisperport.build.compile.compile_file import compile_file
from whisperport.build.compile.compile_options import CompileOptions
from whisperport.build.compile.compiled import Compiled
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
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
    path, options = Path(path), options or CompileOptions()
    if path.is_dir() or not (path.is_file() or options.target):
        options.check_only("calibration")
        return compile_bundle(Bundle.open(path), options)
    if not options.target:
        names = ", ".join(target.spec.name for target in TARGETS if target.compiler)
        raise UsageError(
            f"{path} is one program, which can be compiled for several targets",
            why="`--target` is missing",
            hint=f"name one with `--target`: {names}",
        )
    options.check_only("inputs", "target", "precision", "out")
    return compile_file(path, options)
